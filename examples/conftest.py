"""Skip the policy written by `dispatchkit new-policy` unless it is installed."""

from __future__ import annotations

import importlib.util

collect_ignore = (
    [] if importlib.util.find_spec("dispatchkit_smallest") else ["dispatchkit-smallest"]
)
