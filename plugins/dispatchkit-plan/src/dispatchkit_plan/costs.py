"""Cost models: the time of a step, eager or replayed, by its number of tokens.

A model has two measured curves, which map a number of tokens to microseconds. Between points,
curves are interpolated linearly. A model is stored as a JSON file::

    {"format": "dispatchkit-cost-model", "version": 1, "name": "lm-decode-h100",
     "source": "who measured what, where, with which versions",
     "eager_us": [[1, 4182.0], [64, 6489.0]],
     "graph_us": [[1, 1167.0], [64, 1942.0]]}

Optional fields:

- ``piecewise_us``: the curve of steps with eager pieces between graphs.
- ``graph_bytes`` and ``capture_us``: the memory and the capture time of each additional graph.
- ``clock``: ``device``, or ``host`` if the times were measured without a device.

``eager_us``, ``graph_us`` and ``piecewise_us`` are times of whole steps.

If the time of a step also depends on an axis (a sequence length, an image size), the file has
curves for several values of this axis: ``"axis": "length", "at": [[16, {"eager_us": ...,
"graph_us": ...}], ...]``. The curves at the top level of the file are then the curves of the
largest value.
"""

from __future__ import annotations

import itertools
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError, counted
from dispatchkit.files import check_path, write_whole
from dispatchkit.keys import check_instance, whole_number

__all__ = [
    "BUILTIN_COST_MODELS",
    "COST_MODEL_FORMAT",
    "COST_MODEL_VERSION",
    "CostModel",
    "Curve",
    "load_cost_model",
    "save_cost_model",
]

COST_MODEL_FORMAT = "dispatchkit-cost-model"
COST_MODEL_VERSION = 1
_MAX_FILE_BYTES = 16 * 1024 * 1024
_LARGEST = 1 << 53  # floats are exact for all integers up to this: 285 years in µs, 9 PB
_CURVES = ("eager_us", "graph_us", "piecewise_us", "graph_bytes", "capture_us")


@attrs.frozen
class Curve:
    """A curve through measured points, interpolated linearly.

    Sizes below the first point have the value of the first point. Above the last point, the last
    segment is extended, but never downward. A curve of one point is constant.

    Attributes:
        points: (tokens, value) pairs, sorted by tokens.
    """

    points: tuple[tuple[int, float], ...]

    @property
    def first(self) -> int:
        """Smallest measured size."""
        return self.points[0][0]

    @property
    def last(self) -> int:
        """Largest measured size."""
        return self.points[-1][0]

    def __call__(self, num_tokens: float) -> float:
        """Return the value for a number of tokens."""
        points = self.points
        if num_tokens <= points[0][0] or len(points) == 1:
            return points[0][1]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if num_tokens == x1:
                return y1  # exact; the interpolation below could round
            if num_tokens < x1:
                return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)
        slope = max(0.0, (y1 - y0) / (x1 - x0))
        return y1 + slope * (num_tokens - x1)

    def table(self, max_tokens: int) -> list[float]:
        """Return the values for 0 to ``max_tokens`` tokens."""
        return [self(n) for n in range(max_tokens + 1)]


def _between(low: Curve | None, high: Curve | None, share: float) -> Curve | None:
    """Return the curve at a fraction ``share`` of the way from ``low`` to ``high``.

    A fraction above 1 extrapolates, but never to values below ``high``.
    """
    if low is None or high is None:
        return None
    points = []
    for size in sorted({size for size, _ in (*low.points, *high.points)}):
        value = low(size) + (high(size) - low(size)) * share
        points.append((size, max(value, high(size)) if share > 1 else value))
    return Curve(tuple(points))


def _curve(setting: str, points: Any) -> Curve:
    allowed = "a list of at least one [tokens, value] pair"
    point = "a [tokens, value] pair: a whole number from 1 to 2**53, and a number from 0 to 2**53"
    if isinstance(points, Curve):
        points = points.points
    try:
        pairs = [(point[0], point[1]) for point in points if len(point) == 2]
        short = len(pairs) != len(points)
    except (TypeError, KeyError, IndexError):
        raise ConfigError(setting, points, allowed) from None
    if short or not pairs:
        raise ConfigError(setting, points, allowed)
    for size, value in pairs:
        sized = whole_number(size) is not None and 1 <= size <= _LARGEST
        valued = isinstance(value, int | float) and not isinstance(value, bool)
        # math.isfinite would raise OverflowError for a very large integer.
        if not sized or not valued or not 0 <= value <= _LARGEST:
            raise ConfigError(f"point of {setting}", [size, value], point)
    pairs.sort()
    repeated = [list(after) for before, after in itertools.pairwise(pairs) if before[0] == after[0]]
    if repeated:
        raise ConfigError(
            setting,
            repeated,
            "a list of [tokens, value] pairs with one pair for each number of tokens",
            "Keep one of them.",
            message=f"{setting} has several values for {counted(repeated[0][0], 'token')}.",
        )
    return Curve(tuple((int(size), float(value)) for size, value in pairs))


def _eager(points: Any) -> Curve:
    return _curve("eager_us", points)


def _graph(points: Any) -> Curve:
    return _curve("graph_us", points)


def _piecewise(points: Any) -> Curve | None:
    return None if points is None else _curve("piecewise_us", points)


def _pairs(value: Any) -> Any:
    return tuple(tuple(pair) for pair in value)


def _bytes(points: Any) -> Curve | None:
    return None if points is None else _curve("graph_bytes", points)


def _capture(points: Any) -> Curve | None:
    return None if points is None else _curve("capture_us", points)


@attrs.frozen(kw_only=True)
class CostModel:
    """Costs of eager and replayed steps, by number of tokens.

    Attributes:
        name: Name for tables and messages.
        eager_us: Time of an eager step at its exact size.
        graph_us: Time of a replayed step, by graph size. Measured with FULL graphs if there are
            any, otherwise with PIECEWISE graphs.
        piecewise_us: Time of a step with eager pieces between graphs, by graph size; None to use
            ``graph_us``.
        graph_bytes: Memory of each additional graph, by graph size; None if not measured.
        capture_us: Time of a capture, by graph size; None if not measured.
        source: Who measured what, on which device, with which versions.
        clock: ``device``, or ``host`` for times measured without a device, which do not predict
            device times.
        axis: Name of the measured axis; empty if only the number of tokens was varied.
        along: A (value, model) pair for each measured value of the axis, sorted by value.

    Times are in microseconds, memory is in bytes.
    """

    name: str = attrs.field(validator=attrs.validators.instance_of(str))
    eager_us: Curve = attrs.field(converter=_eager)
    graph_us: Curve = attrs.field(converter=_graph)
    piecewise_us: Curve | None = attrs.field(default=None, converter=_piecewise)
    graph_bytes: Curve | None = attrs.field(default=None, converter=_bytes)
    capture_us: Curve | None = attrs.field(default=None, converter=_capture)
    source: str = attrs.field(default="", validator=attrs.validators.instance_of(str))
    clock: str = attrs.field(default="device")

    @clock.validator
    def _check_clock(self, attribute: attrs.Attribute[str], value: Any) -> None:
        if value not in ("device", "host"):
            raise ConfigError("clock", value, "'device' or 'host'")

    axis: str = attrs.field(default="", validator=attrs.validators.instance_of(str))
    along: tuple[tuple[int, CostModel], ...] = attrs.field(default=(), converter=_pairs)

    def __attrs_post_init__(self) -> None:
        values = [value for value, _ in self.along]
        if bool(self.axis) != bool(values):
            raise ConfigError(
                "axis",
                self.axis,
                "given with `along`, and omitted otherwise",
                "Set `along` (`at` in a file), or omit axis." if self.axis else "Set axis.",
                message=f"axis {self.axis!r} has no curves."
                if self.axis
                else "`along` (`at` in a file) has curves, but axis is missing.",
            )
        for value in values:
            if whole_number(value) is None or not 1 <= value <= _LARGEST:
                raise ConfigError(
                    f"value of axis {self.axis!r}", value, "a whole number from 1 to 2**53"
                )
        if sorted(set(values)) != values:
            raise ConfigError(
                f"values of axis {self.axis!r}", values, "distinct and in ascending order"
            )

    def at(self, value: int) -> CostModel:
        """Return the model for a value of the axis, or the model itself if it has no axis.

        Curves are interpolated linearly between measured values. Values below the first measured
        value use the curves of the first value. Above the last measured value, the curves of the
        last two values are extrapolated, but never downward.
        """
        along = self.along
        if not along:
            return self
        values = [known for known, _ in along]
        after = bisect_left(values, value)
        if after == 0 or len(along) == 1:
            return along[0][1]
        if after < len(along) and values[after] == value:
            return along[after][1]
        after = min(after, len(along) - 1)
        (low_value, low), (high_value, high) = along[after - 1], along[after]
        share = (value - low_value) / (high_value - low_value)
        curves: dict[str, Any] = {
            field: _between(getattr(low, field), getattr(high, field), share) for field in _CURVES
        }
        return attrs.evolve(low, **curves)

    def scaled(self, factor: int) -> CostModel:
        """Return a model whose sizes are in units of ``factor`` tokens."""
        curves: dict[str, Any] = {}
        for field in _CURVES:
            curve = getattr(self, field)
            if curve is not None:
                sizes = sorted({-(-size // factor) for size, _ in curve.points})
                curve = Curve(tuple((size, curve(size * factor)) for size in sizes))
            curves[field] = curve
        return attrs.evolve(self, **curves)

    @classmethod
    def from_measurements(
        cls, name: str, rows: Iterable[tuple[int, float, float]], *, source: str = ""
    ) -> CostModel:
        """Return a cost model made from (size, eager_us, graph_us) rows."""
        measured = list(rows)
        return cls(
            name=name,
            eager_us=[(size, eager) for size, eager, _ in measured],
            graph_us=[(size, graph) for size, _, graph in measured],
            source=source,
        )

    def covers(self, num_tokens: int) -> bool:
        """Return whether the eager and graph curves were measured up to ``num_tokens``."""
        return num_tokens <= min(self.eager_us.last, self.graph_us.last)

    def step_us(
        self,
        num_tokens: int,
        captured: int | None,
        *,
        best: bool = False,
        piecewise: bool = False,
    ) -> float:
        """Return the time of one step.

        Args:
            num_tokens: Number of tokens of the step.
            captured: Size of the graph that serves the step; None for an eager step.
            best: Whether to run eager if that is faster than the graph.
            piecewise: Whether the step has eager pieces between its graphs.
        """
        eager = self.eager_us(num_tokens)
        if captured is None:
            return eager
        curve = self.piecewise_us if piecewise and self.piecewise_us else self.graph_us
        graph = curve(captured)
        return min(graph, eager) if best else graph

    def to_json(self) -> dict[str, Any]:
        """Return the content of the model's file as JSON values."""
        data: dict[str, Any] = {
            "format": COST_MODEL_FORMAT,
            "version": COST_MODEL_VERSION,
            "name": self.name,
            "source": self.source,
            "clock": self.clock,
        }
        for field in _CURVES:
            curve: Curve | None = getattr(self, field)
            if curve is not None:
                data[field] = [list(point) for point in curve.points]
        if self.along:
            data["axis"] = self.axis
            own = ("format", "version", "name", "source", "clock")
            data["at"] = [
                [value, {k: v for k, v in model.to_json().items() if k not in own}]
                for value, model in self.along
            ]
        return data

    @classmethod
    def from_json(cls, data: Any, *, where: str = "cost model") -> CostModel:
        """Return the model described by the content of a file.

        Raises:
            ConfigError: The content is not a cost model, or its version or one of its fields is
                invalid.
            UnknownNameError: The content has an unknown field.
        """
        if not isinstance(data, Mapping) or data.get("format") != COST_MODEL_FORMAT:
            is_object = isinstance(data, Mapping)
            raise ConfigError(
                f"{where}: format",
                data.get("format") if is_object else type(data).__name__,
                repr(COST_MODEL_FORMAT),
                _WRITES,
                message=""
                if is_object
                else f"{where} must contain a JSON object, got a value of type "
                f"{type(data).__name__}.",
            )
        if data.get("version") != COST_MODEL_VERSION:
            raise ConfigError(
                f"{where}: version",
                data.get("version"),
                str(COST_MODEL_VERSION),
                "Run `dispatchkit calibrate` with this version of dispatchkit.",
            )
        known = {"format", "version", "name", "source", "clock", "axis", "at", *_CURVES}
        odd = sorted(set(data) - known)
        if odd:
            raise UnknownNameError(f"{where}: field", odd[0], known)
        missing = [field for field in ("name", "eager_us", "graph_us") if field not in data]
        if missing:
            hint = "Run `dispatchkit calibrate` again."
            raise ConfigError(
                f"{where}: {missing[0]}",
                None,
                "given",
                hint,
                message=f"{where}: field {missing[0]!r} is missing.",
            )
        for field in ("name", "source", "axis"):
            if not isinstance(data.get(field, ""), str):
                raise ConfigError(f"{where}: {field}", data[field], "a string")
        try:
            return cls(
                name=data["name"],
                source=data.get("source", ""),
                clock=data.get("clock", "device"),
                axis=data.get("axis", ""),
                along=cls._along(data),
                **{field: data[field] for field in _CURVES if field in data},
            )
        except ConfigError as error:
            error.add_note(f"In {where}.")
            raise

    @classmethod
    def _along(cls, data: Mapping[str, Any]) -> list[tuple[int, CostModel]]:
        """Return the (value, model) pairs of the axis from the content of a file."""
        allowed = "a list of [value, curves] pairs"
        pairs = data.get("at", [])
        if not isinstance(pairs, list):
            raise ConfigError("at", pairs, allowed)
        found = []
        for index, pair in enumerate(pairs):
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], Mapping)):
                raise ConfigError(f"at[{index}]", pair, "a [value, curves] pair")
            value, curves = pair
            missing = {"eager_us", "graph_us"} - set(curves)
            odd = set(curves) - set(_CURVES)
            if missing or odd:
                raise ConfigError(
                    f"curves of at[{index}]",
                    sorted(curves),
                    "eager_us and graph_us, and optionally piecewise_us, graph_bytes and "
                    "capture_us",
                )
            shared = {"name": data["name"], "source": data.get("source", "")}
            found.append((value, cls(**shared, clock=data.get("clock", "device"), **curves)))
        return found


_WRITES = "`dispatchkit calibrate` writes cost models."


def check_cost_model(model: Any, setting: str) -> CostModel:
    """Check that a value is a ``CostModel``, and return it.

    Raises:
        ConfigError: The value is not a ``CostModel`` of this package.
    """
    hint = "load_cost_model(name_or_path) returns a built-in model or reads a file."
    return check_instance(model, CostModel, setting, hint, allowed="a dispatchkit_plan.CostModel")


def load_cost_model(name_or_path: str | os.PathLike[str]) -> CostModel:
    """Return a built-in cost model by name, or load one from a file.

    Raises:
        UnknownNameError: The name is neither a built-in model nor a file.
        ConfigError: The file is not a cost model; the message contains its path.
    """
    name = check_path(name_or_path, "cost model")
    if name in BUILTIN_COST_MODELS:
        return BUILTIN_COST_MODELS[name]
    try:
        with Path(name).open("rb") as stream:
            raw = stream.read(_MAX_FILE_BYTES + 1)
    except (FileNotFoundError, ValueError):
        raise UnknownNameError(
            "cost model",
            name,
            BUILTIN_COST_MODELS,
            "There is no file of this name either. `dispatchkit calibrate` writes cost models.",
        ) from None
    except OSError as error:
        raise ConfigError(
            "cost model",
            name,
            "a readable file",
            "Pass the path of a readable file.",
            message=f"Cannot read cost model {name}: {error.strerror}.",
        ) from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError("cost model", name, "a file of at most 16 MiB", _WRITES)
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "cost model",
            name,
            "a JSON file",
            _WRITES,
            message=f"Cost model {name} is not a JSON file: {error}.",
        ) from error
    return CostModel.from_json(data, where=name)


def save_cost_model(model: CostModel, path: str | os.PathLike[str]) -> None:
    """Write a model to a file atomically.

    Raises:
        ConfigError: ``model`` is not a ``CostModel`` of this package, or the file cannot be
            written.
    """
    check_cost_model(model, "model")
    write_whole(path, json.dumps(model.to_json(), indent=2) + "\n")


_H100 = "One NVIDIA H100 80GB, torch 2.11 (CUDA 13), Python 3.12; medians of device time. {}"
_LM_ROWS: Sequence[tuple[int, float, float]] = (
    (1, 4182.0, 1167.0),
    (64, 6489.0, 1942.0),
    (256, 6340.0, 4264.0),
    (320, 5861.0, 5441.0),
    (512, 8220.0, 7649.0),
)

BUILTIN_COST_MODELS: Mapping[str, CostModel] = {
    "lm-decode-h100": CostModel.from_measurements(
        "lm-decode-h100",
        _LM_ROWS,
        source=_H100.format(
            "Decode step of a 16-layer decoder, model width 2048, at 1 to 512 sequences. "
            "Not measured above 512 tokens."
        ),
    ),
    "mlp-h100": CostModel(
        name="mlp-h100",
        eager_us=[(385, 1135.0), (513, 1445.0), (769, 1946.0), (1025, 2507.0)],
        graph_us=[(512, 1330.0), (768, 1900.0), (1024, 2425.0), (2048, 4890.0)],
        source=_H100.format(
            "8-layer MLP, width 4096. Eager times were measured just above a bucket, and graph "
            "times at the next bucket. "
            "Not measured below 385 (eager) and 512 (graph) tokens."
        ),
    ),
}
"""Built-in models by name; the ``source`` of each names the hardware."""
