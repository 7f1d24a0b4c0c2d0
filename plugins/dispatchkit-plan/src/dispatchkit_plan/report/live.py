"""Sample the statistics of a serving runner, and create a report of the samples."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, counted
from dispatchkit.files import write_whole
from dispatchkit.keys import whole_number

from dispatchkit_plan.report.account import MAX_BINS
from dispatchkit_plan.report.charts import Band, Bars, Pairs, Series, Shares, StackedBars
from dispatchkit_plan.report.from_account import MODE_NAMES
from dispatchkit_plan.report.page import Figure, MissingFigure, Report, Table, Tile

__all__ = ["STATISTICS_FORMAT", "LiveStatistics", "report_of_statistics"]

STATISTICS_FORMAT = "dispatchkit-statistics"
STATISTICS_VERSION = 1
MAX_SAMPLES = 1024
"""Maximum number of samples; beyond it, every second sample is dropped."""
_TOKENS = re.compile(r"\btokens=(\d{1,9})\b")
_HINT = "Save the statistics with LiveStatistics.save()."


class LiveStatistics:
    """Samples of a runner's counters over time.

    Sampling adds no work to steps. A server may sample for weeks: beyond ``MAX_SAMPLES``, every
    second sample is dropped. Because counters only grow, dropping samples reduces only the
    resolution in time.

    Example::

        live = LiveStatistics()
        for batch in batches:
            runner(batch)
            if enough_time_has_passed:
                live.sample(runner)
        live.save("statistics.json")      # then: dispatchkit report statistics.json

    Attributes:
        policy: Name of the policy at the last sample.
        samples: Counters of each sample, as JSON values.
        arms: Measurements of a learning policy at the last sample.
        memory: Memory of each device in bytes by purpose, at the last sample; empty unless the
            runner shares a ``GraphMemory``.
    """

    def __init__(self) -> None:
        self.policy: str = ""
        self.samples: list[dict[str, Any]] = []
        self.arms: list[dict[str, Any]] = []
        self.memory: dict[str, dict[str, int]] = {}

    def sample(self, runner: Any) -> None:
        """Append the counters of a ``GraphRunner``, and store its policy, arms and memory."""
        self.policy = runner.dispatcher.policy_name
        self.samples.append(attrs.asdict(runner.stats()))
        if len(self.samples) > MAX_SAMPLES:
            self.samples = self.samples[::2]
        if (group := runner.spec.memory_group) is not None:
            self.memory = {one.device: one.lines() for one in group.memory.account()}
        explains = runner.dispatcher.policy_parts.explain
        buckets = [] if explains is None else explains()
        self.arms = [attrs.asdict(bucket) for bucket in buckets if attrs.has(type(bucket))]

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file that ``save`` writes."""
        return {
            "format": STATISTICS_FORMAT,
            "version": STATISTICS_VERSION,
            "policy": self.policy,
            "samples": self.samples,
            "arms": _finite(self.arms),
            "memory": self.memory,
        }

    def save(self, path: str | Path) -> None:
        """Write the samples to a file atomically.

        Raises:
            ConfigError: The file cannot be written.
        """
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_of_statistics(data: Mapping[str, Any], *, source: str) -> Report:
    """Return the report of live statistics.

    Args:
        data: Result of ``LiveStatistics.to_json``.
        source: Origin of the statistics, such as the name of a file; shown in the report and in
            error messages.

    Raises:
        ConfigError: The data are not statistics in the format of this version.
    """
    if data.get("version") != STATISTICS_VERSION:
        hint = "Save the statistics again, with this version of dispatchkit."
        raise ConfigError(f"{source}: version", data.get("version"), str(STATISTICS_VERSION), hint)
    samples = data.get("samples")
    if not isinstance(samples, list) or not samples:
        hint = "Call LiveStatistics.sample(runner) at least once." if samples == [] else _HINT
        raise ConfigError(f"{source}: samples", samples, "a list of at least one sample", hint)
    for sample in samples:
        _check_sample(sample, source)
    last = samples[-1]
    steps = last["steps"] or 1
    replayed = 1.0 - last["steps_by_mode"].get("NONE", 0) / steps if last["steps"] else 0.0
    padding = last["padded_tokens"] - last["real_tokens"]
    real = sum(last["hit_tokens"].values())  # only of steps that replayed a graph
    share = 100.0 * padding / real if real else 0.0
    policy = str(data.get("policy") or "?")
    return Report(
        title=f"Live statistics of {policy}",
        summary=(
            f"Graphs served {replayed:.1%} of {counted(last['steps'], 'step')}. Padding is "
            f"{share:.2f}% of the real tokens of the replayed steps."
            if last["steps"]
            else "No step has run yet."
        ),
        facts=(
            ("Source", source),
            ("Policy", policy),
            ("Samples", f"{len(samples):,}"),
            *_memory(data.get("memory"), source),
        ),
        tiles=(
            Tile("Steps", f"{last['steps']:,}", f"{last['failed_steps']:,} failed"),
            Tile("Replayed", f"{replayed:.1%}", f"{counted(len(last['hits']), 'graph')} used"),
            Tile("Padding", f"{share:.2f}%", counted(padding, "padding token")),
            Tile(
                "Captures",
                f"{last['captures']:,}",
                f"{last['capture_failures']:,} failed, {last['evictions']:,} evicted",
            ),
        ),
        figures=(
            _padding(last),
            _over_time(samples),
            MissingFigure(
                "waste",
                "Padding against number of graphs",
                "Statistics do not contain the sizes of batches. Record a trace with `dispatchkit "
                "record`, then run `dispatchkit report TRACE`.",
            ),
            _times(data.get("arms"), source),
            _reasons(last),
        ),
        notes=("The numbers cover all steps since the runner was created.",),
    )


def _memory(devices: Any, source: str) -> list[tuple[str, str]]:
    """Return (name, text) pairs with the memory of each device by purpose."""
    if devices is None:
        return []
    if not isinstance(devices, Mapping) or not all(
        isinstance(lines, Mapping) and all(whole_number(one) is not None for one in lines.values())
        for lines in devices.values()
    ):
        raise ConfigError(
            f"{source}: memory",
            devices,
            "an object that maps each device to its memory in bytes, by purpose",
            _HINT,
        )
    return [
        (
            f"Memory of {device}",
            ", ".join(
                f"{part} {num_bytes / (1 << 20):,.1f} MiB" for part, num_bytes in lines.items()
            ),
        )
        for device, lines in devices.items()
    ]


def _check_sample(sample: Any, source: str) -> None:
    if not isinstance(sample, Mapping):
        raise ConfigError(f"{source}: sample", sample, "an object of counters", _HINT)
    counts = (
        "steps",
        "real_tokens",
        "padded_tokens",
        "captures",
        "capture_failures",
        "evictions",
        "failed_steps",
    )
    for name in counts:
        _check_count(sample.get(name), f"{source}: {name}")
    for name in ("steps_by_mode", "hits", "hit_tokens", "eager_by_reason"):
        table = sample.get(name)
        if not isinstance(table, Mapping):
            raise ConfigError(f"{source}: {name}", table, "an object of counts", _HINT)
        for value in table.values():
            _check_count(value, f"{source}: {name}")


def _check_count(value: Any, where: str) -> None:
    number = whole_number(value)
    if number is None or not 0 <= number < 10**18:
        raise ConfigError(where, value, "a non-negative integer below 1e18", _HINT)


def _padding(last: Mapping[str, Any]) -> Figure | MissingFigure:
    title = "Padding by size"
    buckets: dict[int, list[int]] = {}
    for key, steps in last["hits"].items():
        found = _TOKENS.search(key)
        if found and int(found[1]):
            sums = buckets.setdefault(int(found[1]), [0, 0])
            sums[0] += steps
            sums[1] += last["hit_tokens"].get(key, 0)
    buckets = {size: sums for size, sums in sorted(buckets.items()) if sums[0]}
    if not buckets:
        return MissingFigure("padding", title, "No step replayed a graph, so there is no padding.")
    shares = [
        100.0 * max(0, size * steps - real) / real if real else 0.0
        for size, (steps, real) in buckets.items()
    ]
    rows = tuple(
        (str(size), f"{steps:,}", f"{real:,}", f"{size * steps - real:,}")
        for size, (steps, real) in buckets.items()
    )
    return Figure(
        "padding",
        title,
        "Padding tokens of each bucket as a percentage of its real tokens.",
        StackedBars(
            label=title,
            categories=tuple(map(str, buckets)),
            series=(Series("padding", "padding", tuple(shares)),),
            x_label="bucket (tokens)",
            y_label="padding, % of real tokens",
            unit="%",
        ),
        Table(("Bucket", "Steps", "Real tokens", "Padding"), rows, (0, 1, 2, 3)),
    )


def _over_time(samples: Sequence[Mapping[str, Any]]) -> Figure | MissingFigure:
    ends: list[int] = []
    parts: list[dict[str, int]] = []
    before: Mapping[str, int] = {}
    # Choose at most MAX_BINS evenly spaced samples, including the last; more bars than that would
    # be indistinguishable.
    bars = min(MAX_BINS, len(samples))
    for number in range(1, bars + 1):
        sample = samples[number * len(samples) // bars - 1]
        now = sample["steps_by_mode"]
        part = {mode: now.get(mode, 0) - before.get(mode, 0) for mode in MODE_NAMES}
        if any(count > 0 for count in part.values()):
            ends.append((ends[-1] if ends else 0) + sum(max(0, one) for one in part.values()))
            parts.append({mode: max(0, count) for mode, count in part.items()})
        before = now
    if not parts:
        return MissingFigure("modes", "Runtime modes over time", "No step has run yet.")
    series = tuple(
        Series(name, css, tuple(float(part[mode]) for part in parts))
        for mode, (name, css) in MODE_NAMES.items()
    )
    return Figure(
        "modes",
        "Runtime modes over time",
        "Share of the steps in each runtime mode over time, from "
        f"{counted(len(samples), 'sample')}.",
        Shares(label="Runtime modes over time", ends=tuple(ends), series=series),
    )


def _times(buckets: Any, source: str) -> Figure | MissingFigure:
    title = "Replay and eager time by bucket"
    rows, names, replay, eager = [], [], [], []
    for index, bucket in enumerate(buckets if isinstance(buckets, list) else ()):
        if not isinstance(bucket, Mapping) or not isinstance(bucket.get("arms"), list):
            where = f"{source}: arms[{index}]"
            raise ConfigError(where, bucket, "an object with a list named arms", _HINT)
        sizes = bucket.get("sizes")
        name = "-".join(map(str, sizes)) if isinstance(sizes, list | tuple) else "?"
        best: dict[bool, float] = {}
        for arm in bucket["arms"]:
            us = arm.get("median_us") if isinstance(arm, Mapping) else None
            if isinstance(us, bool) or not isinstance(us, int | float) or not 0 < us < 1e15:
                continue
            is_eager = arm.get("arm") == "eager"
            best[is_eager] = min(us, best.get(is_eager, us))
            rows.append((name, str(arm.get("arm")), f"{us:,.0f}", str(arm.get("samples", ""))))
        if best:
            names.append(name)
            replay.append(best.get(False, 0.0))
            eager.append(best.get(True, 0.0))
    if not names:
        return MissingFigure(
            "times",
            title,
            "The policy has not measured any steps. Only a policy that learns from measured steps, "
            "such as adaptive, provides the medians for this figure.",
        )
    return Figure(
        "times",
        title,
        "Median times measured by the policy, in µs: the fastest graph of each bucket, and eager.",
        Pairs(
            label=title,
            categories=tuple(names),
            series=(
                Series("replay", "full", tuple(replay)),
                Series("eager", "eager", tuple(eager)),
            ),
            x_label="batch size (tokens)",
            y_label="µs per step",
            unit="µs",
        ),
        Table(("Batches", "Arm", "Median µs", "Samples"), tuple(rows), (2, 3)),
    )


def _reasons(last: Mapping[str, Any]) -> Figure:
    bands = []
    total = last["steps"] or 1
    replays = {mode: last["steps_by_mode"].get(mode, 0) for mode in ("FULL", "PIECEWISE")}
    rows = [(MODE_NAMES[mode][0], "hit", MODE_NAMES[mode][1], n) for mode, n in replays.items()]
    rows += [("eager", reason, "eager", n) for reason, n in last["eager_by_reason"].items()]
    for name, reason, css, steps in sorted(rows, key=lambda row: -row[3]):
        if steps:
            band = Band(
                f"{name}: {reason}",
                ((css, float(steps), counted(steps, "step")),),
                f"{steps / total:.1%}",
            )
            bands.append(band)
    return Figure(
        "reasons",
        "Reasons",
        "Number of steps by reason.",
        Bars(
            label="Reasons",
            bands=tuple(bands),
            colors=tuple((css, name) for name, css in MODE_NAMES.values()),
            whole=float(last["steps"]),
        ),
    )
