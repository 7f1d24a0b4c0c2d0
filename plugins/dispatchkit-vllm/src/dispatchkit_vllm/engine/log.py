"""The logger for messages inside vLLM, a child of vLLM's logger, whose settings apply."""

from __future__ import annotations

import logging

__all__ = ["log"]

log = logging.getLogger("vllm.dispatchkit")
