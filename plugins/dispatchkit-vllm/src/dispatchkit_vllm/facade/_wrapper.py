"""vLLM's graph wrapper built on GraphWrapper, with the behaviour of each release as data."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from dispatchkit_vllm.wrapper import (
    BackendDevice,
    GraphWrapper,
    NoForwardContextError,
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

_log = logging.getLogger(__name__)
_device: list[Any] = []


def use_device(device: Any) -> None:
    """Choose the device for wrappers that are created from now on.

    Args:
        device: A backend, the name of one (``"cuda"``, ``"tape"``) or a WrapperDevice.
            All wrappers created with it share its pool.
    """
    _device[:] = [device if hasattr(device, "weak_ref") else BackendDevice(device)]


def current_device() -> Any:
    """Return the wrappers' device: the chosen one, otherwise CUDA, or the tape without CUDA."""
    if not _device:
        import torch

        use_device("cuda" if torch.cuda.is_available() else "tape")
    return _device[0]


class CUDAGraphWrapper(GraphWrapper):
    """Add capture and replay to a callable, controlled by the forward context.

    Args:
        runnable: The callable.
        vllm_config: vLLM's configuration; stored for code that reads it.
        runtime_mode: PIECEWISE or FULL.
        cudagraph_options: How to capture.

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
        if hasattr(runtime_mode, "name"):
            self.runtime_mode = runtime_mode  # keep the given member of vLLM's own enum
        self.vllm_config = vllm_config
        self.compilation_config = getattr(vllm_config, "compilation_config", None)
        self.cudagraph_options = options

    @property
    def concrete_cudagraph_entries(self) -> dict[Any, CUDAGraphEntry]:
        """The graphs by descriptor."""
        return self.entries

    @property
    def graph_pool(self) -> Any:
        """The pool of captures; None: each capture uses a separate pool."""
        return self._pool

    @graph_pool.setter
    def graph_pool(self, pool: Any) -> None:
        self._pool = pool

    def _context_is_available(self) -> bool:
        found = super()._context_is_available()
        if not found and _vllm_has_context():
            _told.warn(_WHOSE_CONTEXT)
        return found

    def _get_context(self) -> Any:
        if not super()._context_is_available() and _vllm_has_context():
            raise NoForwardContextError(_WHOSE_CONTEXT)
        return super()._get_context()

    @property
    def cudagraph_wrapper(self) -> CUDAGraphWrapper:
        """This wrapper, for code that accesses it through attributes."""
        return self


class _Absent:
    """A name that a release does not have: looking it up reaches the callable."""

    def __get__(self, instance: object, owner: type[Any]) -> Any:
        raise AttributeError(f"{owner.__name__} has no such name in this release of vLLM")


class OldCUDAGraphWrapper(CUDAGraphWrapper):
    """The wrapper of the 0.11 line and of 0.13.

    It reads the forward context without checking that there is one, accepts None as a key,
    and cannot clear graphs.
    """

    release_rules = OLD_RULES
    clear_graphs: Any = _Absent()
    clear_all_graphs: Any = _Absent()


_WHOSE_CONTEXT = (
    "vLLM's own forward context is set, which this wrapper does not read: it captures and replays "
    "inside dispatchkit_vllm.wrapper.set_forward_context, and runs its callable directly elsewhere."
)


class _Told:
    """Warn once per process."""

    def __init__(self) -> None:
        self.is_done: bool = False

    def warn(self, text: str) -> None:
        if not self.is_done:
            self.is_done = True
            _log.warning("%s", text)


_told = _Told()


def _vllm_has_context() -> bool:
    module = sys.modules.get("vllm.forward_context")
    if module is None:
        return False
    ask = getattr(module, "is_forward_context_available", None)
    return bool(ask()) if ask else getattr(module, "_forward_context", None) is not None
