"""vLLM's graph wrappers: GraphWrapper with the rules of each release."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from dispatchkit_vllm.wrapper import (
    GraphWrapper,
    NoForwardContextError,
    WrappedEntry,
    WrapperOptions,
    WrapperRules,
)
from dispatchkit_vllm.wrapper.device import resolve_device

CUDAGraphEntry = WrappedEntry
CUDAGraphOptions = WrapperOptions

OLD_RULES = WrapperRules(
    passes_without_context=False,
    needs_descriptor=False,
    offloads=False,
    names_stream=False,
    replays_after_capture=False,
    unwraps_nested=False,
    guards_module=False,
)
NEW_RULES = WrapperRules(replays_after_capture=False, guards_module=False)

_log = logging.getLogger(__name__)
_device: list[Any] = []


def use_device(device: Any) -> None:
    """Set the device for wrappers created after this call.

    Args:
        device: A backend, its name (``"cuda"``, ``"tape"``) or a WrapperDevice. Wrappers of a
            backend share one pool; a WrapperDevice chooses the pools.

    Raises:
        ConfigError: ``device`` is none of these.
    """
    _device[:] = [resolve_device(device)]


def current_device() -> Any:
    """Return the device for new wrappers; by default CUDA if available, otherwise the tape."""
    if not _device:
        import torch

        use_device("cuda" if torch.cuda.is_available() else "tape")
    return _device[0]


class CUDAGraphWrapper(GraphWrapper):
    """A wrapper that captures and replays a callable, controlled by the forward context.

    Args:
        runnable: Callable to capture.
        vllm_config: vLLM's configuration, stored for code that reads it.
        runtime_mode: PIECEWISE or FULL.
        cudagraph_options: Options of captures.

    Attributes:
        concrete_cudagraph_entries: The graphs, by descriptor.
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
            self.runtime_mode = runtime_mode  # keep the member of vLLM's enum
        self.vllm_config = vllm_config
        self.compilation_config = getattr(vllm_config, "compilation_config", None)
        self.cudagraph_options = options

    @property
    def concrete_cudagraph_entries(self) -> dict[Any, CUDAGraphEntry]:
        """The graphs, by descriptor."""
        return self.entries

    @property
    def graph_pool(self) -> Any:
        """The pool for captures; None for a separate pool per capture."""
        return self._pool

    @graph_pool.setter
    def graph_pool(self, pool: Any) -> None:
        self._pool = pool

    def _context_is_available(self) -> bool:
        found = super()._context_is_available()
        if not found and _vllm_has_context():
            _context_warning.warn(
                f"{_FOREIGN_CONTEXT}, so the callable runs without a graph. {_SET_CONTEXT}"
            )
        return found

    def _get_context(self) -> Any:
        if not super()._context_is_available() and _vllm_has_context():
            raise NoForwardContextError(f"{_FOREIGN_CONTEXT}. {_SET_CONTEXT}")
        return super()._get_context()

    @property
    def cudagraph_wrapper(self) -> CUDAGraphWrapper:
        """This wrapper; vLLM reads this attribute through objects that forward attributes."""
        return self


class _Absent:
    """An attribute that a release lacks, so the wrapper looks up the name on the callable."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type[Any]) -> Any:
        raise AttributeError(
            f"{owner.__name__} has no attribute {self._name!r}, because vLLM's wrapper lacks it in "
            "this release"
        )


class OldCUDAGraphWrapper(CUDAGraphWrapper):
    """The wrapper of vLLM 0.11.x and 0.13.

    It requires a forward context, accepts None as a key, and cannot clear graphs.
    """

    release_rules = OLD_RULES
    clear_graphs: Any = _Absent()
    clear_all_graphs: Any = _Absent()


_FOREIGN_CONTEXT = (
    "vLLM's forward context is set, but this wrapper reads only dispatchkit's context"
)
_SET_CONTEXT = "Run the step inside dispatchkit_vllm.wrapper.set_forward_context."


class _WarnOnce:
    """A warning that is logged once per process."""

    def __init__(self) -> None:
        self.has_warned: bool = False

    def warn(self, text: str) -> None:
        if not self.has_warned:
            self.has_warned = True
            _log.warning("%s", text)


_context_warning = _WarnOnce()


def _vllm_has_context() -> bool:
    module = sys.modules.get("vllm.forward_context")
    if module is None:
        return False
    ask = getattr(module, "is_forward_context_available", None)
    return bool(ask()) if ask else getattr(module, "_forward_context", None) is not None
