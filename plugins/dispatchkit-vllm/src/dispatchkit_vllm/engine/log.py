"""Where messages go inside vLLM: below its own logger, so that its settings hold."""

from __future__ import annotations

import logging

__all__ = ["log"]

log = logging.getLogger("vllm.dispatchkit")
