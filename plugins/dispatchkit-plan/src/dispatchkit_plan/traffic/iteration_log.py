"""Read steps that vLLM logs with ``--enable-logging-iteration-details``.

Unlike CUDA graph statistics, these steps have an order and a number of requests. If a log contains
both, the steps are therefore preferred.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dispatchkit.observe import Blocks, StepTrace

__all__ = ["IterationLog"]

# Source: vLLM 0.14 to 0.33. The name of an engine may precede the text, and memory figures may
# follow.
_LINE = re.compile(
    r"Iteration\(\d+\): (\d{1,9}) context requests, (\d{1,9}) context tokens, "
    r"(\d{1,9}) generation requests, (\d{1,9}) generation tokens, "
    r"iteration elapsed time: (\d{1,9}(?:\.\d{1,9})?) ms( \(dummy\))?"
)


class IterationLog:
    """Collector of the steps in a log.

    A step is uniform decode if it has no prompts and one token per request. Dummy iterations and
    iterations without tokens are skipped. The start times ``t_s`` exclude the time between steps.
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {
            name: [] for name in ("step", "t_s", "num_tokens", "num_reqs", "uniform_decode")
        }

    def reading(self, blocks: Blocks) -> Iterator[tuple[int, list[str]]]:
        """Yield the blocks of a log unchanged, and collect the steps in them."""
        seconds = 0.0
        for first, lines in blocks:
            for text in lines:
                found = _LINE.search(text) if "Iteration(" in text else None
                if found is None or found[6]:
                    continue
                prompts, prompt_tokens, decodes, decode_tokens = map(int, found.groups()[:4])
                tokens, reqs = prompt_tokens + decode_tokens, prompts + decodes
                if tokens:
                    uniform = not prompts and decode_tokens == decodes
                    row = (len(self._columns["step"]), seconds, tokens, min(reqs, tokens), uniform)
                    for column, value in zip(self._columns.values(), row, strict=True):
                        column.append(value)
                seconds += float(found[5]) / 1e3
            yield first, lines

    def trace(self, name: str) -> StepTrace | None:
        """Return the collected steps, or None if the log has no steps."""
        return StepTrace(self._columns, source=name) if self._columns["step"] else None
