"""The logger for messages inside vLLM: below vLLM's own logger, so that its settings apply."""

from __future__ import annotations

import logging

__all__ = ["log"]

log = logging.getLogger("vllm.dispatchkit")
