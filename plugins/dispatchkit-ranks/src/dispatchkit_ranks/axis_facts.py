"""The properties of a step that ranks exchange in a configuration with axes.

All ranks pad an axis to the largest value of any rank. An exact axis cannot be padded, because its
value changes the result of a step. If ranks have different values of an exact axis, no graph can
serve the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.keys import DispatchConfig

from dispatchkit_ranks.facts import ALL_ON, AgreedBatch, Facts

# Limit on the axis values in a row. Larger values exceed all buckets, and are sent as this value.
_MAX_VALUE = 1 << 62


class AxisFacts(Facts):
    """Encoder of one rank's row with axis values, and decoder of the merged row.

    In all methods, ``loras`` is the return value of ``DispatchConfig.variant`` for the number of
    adapters and the axis values.

    Args:
        config: The configuration that defines the query classes and axes.
        switches: See ``Facts``.

    Raises:
        ConfigError: The query classes, switches and axes do not fit in one row.
    """

    def __init__(self, config: DispatchConfig, switches: Sequence[str] = ()) -> None:
        self._axes, self._variants = config.axes, config.variants
        self._exact: tuple[int, ...] = tuple(
            index for index, axis in enumerate(config.axes) if axis.exact
        )
        # Exact axes have a second column for the minimum, which is sent as the distance from the
        # largest possible value.
        super().__init__(config, switches, more=len(self._axes) + len(self._exact))

    def row(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform: int,
        loras: int,
        ceiling: int,
        mode: int,
        switches: int = ALL_ON,
    ) -> list[int]:
        """Return the row of a batch; see ``Facts.row``."""
        adapters, _ = self._variants.facts(loras)
        row = super().row(num_tokens, num_reqs, uniform, adapters, ceiling, mode, switches)
        if num_tokens:
            values = [min(value, _MAX_VALUE) for value in self._variants.values(loras)]
            row[self._first_more :] = values + [_MAX_VALUE - values[index] for index in self._exact]
        return row

    def merge(self, merged: Sequence[int]) -> AgreedBatch:
        """Decode the merged row of all ranks; see ``Facts.merge``."""
        agreed = super().merge(merged)
        if not agreed.num_tokens:
            return agreed
        first, last = self._first_more, self._first_more + len(self._axes)
        values: list[int | None] = list(merged[first:last])
        for index, distance in zip(self._exact, merged[last:], strict=False):
            if values[index] != _MAX_VALUE - distance:
                values[index] = None
        return self._with_values(agreed, values)

    def own(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform: int,
        loras: int,
        ceiling: int,
        switches: int = 0,
    ) -> AgreedBatch:
        """Return this rank's batch as the agreed batch; valid if all ranks have the same batch."""
        agreed = AgreedBatch(num_tokens, num_reqs, uniform, loras, ceiling, switches)
        return agreed._replace(axes=self._variants.values(loras)) if num_tokens else agreed

    def _with_values(self, agreed: AgreedBatch, values: Sequence[int | None]) -> AgreedBatch:
        named = {
            axis.name: axis.buckets[-1] + 1 if value is None else value
            for axis, value in zip(self._axes, values, strict=True)
        }
        variant = self._variants.of_values(agreed.loras, named)
        return agreed._replace(loras=variant, axes=tuple(values))
