"""Names of the operators that mark split points in a traced graph."""

from __future__ import annotations

BREAK = "dispatchkit::graph_break"
REGION_BEGIN = "dispatchkit::eager_begin"
REGION_END = "dispatchkit::eager_end"
