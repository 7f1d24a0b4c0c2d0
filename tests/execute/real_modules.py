"""Typical modules of libraries, run next to an eager twin on any device.

Each function runs one module both ways, compares results and state with the twin after every call,
and returns the number of replayed steps and the reasons of eager steps.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable

import attrs
import torch
from torch import nn

from dispatchkit import BufferOptions, GraphRunner, RunnerOptions, StaticInput, graphed
from dispatchkit.execute.step.values import VALUES_AT_ONCE


@attrs.frozen
class Played:
    """Counts of replayed and eager steps."""

    replayed: int
    eager: dict[str, int]


@attrs.frozen
class Way:
    """A way to run a module with graphs.

    Attributes:
        run: Function that calls the module.
        runners: Function that returns the runners made so far.
        invalidate: Function that invalidates the graphs after a change of what the module reads.
    """

    run: Callable
    runners: Callable
    invalidate: Callable

    def played(self) -> Played:
        """Return the counts of replayed and eager steps."""
        stats = [runner.stats() for runner in self.runners()]
        eager = sum((Counter(one.eager_by_reason) for one in stats), Counter())
        return Played(sum(one.steps_by_mode["FULL"] for one in stats), dict(eager))


def by_runner(step, inputs, backend, **settings):
    """Return a way that uses a lazy runner."""
    settings = {"sizes": (1, 2, 4), "mode": "FULL", "lazy": True, **settings}
    runner = GraphRunner(step, inputs, backend=backend, **settings)
    return Way(runner, lambda: [runner], runner.invalidate)


def by_graphed(step, _inputs, backend, **settings):
    """Return a way that uses ``graphed``."""
    fast = graphed(step, sizes=(1, 2, 4), backend=backend, **settings)
    return Way(fast, lambda: list(fast.graphed.runners), fast.graphed.invalidate)


WAYS = {"runner": by_runner, "graphed": by_graphed}


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


# -- voice detector: a script module that keeps its recurrent state -------------------------


class VoiceDetector(nn.Module):
    """A convolution, an LSTM whose state persists between chunks, and a probability."""

    def __init__(self, in_place: bool, device: str) -> None:
        super().__init__()
        self.in_place = in_place
        self.encoder = nn.Conv1d(1, 16, 8, stride=4)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 1)
        self.h = torch.zeros(1, 1, 16, device=device)  # ``to`` does not move attributes of a script
        self.c = torch.zeros(1, 1, 16, device=device)

    @torch.jit.export
    def reset_states(self, like: torch.Tensor) -> None:
        if self.in_place:
            self.h.zero_()
            self.c.zero_()
        else:
            self.h = torch.zeros(1, like.shape[0], 16, device=like.device)
            self.c = torch.zeros(1, like.shape[0], 16, device=like.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.encoder(x[:, None])).transpose(1, 2)
        y, (h, c) = self.lstm(y, (self.h, self.c))
        if self.in_place:
            self.h.copy_(h)
            self.c.copy_(c)
        else:
            self.h = h
            self.c = c
        return torch.sigmoid(self.head(y[:, -1]))


def play_voice_detector(way, device, backend, *, in_place):
    """Process two utterances in chunks, each after ``reset_states``."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        twin = torch.jit.script(VoiceDetector(in_place, device).eval().to(device))
        model = copy.deepcopy(twin)
    inputs = {"x": StaticInput((None, 64), "float32")}
    # Its state has one row, so a probe with two rows is impossible.
    buffers = BufferOptions(output_batch_dims=0)
    run = WAYS[way](model, inputs, backend, options=RunnerOptions(buffers=buffers))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            for one in (model, twin):
                one.reset_states(torch.zeros(1, device=device))
            for _ in range(6):
                x = torch.randn(1, 64, device=device)
                same(run.run(x), twin(x))
                same(model.h, twin.h)
                same(model.c, twin.c)
    return run.played()


# -- encoder whose batches are padded along the length --------------------------------------


def play_encoder(way, device, backend, *, nested):
    """Encode batches of varying size and lengths."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval().to(device)

    def step(src, padding):
        return model(src, src_key_padding_mask=padding)

    inputs = {
        "src": StaticInput((None, 24, 32), "float32"),
        "padding": StaticInput((None, 24), "bool"),
    }
    run = WAYS[way](step, inputs, backend)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (4, 3, 2, 1, 3, 4):
            lengths = torch.randint(4, 25, (rows, 1), device=device)
            lengths[0] = 24  # the fast path cuts to the longest
            padding = torch.arange(24, device=device)[None] >= lengths
            src = torch.randn(rows, 24, 32, device=device)
            got, want = run.run(src, padding), step(src, padding)
            assert got.shape == want.shape
            same(got[~padding], want[~padding])
    return run.played()


# -- normalisation in training ----------------------------------------------------------------


def play_batch_norm(way, device, backend):
    """Recalibrate statistics: train a module without gradients, then evaluate it."""
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    twin.requires_grad_(False)
    model = copy.deepcopy(twin)
    run = WAYS[way](model, {"input": StaticInput((None, 8), "float32")}, backend)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for training in (True, False, True):
            for one in (model, twin):
                one.train(training)
            for rows in (4, 3, 2, 4, 2, 4):
                x = torch.randn(rows, 8, device=device)
                same(run.run(x), twin(x))
                for name, buffer in twin.named_buffers():
                    same(model.get_buffer(name), buffer)
    return run.played()


# -- adapters that their library switches and scales ----------------------------------------


def _is_seen(got, before, want):
    """Return whether a result reflects a change; otherwise it must equal the result before it."""
    is_new = torch.allclose(got, want, 1e-3, 1e-4)
    if not is_new:
        same(got, before)
    return is_new


def play_lora(way, device, backend, peft):
    """Switch, scale and disable adapters; changes show within the stated number of steps."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"], init_lora_weights=False)
    twin = peft.get_peft_model(base, config, adapter_name="one")
    twin.add_adapter("two", config)
    twin.eval().to(device)
    model = copy.deepcopy(twin)
    for one in (model, twin):
        one.requires_grad_(False)

    def step(x):
        return model(x)

    run = WAYS[way](step, {"x": StaticInput((None, 16), "float32")}, backend)

    def scale(one):
        for module in one.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(0.25)

    changes = [
        lambda one: one.set_adapter("two"),
        scale,
        lambda one: one.set_adapter("one"),
        lambda one: one.base_model.disable_adapter_layers(),
        lambda one: one.base_model.enable_adapter_layers(),
    ]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(3, 16, device=device)
        for _ in range(3):
            same(run.run(x), twin(x))
        for is_said, change in zip((False, True, False, True, False), changes, strict=True):
            before = twin(x)
            for one in (model, twin):
                change(one)
                one.requires_grad_(False)
            want = twin(x)
            assert not torch.allclose(want, before)
            if is_said:
                run.invalidate()
                same(run.run(x), want)
                continue
            watches = [
                step.values
                for runner in run.runners()
                for lane in runner.lanes
                for step in lane.lifecycle.live().values()
            ]
            bound = max(watch.num_values for watch in watches) + VALUES_AT_ONCE
            # Only the old results until the change shows; only new ones after it.
            assert any(_is_seen(run.run(x), before, want) for _ in range(bound + 1))
            for _ in range(3):
                same(run.run(x), want)
    return run.played()
