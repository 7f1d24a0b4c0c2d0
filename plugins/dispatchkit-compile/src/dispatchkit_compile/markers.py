"""Names of the marks in a model's code, as a traced graph has them."""

from __future__ import annotations

BREAK = "dispatchkit::graph_break"
REGION_BEGIN = "dispatchkit::eager_begin"
REGION_END = "dispatchkit::eager_end"
