"""The logger for messages inside vLLM, a child of vLLM's logger and thus of its settings."""

from __future__ import annotations

import logging

__all__ = ["log"]

log = logging.getLogger("vllm.dispatchkit")
