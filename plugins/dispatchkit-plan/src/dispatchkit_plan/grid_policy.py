"""The policy ``grid``: separate capture sizes for each bucket of an axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dispatchkit import (
    Batch,
    BatchDescriptor,
    Decision,
    DispatchConfig,
    GraphKey,
    GraphView,
    Reason,
    RuntimeMode,
)
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_capture_sizes, check_count

__all__ = ["GridPolicy"]


class GridPolicy:
    """A policy that replays the smallest sufficient graph, with separate sizes per bucket.

    The configuration must have exactly one axis, with the buckets of the grid, and a
    ``max_num_tokens`` of at least the largest size of the grid. The ``sizes`` of the configuration
    do not affect which graphs are captured.

    Args:
        grid: Capture sizes of each bucket of the axis, such as the ``grid`` of a ``GridPlan``.

    Raises:
        ConfigError: The grid is empty, a bucket is repeated or has no sizes, or a bucket or size is
            not a whole number of at least 1.
    """

    name = "grid"
    traits = frozenset({"smallest_bucket", "monotone", "stateless"})

    def __init__(self, grid: Mapping[Any, Iterable[int]]) -> None:
        allowed = "a dict of capture sizes by bucket, such as {16: [1, 2, 4], 64: [1, 3]}"
        given: Any = grid
        if not isinstance(given, Mapping) or not given:
            raise ConfigError("grid", given, allowed)
        self.grid: dict[int, tuple[int, ...]] = {}
        for bucket, sizes in given.items():
            number = check_count(bucket, "grid bucket")
            checked = check_capture_sizes(sizes, setting=f"grid[{number}]")
            if not checked:
                raise ConfigError(f"grid[{number}]", sizes, "a list of at least one capture size")
            if number in self.grid:
                raise ConfigError("grid buckets", list(given), "distinct numbers")
            self.grid[number] = checked
        self.grid = dict(sorted(self.grid.items()))

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return a key for each size of each bucket.

        Raises:
            ConfigError: The configuration does not have exactly one axis with the buckets of the
                grid, or its ``max_num_tokens`` is smaller than the largest size of the grid.
        """
        buckets = tuple(self.grid)
        if len(config.axes) != 1 or config.axes[0].buckets != buckets:
            raise ConfigError(
                "axes",
                config.axes,
                f"a list of one axis whose buckets are those of the grid: {buckets}",
            )
        largest = max(sizes[-1] for sizes in self.grid.values())
        if config.max_num_tokens < largest:
            raise ConfigError(
                "max_num_tokens",
                config.max_num_tokens,
                f"at least {largest}, the largest size of the grid",
            )
        mode = config.mode.mixed_mode()
        if not mode.has_full_cudagraphs() and not mode.has_piecewise_cudagraphs():
            return []
        return [
            GraphKey(
                mode.runtime_mode,
                BatchDescriptor(size, num_active_loras=config.max_loras, axes=(bucket,)),
            )
            for bucket, sizes in self.grid.items()
            for size in sizes
        ]

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return a decision to replay the smallest ready graph for the batch, or to run eager."""
        obstacle: str = Reason.NO_KEY
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            for key in graphs.covering(batch, mode):
                if not batch.allows(mode):
                    obstacle = Reason.CEILING
                    break
                why = graphs.why_not(key)
                if why is None:
                    return Decision.replay(key)
                obstacle = why
        bucket = batch.axes[0] if batch.axes else None
        if obstacle == Reason.NO_KEY and bucket is not None:
            if batch.num_tokens > self.grid[bucket][-1]:
                obstacle = Reason.ABOVE_LARGEST
        return Decision.eager(obstacle)

    def __repr__(self) -> str:
        return f"GridPolicy({self.grid})"
