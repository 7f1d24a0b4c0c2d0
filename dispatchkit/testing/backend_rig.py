"""The fixture of the backend tests, and tables of functions to capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs

from dispatchkit.backends.base import CapturedGraph, GraphBackend, Stream
from dispatchkit.errors import CaptureError


@attrs.define
class Rig:
    """A backend under test, with a stream, a pool and helper methods.

    Attributes:
        torch: The torch module.
        backend: The backend under test.
        stream: Stream for captures.
        pool: Pool for captures.
    """

    torch: Any
    backend: GraphBackend
    stream: Stream
    pool: Any

    def zeros(self, *shape: int, **options: Any) -> Any:
        """Return zeros on the backend's device."""
        return self.torch.zeros(*shape, device=self.backend.torch_device, **options)

    def randn(self, *shape: int) -> Any:
        """Return normally distributed numbers on the backend's device."""
        return self.torch.randn(*shape, device=self.backend.torch_device)

    def occupy(self, times: int = 1) -> None:
        """Occupy the device with ``times`` units of work (10 ms each on CUDA); can be captured."""
        for _ in range(times):
            if self.backend.torch_device == "cpu":
                self.zeros(8, 8).add_(1).mul_(2)
            else:
                self.torch.cuda._sleep(20_000_000)  # noqa: SLF001 - no public API delays the device

    def generator(self, seed: int = 7) -> Any:
        """Return a new generator on the backend's device."""
        return self.torch.Generator(device=self.backend.torch_device).manual_seed(seed)

    def default_generator(self) -> Any:
        """Return the default generator of the backend's device."""
        device = self.torch.device(self.backend.torch_device)
        if device.type == "cpu":
            return self.torch.default_generator
        index = self.torch.cuda.current_device() if device.index is None else device.index
        return self.torch.cuda.default_generators[index]

    def capture(self, run: Callable[[], Any], **options: Any) -> CapturedGraph:
        """Capture a callable on the rig's stream into its pool."""
        return self.backend.capture(run, stream=self.stream, pool=self.pool, **options)

    def refused(self, what: str, run: Callable[[], Any], *, reason: str = "") -> CaptureError:
        """Check that a capture fails with the given reason, and return the error."""
        try:
            self.capture(run)
        except CaptureError as error:
            if reason and error.reason != reason:
                problem = f"{what}: the reason is {error.reason!r}, but must be {reason!r}."
                raise AssertionError(problem) from error
            return error
        raise AssertionError(f"{what}: the capture did not raise CaptureError.")

    def warm_capture(self, run: Callable[[], Any], **options: Any) -> CapturedGraph:
        """Capture after a warmup, because the first run may initialize a library."""
        self.backend.warmup(run, stream=self.stream)
        return self.capture(run, **options)

    def read(self, tensor: Any) -> Any:
        """Synchronize, and return a tensor's values."""
        self.backend.synchronize()
        return tensor.tolist()

    def replayed(self, graph: CapturedGraph) -> Any:
        """Replay a graph, and return a copy of its output tensor."""
        graph.replay()
        self.backend.synchronize()
        return graph.outputs.clone()

    def equal(self, left: Any, right: Any) -> bool:
        """Synchronize, and return whether two tensors are equal."""
        self.backend.synchronize()
        return bool(self.torch.equal(left, right))


class Pair(NamedTuple):
    """A named tuple, for tests of nested outputs."""

    first: Any
    second: Any


class PlannedError(Exception):
    """Raised by callables that fail on purpose."""


# -- pure functions of a float tensor of shape (4, 8) -------------------------------------------


def _chain(torch: Any, x: Any) -> Any:
    return ((x * 2 + 1).relu() - 0.5).tanh() / 3


def _matmul(torch: Any, x: Any) -> Any:
    return (x @ x.t()).softmax(-1) @ x


def _views(torch: Any, x: Any) -> Any:
    return x.view(2, 16).t()[3:9].reshape(-1).unflatten(0, (3, 4)).contiguous() + x[0, 0]


def _reductions(torch: Any, x: Any) -> Any:
    return torch.cat([x.sum(0), x.mean(1), x.max(1).values, x.amin(0), x.cumsum(0).flatten()])


def _sorting(torch: Any, x: Any) -> Any:
    values, indices = x.topk(3, dim=1)
    return values + x.gather(1, indices) + x.sort(dim=1).values[:, :3] + indices


def _indexing(torch: Any, x: Any) -> Any:
    rows = torch.argsort(x[:, 0])
    return x[rows][:, rows] + x.index_select(0, rows)[:, :4]


def _casts(torch: Any, x: Any) -> Any:
    return (
        (x.to(torch.bfloat16) * 3).float()
        + x.to(torch.int64).to(torch.float32)
        + x.double().float()
    )


def _attention(torch: Any, x: Any) -> Any:
    heads = x.view(1, 4, 2, 4).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def _norms(torch: Any, x: Any) -> Any:
    functional = torch.nn.functional
    return functional.gelu(functional.layer_norm(x, (8,))) + functional.rms_norm(x, (8,))


def _in_place_on_own(torch: Any, x: Any) -> Any:
    y = x.clone()
    y.add_(1).mul_(2)
    y[1:3].zero_()
    y[:, 2] = x[:, 3]
    return y


def _factories(torch: Any, x: Any) -> Any:
    steps = torch.arange(8, device=x.device, dtype=x.dtype)
    return torch.where(x > 0, steps, torch.full_like(x, 3.0)) + torch.zeros_like(x) + x.new_ones(8)


def _masked(torch: Any, x: Any) -> Any:
    return x.masked_fill(x > 0, -1.0) + torch.tril(x) + x.clamp(-0.5, 0.5)


def _split(torch: Any, x: Any) -> Any:
    left, right = x.chunk(2, dim=1)
    first, second = x.split([3, 1])
    return left * right + torch.stack([first.sum(), second.sum()]).sum()


def _einsum(torch: Any, x: Any) -> Any:
    return torch.einsum("ij,kj->ik", x, x) + torch.outer(x[0, :4], x[1, :4])


def _complex(torch: Any, x: Any) -> Any:
    pairs = torch.view_as_complex(x.view(4, 4, 2))
    return torch.view_as_real(pairs.conj() * pairs * 2).flatten()


FUNCTIONS: tuple[Callable[[Any, Any], Any], ...] = (
    _chain,
    _matmul,
    _views,
    _reductions,
    _sorting,
    _indexing,
    _casts,
    _attention,
    _norms,
    _in_place_on_own,
    _factories,
    _masked,
    _split,
    _einsum,
    _complex,
)


# -- calls that wait for the device ------------------------------------------------------------

HOST_SYNCS: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda torch, x: x.sum().item(),
    "cpu": lambda torch, x: x.cpu(),
    "numpy": lambda torch, x: x.numpy(),
    "tolist": lambda torch, x: x.tolist(),
    "bool": lambda torch, x: bool(x.any()),
    "int": lambda torch, x: int(x[0, 0]),
    "float": lambda torch, x: float(x[0, 0]),
    "repr": lambda torch, x: repr(x),
    "nonzero": lambda torch, x: x.nonzero(),
    "mask": lambda torch, x: x[x > 0],
    "masked_select": lambda torch, x: torch.masked_select(x, x > 0),
    "unique": lambda torch, x: torch.unique(x),
    "equal": lambda torch, x: torch.equal(x, x + 1),
    "tensor_split_index": lambda torch, x: x[: x.sum().int()],
    "repeat_interleave": lambda torch, x: torch.repeat_interleave(
        x, torch.ones(4, dtype=torch.int64, device=x.device), dim=0
    ),
}

# -- draws -------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any, str, Any], Any]] = {
    "rand": lambda torch, device, g: torch.rand(16, device=device, generator=g),
    "randn": lambda torch, device, g: torch.randn(16, device=device, generator=g),
    "randint": lambda torch, device, g: torch.randint(99, (16,), device=device, generator=g),
    "uniform_": lambda torch, device, g: torch.empty(16, device=device).uniform_(generator=g),
    "normal_": lambda torch, device, g: torch.empty(16, device=device).normal_(generator=g),
    "exponential_": lambda torch, device, g: torch.empty(16, device=device).exponential_(
        generator=g
    ),
    "bernoulli": lambda torch, device, g: torch.bernoulli(
        torch.full((16,), 0.5, device=device), generator=g
    ),
    "two draws": lambda torch, device, g: (
        torch.rand(16, device=device, generator=g) + torch.randn(16, device=device, generator=g)
    ),
}
