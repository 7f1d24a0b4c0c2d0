"""Logger for messages inside vLLM; it inherits the settings of vLLM's logger."""

from __future__ import annotations

import logging

__all__ = ["log"]

log = logging.getLogger("vllm.dispatchkit")
