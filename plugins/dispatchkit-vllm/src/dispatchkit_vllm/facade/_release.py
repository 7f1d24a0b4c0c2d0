"""Select the facade for a dispatcher class of vLLM, by the arguments of its ``dispatch``."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from dispatchkit.errors import BackendUnavailableError

from dispatchkit_vllm.facade import v0_11, v0_11_1, v0_12, v0_13, v0_15, v0_16, v0_33

#: Facades by the arguments of ``dispatch`` and the presence of ``get_capture_descs``.
_FORMS: dict[tuple[frozenset[str], bool], Any] = {
    (frozenset({"batch_descriptor"}), False): v0_11,
    (frozenset({"batch_descriptor", "use_cascade_attn"}), False): v0_11_1,
}
_COMMON_ARGUMENTS = {"num_tokens", "uniform_decode", "has_lora"}
for _more, _lists, _facade in (
    ({"use_cascade_attn"}, False, v0_12),
    ({"disable_full"}, False, v0_13),
    ({"disable_full"}, True, v0_15),
    ({"disable_full", "num_active_loras"}, True, v0_16),
    ({"num_active_loras", "valid_modes", "invalid_modes"}, True, v0_33),
):
    _FORMS[frozenset(_COMMON_ARGUMENTS | _more), _lists] = _facade


def dispatcher_for(original: type[Any]) -> type[Any]:
    """Return the facade for a ``CudagraphDispatcher`` of vLLM, with the types of its release.

    Args:
        original: vLLM's class; its module must define ``CUDAGraphMode`` and ``BatchDescriptor``.

    Raises:
        BackendUnavailableError: No facade matches the class.
    """
    takes = frozenset(inspect.signature(original.dispatch).parameters) - {"self"}
    facade = _FORMS.get((takes, hasattr(original, "get_capture_descs")))
    if facade is None:
        shown = ", ".join(sorted(takes))
        lists = "has" if hasattr(original, "get_capture_descs") else "lacks"
        raise BackendUnavailableError(
            f"{original.__name__} is not the dispatcher of a supported vLLM release: it {lists} "
            f"get_capture_descs(), and the arguments of its dispatch() are ({shown}). "
            "Install vLLM 0.11 to 0.33."
        )
    defined = sys.modules[original.__module__]
    return type(
        original.__name__,
        (facade.CudagraphDispatcher,),
        {
            "__module__": __name__,
            "__doc__": original.__doc__,
            "mode_type": defined.CUDAGraphMode,
            "descriptor_type": defined.BatchDescriptor,
            "breaks_graphs": staticmethod(_breaks_graphs),
        },
    )


def _breaks_graphs() -> bool:
    try:
        module = importlib.import_module("vllm.compilation.breakable_cudagraph")
    except ImportError:
        return False  # an earlier release
    return bool(module.is_breakable_cudagraph_enabled())
