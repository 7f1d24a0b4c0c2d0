"""Skip `dispatchkit-smallest`, a policy written by `dispatchkit new-policy`, if not installed."""

from __future__ import annotations

import importlib.util

collect_ignore = (
    [] if importlib.util.find_spec("dispatchkit_smallest") else ["dispatchkit-smallest"]
)
