"""vLLM's graph wrapper over the core's, with the habits of each release as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from dispatchkit.execute import (
    BackendDevice,
    GraphWrapper,
    WrappedEntry,
    WrapperOptions,
    WrapperRules,
)

CUDAGraphEntry = WrappedEntry
CUDAGraphOptions = WrapperOptions

OLD_RULES = WrapperRules(
    passes_without_context=False,
    needs_descriptor=False,
    offloads=False,
    names_stream=False,
    replays_after_capture=False,
    unwraps_all=False,
    guards_module=False,
)
NEW_RULES = WrapperRules(replays_after_capture=False, guards_module=False)

_device: list[Any] = []


def use_device(device: Any) -> None:
    """Choose where wrappers made from now on capture.

    Args:
        device: A backend, the name of one (``"cuda"``, ``"tape"``) or a WrapperDevice.
            All wrappers made with it share its pool.
    """
    _device[:] = [device if hasattr(device, "weak_ref") else BackendDevice(device)]


def current_device() -> Any:
    """Return where wrappers capture: the device chosen, or CUDA, or the tape without it."""
    if not _device:
        import torch

        use_device("cuda" if torch.cuda.is_available() else "tape")
    return _device[0]


class CUDAGraphWrapper(GraphWrapper):
    """Adds capture and replay to a callable, by the forward context.

    Args:
        runnable: What to run.
        vllm_config: vLLM's configuration; kept for those who read it.
        runtime_mode: PIECEWISE or FULL.
        cudagraph_options: How it captures.

    Attributes:
        concrete_cudagraph_entries: The graphs by descriptor.
    """

    release_rules: ClassVar[WrapperRules] = NEW_RULES
    _own: ClassVar[frozenset[str]] = GraphWrapper._own | {  # noqa: SLF001 - extends it
        "vllm_config",
        "compilation_config",
        "cudagraph_options",
    }

    def __init__(
        self,
        runnable: Callable[..., Any],
        vllm_config: Any,
        runtime_mode: Any,
        cudagraph_options: CUDAGraphOptions | None = None,
    ) -> None:
        options = CUDAGraphOptions() if cudagraph_options is None else cudagraph_options
        super().__init__(
            runnable, runtime_mode, current_device(), options=options, rules=self.release_rules
        )
        self.vllm_config = vllm_config
        self.compilation_config = getattr(vllm_config, "compilation_config", None)
        self.cudagraph_options = options

    @property
    def concrete_cudagraph_entries(self) -> dict[Any, CUDAGraphEntry]:
        """The graphs by descriptor."""
        return self.entries

    @property
    def cudagraph_wrapper(self) -> CUDAGraphWrapper:
        """This wrapper, for code that looks for it through attributes."""
        return self


class OldCUDAGraphWrapper(CUDAGraphWrapper):
    """The wrapper of the 0.11 line and of 0.13.

    It asks for the forward context without looking whether there is one, and takes None
    for a key.
    """

    release_rules = OLD_RULES
