"""Common models with random weights, and calls of varying sizes for ``front.py``."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import nn

Shape = tuple[int | str | None, ...]


class MissingPackageError(Exception):
    """A package is not installed or cannot be imported.

    Attributes:
        package: Name of the package.
    """

    def __init__(self, package: str, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.package = package


def _import(name: str) -> Any:
    """Import and return a module.

    Raises:
        MissingPackageError: The import failed for any reason.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package for another torch version may raise anything
        raise MissingPackageError(name.partition(".")[0], error) from error


#: One small model of each model family in timm.
TIMM = """
resnet18 resnext50_32x4d seresnet18 res2net50_26w_4s resnest14d skresnet18 resnetv2_50 dpn68
densenet121 vgg11
inception_v3 inception_v4 inception_resnet_v2 xception41 legacy_xception
mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small mnasnet_small efficientnet_b0
efficientnetv2_rw_t tinynet_e ghostnet_050 hardcorenas_a fbnetc_100 spnasnet_100 mixnet_s
regnetx_002 regnety_002 nfnet_l0 dm_nfnet_f0 rexnet_100 rexnetr_200 hrnet_w18_small dla34
cspresnet50
cspdarknet53 selecsls42 repvgg_a0 mobileone_s0 repghostnet_050 fasternet_t0 starnet_s1 tresnet_m
vovnet39a ese_vovnet19b_dw convnext_atto convnextv2_atto convmixer_768_32 inception_next_tiny
vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224
cait_xxs24_224 xcit_nano_12_p16_224 crossvit_tiny_240 convit_tiny levit_128s mixer_s32_224
gmlp_s16_224 resmlp_12_224 pit_ti_224 tnt_s_patch16_224 twins_pcpvt_small visformer_tiny
volo_d1_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 coat_tiny
coatnet_nano_rw_224 maxvit_nano_rw_256 mobilevit_xxs mobilevitv2_050 poolformer_s12 pvt_v2_b0
mvitv2_tiny edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvit_b0
efficientvit_m0 fastvit_t8 repvit_m0_9 focalnet_tiny_srf gcvit_xxtiny davit_tiny nest_tiny
nextvit_small sequencer2d_s tiny_vit_5m_224 hiera_tiny_224 eva02_tiny_patch14_224
vit_small_patch16_dinov3 shvit_s1 hgnet_tiny
""".split()


@attrs.frozen
class Model:
    """A model and its calls.

    Attributes:
        module: Module, called with inputs by name, or by position if ``positional``.
        inputs: Shape of each input, with None for the batch dimension and a name for every other
            dimension that varies.
        calls: Inputs of each call.
        positional: Whether inputs are passed by position.
        fills: Padding values of inputs that are not padded with 0.
    """

    module: Any
    inputs: dict[str, Shape]
    calls: list[dict[str, torch.Tensor]]
    positional: bool = True
    fills: dict[str, float] = attrs.field(factory=dict)

    def call(self, module: Any, inputs: dict[str, torch.Tensor]) -> Any:
        """Call a plain or graphed module with inputs."""
        return module(*inputs.values()) if self.positional else module(**inputs)


Maker = Callable[[torch.device], Model]


def _sizes(count: int = 12, rows: int = 8, length: int = 120) -> Iterator[tuple[int, int]]:
    draw = random.Random(0)
    for _ in range(count):
        yield draw.randint(1, rows), draw.randint(8, length)


def _images(module: nn.Module, device: torch.device, shape: tuple[int, ...]) -> Model:
    calls = [{"x": torch.randn(rows, *shape, device=device)} for rows, _ in _sizes()]
    return Model(module, {"x": (None, *shape)}, calls)


def _timm(name: str) -> Maker:
    def make(device: torch.device) -> Model:
        timm = _import("timm")
        module = timm.create_model(name, pretrained=False).eval().to(device)
        return _images(module, device, tuple(module.pretrained_cfg["input_size"]))

    return make


class Silero(nn.Module):
    """A voice detector like Silero: a spectrum, convolutions and a recurrent state."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Conv1d(1, 130, 256, stride=64)
        self.encoder = nn.Sequential(
            nn.Conv1d(65, 128, 3, padding=1), nn.ReLU(), nn.Conv1d(128, 64, 3, 2, 1), nn.ReLU()
        )
        self.rnn = nn.LSTM(64, 64, 2, batch_first=True)
        self.decoder = nn.Linear(64, 1)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        real, imaginary = self.spectrum(x[:, None]).chunk(2, 1)
        y = self.encoder((real**2 + imaginary**2).sqrt())
        y, (h, c) = self.rnn(y.transpose(1, 2), (h, c))
        return self.decoder(y[:, -1]).sigmoid(), h, c


class SpeakerEmbedding(nn.Module):
    """A speaker embedding like Resemblyzer: LSTM, projection and normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.rnn(mels)
        y = self.linear(hidden[-1]).relu()
        return y / y.norm(dim=1, keepdim=True)


def _silero(device: torch.device) -> Model:
    module = torch.jit.script(Silero().eval().to(device))
    calls = [
        {
            "x": torch.randn(rows, 512, device=device),
            "h": torch.zeros(2, rows, 64, device=device),
            "c": torch.zeros(2, rows, 64, device=device),
        }
        for rows, _ in _sizes()
    ]
    return Model(module, {"x": (None, 512), "h": (2, None, 64), "c": (2, None, 64)}, calls)


def _voice(device: torch.device) -> Model:
    return _images(SpeakerEmbedding().eval().to(device), device, (160, 40))


def _lstm(device: torch.device) -> Model:
    class Last(nn.LSTM):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    return _images(Last(64, 128, 2, batch_first=True).eval().to(device), device, (50, 64))


def _transformer(device: torch.device) -> Model:
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, activation="gelu")
    module = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval().to(device)
    return _images(module, device, (64, 256))


def _added_mask(device: torch.device) -> Model:
    """Return transformer layers with an additive mask, called with varying size and length."""
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.encoder(x, src_key_padding_mask=mask)
            return y

    calls = []
    for rows, length in _sizes(24):
        mask = torch.zeros(rows, length, device=device)
        mask[0, max(1, length // 2) :] = -torch.inf
        calls.append({"x": torch.randn(rows, length, 256, device=device), "mask": mask})
    inputs: dict[str, Shape] = {"x": (None, "length", 256), "mask": (None, "length")}
    fills = {"mask": -torch.inf}
    return Model(Masked().eval().to(device), inputs, calls, fills=fills)


def _resnet(device: torch.device) -> Model:
    module = _import("torchvision.models").resnet18().eval().to(device)
    return _images(module, device, (3, 224, 224))


def _text(module: nn.Module, device: torch.device) -> Model:
    calls = []
    for rows, length in _sizes(24):
        ids = torch.randint(1, 1000, (rows, length), device=device)
        mask = torch.ones_like(ids)
        mask[0, max(1, length // 2) :] = 0
        calls.append({"input_ids": ids, "attention_mask": mask})
    shape = (None, "length")
    inputs: dict[str, Shape] = {"input_ids": shape, "attention_mask": shape}
    return Model(module.eval().to(device), inputs, calls, positional=False)


def _bert_module() -> nn.Module:
    transformers = _import("transformers")
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
    )
    module: nn.Module = transformers.BertModel(config)
    return module


def _bert(device: torch.device) -> Model:
    return _text(_bert_module(), device)


def _sentences(device: torch.device) -> Model:
    """Return a BERT model with the pooling of sentence-transformers, called with token ids."""
    pooling = _import("sentence_transformers.models").Pooling(384)

    class Sentences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.pooling = _bert_module(), pooling

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            states = self.bert(input_ids=input_ids, attention_mask=attention_mask)[0]
            features = {"token_embeddings": states, "attention_mask": attention_mask}
            found: torch.Tensor = self.pooling(features)["sentence_embedding"]
            return found

    return _text(Sentences(), device)


def _whisper(device: torch.device) -> Model:
    transformers = _import("transformers")
    config = transformers.WhisperConfig(
        d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6
    )
    module = transformers.WhisperModel(config).get_encoder().eval().to(device)
    return _images(module, device, (80, 3000))


def _conformer(device: torch.device) -> Model:
    """Return torchaudio's conformer, which reads the largest length on the host."""
    module = _import("torchaudio.models").Conformer(80, 4, 256, 4, 31)
    return _of_lengths(module, device)


def _conformer_layers(device: torch.device) -> Model:
    """Return the layers of the conformer, with a mask for the padded length."""
    layers = _import("torchaudio.models").Conformer(80, 4, 256, 4, 31).conformer_layers

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            hidden = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
            y = x.transpose(0, 1)
            for layer in self.layers:
                y = layer(y, hidden)
            return y.transpose(0, 1)

    return _of_lengths(Layers(), device)


def _of_lengths(module: nn.Module, device: torch.device) -> Model:
    calls = [
        {
            "x": torch.randn(rows, 100, 80, device=device),
            "lengths": torch.full((rows,), 100, device=device),
        }
        for rows, _ in _sizes()
    ]
    return Model(module.eval().to(device), {"x": (None, 100, 80), "lengths": (None,)}, calls)


def _gcn(device: torch.device) -> Model:
    """Return a graph convolutional network, called with node features of one fixed graph."""
    convolution = _import("torch_geometric.nn").GCNConv
    edges = torch.randint(0, 200, (2, 800), device=device)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # The graph is fixed, so its normalization is computed once.
            self.first = convolution(16, 64, cached=True)
            self.second = convolution(64, 7, cached=True)
            self.register_buffer("edges", edges)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(self.first(x, self.edges).relu(), self.edges)
            return found

    return _images(Net().eval().to(device), device, (200, 16))


def _unet(device: torch.device) -> Model:
    """Return a UNet, called as in a DDIM loop of 12 steps."""
    diffusers = _import("diffusers")
    module = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    module = module.eval().to(device)
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(12)
    sample = torch.randn(4, 3, 32, 32, device=device)
    calls = []
    with torch.no_grad():
        for step in scheduler.timesteps:
            time = step.to(device).expand(4).contiguous()
            calls.append({"sample": sample, "timestep": time})
            sample = scheduler.step(module(sample, time).sample, step, sample).prev_sample
    return Model(module, {"sample": (None, 3, 32, 32), "timestep": (None,)}, calls)


MODELS: dict[str, Maker] = {
    "silero-like (TorchScript)": _silero,
    "resemblyzer-like LSTM": _voice,
    "LSTM": _lstm,
    "TransformerEncoder": _transformer,
    "TransformerEncoder, added mask, batch and length": _added_mask,
    "torchvision resnet18": _resnet,
    "BERT, batch and length": _bert,
    "sentence-transformers": _sentences,
    "Whisper encoder": _whisper,
    "torchaudio conformer": _conformer,
    "torchaudio conformer layers": _conformer_layers,
    "torch-geometric GCN": _gcn,
    "diffusers UNet, DDIM": _unet,
    **{f"timm {name}": _timm(name) for name in TIMM},
}
#: Models that are also measured with torch.compile, at one batch size.
COMPILED = (
    *("silero-like (TorchScript)", "TransformerEncoder", "BERT, batch and length"),
    *("Whisper encoder", "torchvision resnet18", "timm resnet18", "timm vit_tiny_patch16_224"),
    *("timm convnext_atto", "timm mobilenetv3_small_050", "timm swin_tiny_patch4_window7_224"),
)
