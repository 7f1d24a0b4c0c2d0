"""The facts of a batch, from the forward context that an engine has set."""

from __future__ import annotations

from typing import Any

from dispatchkit.execute import ForwardContext
from dispatchkit.keys import RuntimeMode, allowed_modes_code

__all__ = ["facts_of"]


def facts_of(context: ForwardContext, num_rows: int, query_lens: tuple[int, ...]) -> dict[str, Any]:
    """Return the facts of a batch from a forward context, as arguments of a runner."""
    descriptor = context.descriptor
    ceiling = allowed_modes_code([RuntimeMode.NONE, context.runtime_mode])
    if descriptor is None:
        return {"ceiling": ceiling}
    num_reqs = getattr(descriptor, "num_reqs", None) or 0
    uniform = 0
    if getattr(descriptor, "uniform", False):
        query_len = getattr(descriptor, "query_len", query_lens[0])
        uniform = 1 + query_lens.index(query_len) if query_len in query_lens else 0
    loras = getattr(descriptor, "num_active_loras", 0)
    return {
        "num_reqs": min(num_reqs, num_rows),
        "uniform": uniform,
        "loras": loras,
        "ceiling": ceiling,
    }
