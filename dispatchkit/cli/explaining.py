"""``explain``: what would happen to a batch, or to a whole trace, and why. Needs no device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from rich.console import Console
from rich.text import Text

from dispatchkit.cli.options import (
    AxesOption,
    CostModelOption,
    MaxLorasOption,
    MaxNumSeqsOption,
    MaxNumTokensOption,
    ModeOption,
    PolicyOption,
    QueryLensOption,
    SizesOption,
    load_installed_plugins,
    policy_name,
    settings_of,
)
from dispatchkit.cli.output import (
    JsonOption,
    complain,
    console,
    mention_problems,
    print_json,
    progress,
    short_origin,
    table,
)
from dispatchkit.dispatch import Dispatcher, Explanation, explain
from dispatchkit.errors import ConfigError
from dispatchkit.keys import CaptureSizeWarning, RuntimeMode, check_count

if TYPE_CHECKING:
    from dispatchkit.keys import DispatchConfig
    from dispatchkit.observe.trace import StepTrace
    from dispatchkit.plan.costs import CostModel
    from dispatchkit.report import Account, AccountedDecision
    from dispatchkit.settings import Settings

MAX_SHOWN = 15


def explain_batch(
    num_tokens: Annotated[
        str | None,
        typer.Argument(metavar="N", help="Tokens of the batch.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Explain a whole trace instead; any file `plan` takes."
        ),
    ] = None,
    num_reqs: Annotated[
        int, typer.Option("--num-reqs", metavar="N", help="Requests of the batch; 0: not known.")
    ] = 0,
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform", metavar="", help="A uniform decode batch, rather than a mixed one."
        ),
    ] = False,
    loras: Annotated[int, typer.Option("--loras", metavar="N", help="Adapters in use.")] = 0,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--value",
            metavar="AXIS=N",
            help="Value of an axis of --axes; give one for each.",
            show_default=False,
        ),
    ] = None,
    ceiling: Annotated[
        str,
        typer.Option(
            "--ceiling", metavar="MODE", help="Highest mode allowed: NONE, PIECEWISE or FULL."
        ),
    ] = "FULL",
    show_all: Annotated[
        bool,
        typer.Option(
            "--all", metavar="", help="Show every decision of a trace, not the costliest."
        ),
    ] = False,
    policy: PolicyOption = None,
    sizes: SizesOption = None,
    mode: ModeOption = None,
    max_num_tokens: MaxNumTokensOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    query_lens: QueryLensOption = None,
    max_loras: MaxLorasOption = None,
    axes: AxesOption = None,
    cost_model: CostModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which graph a batch would get, by which policy, why, and what it costs.

    Every graph that the policy declares is taken as captured.

    Example: dispatchkit explain 13 --num-reqs 13 --uniform

    Example: dispatchkit explain --trace trace.csv.gz --policy vllm
    """
    if (num_tokens is None) == (trace is None):
        raise ConfigError(
            "N",
            num_tokens,
            "given, or --trace FILE, and not both",
            "Next: dispatchkit explain --help.",
        )
    batch_tokens = None if num_tokens is None else check_count(num_tokens, "N", minimum=0)
    highest = RuntimeMode.parse(ceiling)
    settings = settings_of(
        {
            "policy": policy,
            "sizes": sizes,
            "mode": mode,
            "max_num_tokens": max_num_tokens,
            "max_num_seqs": max_num_seqs,
            "query_lens": query_lens,
            "max_loras": max_loras,
            "axes": axes,
            "cost_model": cost_model,
        }
    )
    from dispatchkit.observe import read_steps
    from dispatchkit.plan.costs import load_cost_model

    model = load_cost_model(settings["cost_model"])
    if trace is not None:
        facts: dict[str, Any] = {"--num-reqs": num_reqs, "--uniform": uniform}
        facts |= {"--loras": loras, "--value": values}
        for flag, value in facts.items():
            if value:
                raise ConfigError(flag, value, "left out beside --trace, which has its own")
        if highest is not RuntimeMode.FULL:
            raise ConfigError("--ceiling", ceiling, "left out beside --trace")
        account = account_of(read_steps(trace), settings, model)
        if as_json:
            print_json(account_as_dict(account))
        else:
            show_account(account, console(), None if show_all else MAX_SHOWN)
        return
    if show_all:
        raise ConfigError("--all", show_all, "left out without --trace")
    config = _config_for_batch(settings, batch_tokens or 0, loras)
    variant = _variant(config, loras, values or ())
    dispatcher = dispatcher_of(settings, config)
    answer = explain(dispatcher, batch_tokens or 0, num_reqs, int(uniform), variant, int(highest))
    answer = attrs.evolve(answer, cost=model.cost_of(answer.decision, answer.batch.num_tokens))
    if as_json:
        print_json(explanation_as_dict(answer))
    else:
        show(answer, console())


def _config_for_batch(settings: Settings, num_tokens: int, loras: int) -> DispatchConfig:
    """Return the configuration of the settings; a limit that nobody gave admits the batch."""
    config = settings.dispatch_config(max_loras=loras)
    if settings.is_given("max_num_tokens") or num_tokens <= config.max_num_tokens:
        return config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)  # the answer says that it runs eager
        return settings.dispatch_config(
            max_loras=loras,
            max_num_tokens=num_tokens,
            sizes=config.sizes,
            max_num_seqs=max(config.max_num_seqs, min(num_tokens, 2**31 - 1)),
        )


def _variant(config: DispatchConfig, loras: int, values: Sequence[str]) -> int:
    """Return what ``dispatch`` takes for the adapters and the values of axes as they are given."""
    given: dict[str, int] = {}
    for pair in values:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or name in given or not (text.isascii() and text.isdecimal()):
            raise ConfigError("--value", pair, "AXIS=N, a whole number once for each axis")
        given[name] = check_count(int(text[:20]), name, minimum=0)
    if not given and not config.axes:
        return loras
    if given and not config.axes:
        raise ConfigError("--value", list(values), "left out where --axes declares none")
    return config.variant(loras, **given)


def dispatcher_of(settings: Settings, config: DispatchConfig) -> Dispatcher:
    """Return a dispatcher of the chosen policy, every declared graph taken as captured."""
    plugins = load_installed_plugins(settings)
    mention_problems(plugins)
    name = policy_name(settings, plugins, config)
    rule = plugins.create_policy(name, **settings["policy_options"])
    origin = short_origin(plugins.get_policy(name).origin)
    return Dispatcher(rule, config, lazy=True, origin=origin)


def account_of(rows: StepTrace, settings: Settings, model: CostModel) -> Account:
    """Run a trace through the chosen policy, with a progress bar."""
    from dispatchkit.report import account_for

    config = config_for(rows, settings)
    note_unused_axes(rows, config)
    dispatcher = dispatcher_of(settings, config)
    with progress() as tell:
        return account_for(rows, dispatcher, model, tell=tell)


def config_for(rows: StepTrace, settings: Settings) -> DispatchConfig:
    """Return the configuration of the settings; what nobody gave fits the trace."""
    from dispatchkit.plan import trace_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)  # the one below says it
        fitting = trace_config(rows, sizes=settings["sizes"])
    return settings.dispatch_config(
        max_num_tokens=fitting.max_num_tokens,
        max_num_seqs=fitting.max_num_seqs,
        query_lens=fitting.query_lens,
        max_loras=fitting.max_loras,
    )


def note_unused_axes(rows: StepTrace, config: DispatchConfig) -> None:
    """Say so where a trace has values of axes that the settings do not declare."""
    unused = [name for name in rows.axes if name not in [axis.name for axis in config.axes]]
    if unused:
        complain(f"Note: {rows.source} has values of {', '.join(unused)}, not declared by --axes.")


# -- one batch ----------------------------------------------------------------------------


def show(answer: Explanation, out: Console) -> None:
    """Print an explanation, readable at 80 columns."""
    batch, decision = answer.batch, answer.decision
    facts = [f"{batch.num_tokens} tokens"]
    if batch.num_reqs is not None:
        facts.append(f"{batch.num_reqs} requests")
    facts.append(f"uniform decode of {batch.query_len}" if batch.uniform else "mixed")
    if batch.num_active_loras:
        facts.append(f"{batch.num_active_loras} adapters")
    facts += answer.axes_in_words
    allowed = ", ".join(mode.name for mode in sorted(batch.allowed_modes))
    out.print(Text(f"Batch    {', '.join(facts)}; allowed: {allowed}"))
    out.print(Text(f"Runs as  {decision}", style="bold"))
    out.print(Text(f"Because  {answer.because}"))
    if answer.nearest:
        out.print(Text(f"Nearest  {answer.nearest}"))
    out.print(Text(f"Padding  {decision.padding} tokens"))
    out.print(Text(f"Cost     {answer.cost}"))
    out.print(Text(f"Policy   {answer.policy}"))
    if not answer.candidates:
        out.print("No graph is large enough for it.")
        return
    rows = [
        [
            each.key,
            each.padding,
            "chosen" if each.chosen else each.why_not or "ready, not preferred",
        ]
        for each in answer.candidates
    ]
    out.print()
    out.print(table(["Graphs that could serve it", "Padding", "Verdict"], rows, right=[1]))


def explanation_as_dict(answer: Explanation) -> dict[str, Any]:
    """Return an explanation as plain values, ready for JSON."""
    batch, decision = answer.batch, answer.decision
    return {
        "batch": {
            "num_tokens": batch.num_tokens,
            "num_reqs": batch.num_reqs,
            "uniform": batch.uniform,
            "query_len": batch.query_len,
            "num_active_loras": batch.num_active_loras,
            "axes": dict(answer.axes),
            "allowed_modes": [mode.name for mode in sorted(batch.allowed_modes)],
        },
        "decision": {
            "mode": decision.mode.name,
            "key": None if decision.key is None else str(decision.key),
            "reason": decision.reason,
            "padded_num_tokens": decision.padded_num_tokens,
            "padding": decision.padding,
        },
        "because": answer.because,
        "nearest": answer.nearest or None,
        "policy": answer.policy,
        "candidates": [
            {
                "key": str(each.key),
                "chosen": each.chosen,
                "why_not": each.why_not,
                "padding": each.padding,
            }
            for each in answer.candidates
        ],
        "cost": None if answer.cost is None else attrs.asdict(answer.cost),
    }


# -- a whole trace ------------------------------------------------------------------------


def show_account(account: Account, out: Console, limit: int | None) -> None:
    """Print what became of a trace, readable at 80 columns."""
    speed = account.eager_time_s / account.time_s if account.time_s else 1.0
    out.print(Text(f"Trace    {account.source}, {account.num_steps:,} steps"))
    out.print(Text(f"Policy   {account.policy}, {account.num_graphs} graphs"))
    out.print(
        Text(
            f"Cost     {account.time_s:.4g} s, {speed:.2f} times as fast as eager; padding "
            f"{account.waste_pct:.2f}% ({account.cost_model})"
        )
    )
    rows, reasons = [], {}
    for (mode, reason), group in account.by(
        lambda one: (one.decision.mode.name, str(one.decision.reason))
    ).items():
        steps = sum(one.steps for one in group)
        runs_as = "eager" if mode == "NONE" else mode
        seconds = sum(one.total_us for one in group) / 1e6
        lost = sum(one.lost_us for one in group) / 1e6
        rows.append([runs_as, reason, f"{steps:,}", f"{seconds:.3f}", f"{lost:.3f}"])
        reasons[reason] = account.explain(group[0]).because
    out.print()
    columns = ["Runs as", "Reason", "Steps", "Seconds", "Lost (s)"]
    out.print(table(columns, rows, right=[2, 3, 4]))
    out.print()
    for reason, because in reasons.items():
        out.print(Text(f"{reason}: {because}"))
    shown = account.decisions[:limit]
    title = "Every decision" if len(shown) == len(account.decisions) else "Costliest decisions"
    out.print(Text(f"\n{title} (lost: above a graph of exactly its size)", style="bold"))
    cells = [_decision_cells(account, one) for one in shown]
    columns = ["Tokens", "Steps", "Runs as", "Pad", "ms", "Lost ms", "Nearest graph"]
    out.print(table(columns, cells, right=[0, 1, 3, 4, 5]))
    if len(shown) < len(account.decisions):
        rest = len(account.decisions) - len(shown)
        out.print(Text(f"{rest:,} more; --all or --json has them."))


def _decision_cells(account: Account, one: AccountedDecision) -> list[str]:
    answer = account.explain(one)
    runs_as = "eager"
    if one.decision.key is not None:
        axes = one.decision.key.descriptor.axes
        at = f" at {','.join(map(str, axes))}" if axes else ""
        runs_as = f"{one.decision.mode} {one.bucket}{at}"
    return [
        str(one.num_tokens),
        f"{one.steps:,}",
        runs_as,
        str(one.decision.padding),
        f"{one.total_us / 1e3:,.1f}",
        f"{one.lost_us / 1e3:,.1f}",
        answer.nearest or "-",
    ]


def account_as_dict(account: Account) -> dict[str, Any]:
    """Return a trace's decisions as plain values, ready for JSON."""
    return {
        "trace": account.source,
        "policy": account.policy,
        "steps": account.num_steps,
        "modes": account.modes(),
        "misses": account.misses(),
        "graphs": account.num_graphs,
        "waste_pct": round(account.waste_pct, 4),
        "cost_model": account.cost_model,
        "time_s": account.time_s,
        "eager_time_s": account.eager_time_s,
        "decisions": [
            {
                **explanation_as_dict(account.explain(one)),
                "steps": one.steps,
            }
            for one in account.decisions
        ],
    }
