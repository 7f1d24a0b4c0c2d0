"""Create the report of a trace under one policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from dispatchkit.errors import DispatchkitError, counted

from dispatchkit_plan.report.account import Account, AccountedDecision
from dispatchkit_plan.report.charts import (
    Band,
    Bars,
    Line,
    Lines,
    Pairs,
    Series,
    Shares,
    StackedBars,
)
from dispatchkit_plan.report.page import Figure, MissingFigure, Report, Table, Tile

__all__ = [
    "MODE_NAMES",
    "WastePlan",
    "brief_sizes",
    "report_of_account",
    "waste_figure",
    "waste_plan",
]

MODE_NAMES: Mapping[str, tuple[str, str]] = {
    "FULL": ("FULL", "full"),
    "PIECEWISE": ("PIECEWISE", "piecewise"),
    "NONE": ("eager", "eager"),
}
_MAX_ROWS = 200
MIN_WASTE = 0.01
"""Smallest padding in the plot, in percent; a logarithmic axis has no zero."""

WastePlan = tuple[Sequence[tuple[int, float]], Mapping[str, tuple[int, float]]]
"""The planner's curve, and well-known size lists by name, as (graphs, padding in percent) pairs."""


def waste_plan(source: object, max_size: int) -> WastePlan | str:
    """Return the planner's curve and the padding of well-known size lists, or an error text."""
    try:
        from dispatchkit_plan import plan_sizes

        plan = plan_sizes(source, graphs=1, max_size=max_size, hedge="none")  # type: ignore[arg-type]
    except DispatchkitError as error:
        return f"The planner could not compute the best sizes: {error}"
    rivals = {name: (one.num_graphs, one.waste_pct) for name, one in plan.rivals.items()}
    return plan.curve, rivals


def waste_figure(
    plan: WastePlan | str, own: Sequence[tuple[str, int, float]], max_size: int
) -> Figure | MissingFigure:
    """Return the plot of padding against the number of graphs."""
    title = "Padding against number of graphs"
    if isinstance(plan, str):
        return MissingFigure("waste", title, plan)
    curve, rivals = plan
    names = {"vllm-default": "vLLM default", "vllm-interactivity": "vLLM interactivity"}
    marks = [
        Line(
            f"{names.get(name, name)} ({graphs})",
            "eager" if name == "vllm-default" else "other",
            ((float(graphs), max(waste, MIN_WASTE)),),
            marked=True,
        )
        for name, (graphs, waste) in rivals.items()
    ]
    marks += [
        Line(
            f"{name} ({graphs})",
            "piecewise",
            ((float(graphs), max(waste, MIN_WASTE)),),
            marked=True,
        )
        for name, graphs, waste in own
    ]
    best = tuple((float(graphs), waste) for graphs, waste in curve if waste >= MIN_WASTE)
    lines = (Line("best sizes for this traffic", "full", best), *marks)
    rows = [(name, str(graphs), f"{waste:.2f}%") for name, (graphs, waste) in rivals.items()]
    rows += [(name, str(graphs), f"{waste:.2f}%") for name, graphs, waste in own]
    rows += [("planned", str(graphs), f"{waste:.2f}%") for graphs, waste in curve]
    return Figure(
        "waste",
        title,
        "Padding as a percentage of the real tokens, for steps of at most "
        f"{counted(max_size, 'token')}. All kinds of steps share one list of sizes. "
        "The line shows the least padding that is possible with each number of sizes. A list above "
        "the line has more padding than necessary.",
        Lines(
            label=title,
            lines=lines,
            x_label="graphs captured (sizes)",
            y_label="padding",
            unit="%",
        ),
        Table(("List", "Graphs", "Padding"), tuple(rows), right=(1, 2)),
    )


def report_of_account(account: Account, *, plan: WastePlan | str) -> Report:
    """Return the report of a trace under one policy.

    Args:
        account: Decisions for the trace, with their costs.
        plan: Result of ``waste_plan`` for the same trace.
    """
    steps, modes = account.num_steps, account.modes()
    num_eager = modes["NONE"]
    replayed = 1.0 - num_eager / steps
    summary = "Every step runs eager. The report lists the reasons."
    if num_eager < steps:
        summary = (
            f"Graphs serve {replayed:.1%} of {counted(steps, 'step')}. Padding is "
            f"{account.waste_pct:.2f}% of the real tokens of the replayed steps."
        )
        if num_eager:
            summary += " All other steps run eager. The report lists the reasons."
    speed = account.eager_time_s / account.time_s if account.time_s else 1.0
    own = _own_point(account)
    return Report(
        title=f"{PurePath(account.source).name} under {account.policy.partition(' ')[0]}",
        summary=summary,
        facts=(
            ("Trace", account.source),
            ("Policy", account.policy),
            ("Mode", str(account.config.mode)),
            ("Sizes", brief_sizes(account.config.sizes)),
            ("Cost model", account.cost_model),
        ),
        tiles=(
            Tile("Steps", f"{steps:,}", f"{counted(account.num_graphs, 'graph')} declared"),
            Tile("Replayed", f"{replayed:.1%}", counted(num_eager, "eager step")),
            Tile("Padding", f"{account.waste_pct:.2f}%", counted(account.padding, "padding token")),
            Tile("Device time", f"{account.time_s:.3g} s", f"{speed:.2f}x the speed of eager"),
        ),
        figures=(
            _padding(account),
            _tokens(account),
            _over_time(account),
            waste_figure(plan, own, account.config.max_capture_size),
            _times(account),
            _reasons(account),
        ),
        tables=(_decisions(account),),
        notes=tuple(_notes(account)),
    )


def brief_sizes(sizes: Sequence[int]) -> str:
    """Return sizes as text; more than 12 sizes are shortened to the first five and the last."""
    if len(sizes) <= 12:
        return ", ".join(map(str, sizes)) or "none"
    head = ", ".join(map(str, sizes[:5]))
    return f"{head}, … {sizes[-1]} ({counted(len(sizes), 'size')})"


def _own_point(account: Account) -> list[tuple[str, int, float]]:
    sizes = account.config.sizes
    return [("this run", len(sizes), account.waste_pct)] if sizes and account.real_tokens else []


def _by_bucket(account: Account) -> dict[int, list[AccountedDecision]]:
    groups = account.by(lambda one: one.bucket)
    return {bucket: groups[bucket] for bucket in sorted(groups, key=lambda one: one or 0) if bucket}


def _padding(account: Account) -> Figure | MissingFigure:
    title = "Padding by size"
    buckets = _by_bucket(account)
    if not buckets:
        return MissingFigure("padding", title, "No step replayed a graph, so there is no padding.")
    shares, rows = [], []
    for bucket, group in buckets.items():
        real = sum(one.steps * one.num_tokens for one in group)
        extra = sum(one.steps * one.decision.padding for one in group)
        steps = sum(one.steps for one in group)
        shares.append(100.0 * extra / real)
        rows.append((str(bucket), f"{steps:,}", f"{real:,}", f"{extra:,}", f"{shares[-1]:.1f}%"))
    worst = max(zip(shares, buckets, strict=True))
    return Figure(
        "padding",
        title,
        "Padding tokens of each bucket as a percentage of its real tokens. "
        f"The maximum is {worst[0]:.0f}%, in bucket {worst[1]}.",
        StackedBars(
            label=title,
            categories=tuple(map(str, buckets)),
            series=(Series("padding", "padding", tuple(shares)),),
            x_label="bucket (tokens)",
            y_label="padding, % of real tokens",
            unit="%",
        ),
        Table(
            ("Bucket", "Steps", "Real tokens", "Padding", "% of real"), tuple(rows), (0, 1, 2, 3, 4)
        ),
    )


def _tokens(account: Account) -> Figure | MissingFigure:
    title = "Tokens by size"
    buckets = _by_bucket(account)
    if not buckets:
        return MissingFigure("tokens", title, "No step replayed a graph.")
    real = [sum(one.steps * one.num_tokens for one in group) for group in buckets.values()]
    extra = [sum(one.steps * one.decision.padding for one in group) for group in buckets.values()]
    most = max(zip(extra, buckets, strict=True))
    return Figure(
        "tokens",
        title,
        "Real tokens and padding of the steps of each bucket. "
        f"Bucket {most[1]} has the most padding, {counted(most[0], 'token')}.",
        StackedBars(
            label=title,
            categories=tuple(map(str, buckets)),
            series=(
                Series("real tokens", "full", tuple(map(float, real))),
                Series("padding", "padding", tuple(map(float, extra))),
            ),
            x_label="bucket (tokens)",
            y_label="tokens computed",
            unit="tokens",
        ),
    )


def _over_time(account: Account) -> Figure | MissingFigure:
    title = "Runtime modes over time"
    if not account.has_order:
        why = (
            f"{PurePath(account.source).name} does not record the order of steps. Record a trace "
            "with `dispatchkit record`."
        )
        return MissingFigure("modes", title, why)
    ends, done, rows = [], 0, []
    for part in account.bins:
        done += sum(part.modes.values())
        ends.append(done)
        rows.append((f"{done:,}", *(f"{part.modes[mode]:,}" for mode in MODE_NAMES)))
    series = tuple(
        Series(name, css, tuple(float(part.modes[mode]) for part in account.bins))
        for mode, (name, css) in MODE_NAMES.items()
    )
    return Figure(
        "modes",
        title,
        "Share of the steps in each runtime mode, over the course of the trace.",
        Shares(label=title, ends=tuple(ends), series=series),
        Table(
            ("Up to step", *(name for name, _ in MODE_NAMES.values())), tuple(rows), (0, 1, 2, 3)
        ),
    )


def _times(account: Account) -> Figure | MissingFigure:
    title = "Replay and eager time by bucket"
    buckets = _by_bucket(account)
    if not buckets:
        return MissingFigure("times", title, "No step replayed a graph.")
    replay, eager, rows = [], [], []
    for bucket, group in buckets.items():
        steps = sum(one.steps for one in group)
        mine = sum(one.total_us for one in group) / steps
        other = sum(one.steps * one.eager_us for one in group) / steps
        replay.append(mine)
        eager.append(other)
        rows.append(
            (
                str(bucket),
                f"{steps:,}",
                f"{mine:,.0f}",
                f"{other:,.0f}",
                f"{other / mine:.2f}x" if mine else "",
            )
        )
    slower = sum(mine > other for mine, other in zip(replay, eager, strict=True))
    return Figure(
        "times",
        title,
        f"Mean time of the steps of each bucket according to cost model {account.cost_model}: "
        "replayed with padding, and eager at their exact sizes. Eager would be faster in "
        f"{slower} of {counted(len(buckets), 'bucket')}.",
        Pairs(
            label=title,
            categories=tuple(map(str, buckets)),
            series=(
                Series("replay", "full", tuple(replay)),
                Series("eager", "eager", tuple(eager)),
            ),
            x_label="bucket (tokens)",
            y_label="µs per step",
            unit="µs",
        ),
        Table(
            ("Bucket", "Steps", "Replay µs", "Eager µs", "Speedup"), tuple(rows), (0, 1, 2, 3, 4)
        ),
    )


def _reasons(account: Account) -> Figure:
    bands, rows = [], []
    for (mode, reason), group in account.by(
        lambda one: (one.decision.mode.name, one.decision.reason)
    ).items():
        steps = sum(one.steps for one in group)
        name, css = MODE_NAMES[mode]
        share = steps / account.num_steps
        why = account.explain(group[0]).because
        bands.append(
            Band(
                f"{name}: {reason}", ((css, float(steps), counted(steps, "step")),), f"{share:.1%}"
            )
        )
        rows.append((name, reason, f"{steps:,}", why))
    colors = tuple((css, name) for name, css in MODE_NAMES.values())
    return Figure(
        "reasons",
        "Reasons",
        "Number of steps by reason.",
        Bars(label="Reasons", bands=tuple(bands), colors=colors, whole=float(account.num_steps)),
        Table(("Runs as", "Reason", "Steps", "Explanation"), tuple(rows), (2,)),
    )


def _decisions(account: Account) -> tuple[str, str, Table]:
    rows = []
    for one in account.decisions[:_MAX_ROWS]:
        answer = account.explain(one)
        rows.append(
            (
                str(one.num_tokens),
                f"decode, {counted(answer.batch.query_len, 'token')} per request"
                if answer.batch.uniform
                else "mixed",
                f"{one.steps:,}",
                "eager" if one.decision.key is None else str(one.decision.key),
                str(one.decision.reason),
                str(one.decision.padding),
                f"{one.step_us:,.0f}",
                f"{one.total_us / 1e3:,.1f}",
                answer.nearest or "-",
            )
        )
    columns = (
        "Tokens",
        "Kind",
        "Steps",
        "Runs as",
        "Reason",
        "Padding",
        "µs/step",
        "total ms",
        "Nearest graph for eager steps",
    )
    table = Table(columns, tuple(rows), (0, 2, 5, 6, 7), total=len(account.decisions))
    return "Decisions", "Distinct decisions, those with the largest total time first.", table


def _notes(account: Account) -> list[str]:
    notes = [
        (
            "The report assumes that all declared graphs are captured. It shows what the policy "
            "would decide, not what a runner did."
        ),
        (
            f"Times are predictions of cost model {account.cost_model} for the hardware that it "
            "was measured on."
        ),
    ]
    over = sum(one.steps for one in account.decisions if one.num_tokens > account.covered_to)
    if over:
        notes.append(
            f"Times of {counted(over, 'step')} above {counted(account.covered_to, 'token')}, the "
            "largest measured size, are extrapolated linearly."
        )
    return notes
