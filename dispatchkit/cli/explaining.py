"""``explain``: show how a batch or a trace would run, and why, without a device."""

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
    dispatcher_of,
    settings_of,
)
from dispatchkit.cli.output import JsonOption, console, print_json, table
from dispatchkit.dispatch import CostModel, Explanation, StepCost, explain, find_cost_model
from dispatchkit.distributions import load_attribute
from dispatchkit.errors import ConfigError, MissingDistributionError, counted
from dispatchkit.keys import CaptureSizeWarning, RuntimeMode, check_count
from dispatchkit.keys.config import MAX_LORAS

if TYPE_CHECKING:
    from dispatchkit.keys import DispatchConfig
    from dispatchkit.settings import Settings


def explain_batch(
    num_tokens: Annotated[
        str | None,
        typer.Argument(metavar="N", help="Number of tokens in the batch.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Explain a trace instead of a batch; accepts the files that `plan` reads.",
        ),
    ] = None,
    num_reqs: Annotated[
        int,
        typer.Option(
            "--num-reqs", metavar="N", help="Number of requests in the batch; 0 if unknown."
        ),
    ] = 0,
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform",
            metavar="",
            help="Explain a uniform decode batch instead of a mixed batch. With several "
            "--query-lens, the query length is N divided by --num-reqs.",
        ),
    ] = False,
    loras: Annotated[
        int, typer.Option("--loras", metavar="N", help="Number of adapters that the batch uses.")
    ] = 0,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--value",
            metavar="AXIS=N",
            help="Value of an axis declared with --axes; repeat the option for each axis.",
            show_default=False,
        ),
    ] = None,
    ceiling: Annotated[
        str,
        typer.Option(
            "--ceiling",
            metavar="MODE",
            help="Highest allowed runtime mode: NONE, PIECEWISE or FULL.",
        ),
    ] = "FULL",
    show_all: Annotated[
        bool,
        typer.Option(
            "--all", metavar="", help="Show all decisions of a trace, not only the most expensive."
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
    """Show how a batch or a trace would run: the graph, the reason and the cost.

    All graphs that the policy declares are assumed to be captured. Costs and traces need
    dispatchkit-plan.

    Example: dispatchkit explain 13 --num-reqs 13 --uniform

    Example: dispatchkit explain --trace trace.csv.gz --policy vllm
    """
    if num_tokens is None and trace is None:
        message = (
            "Give the number of tokens N of a batch, or --trace FILE. Next: dispatchkit explain "
            "--help."
        )
        raise ConfigError("N", None, "given", message=message)
    if num_tokens is not None and trace is not None:
        raise _not_with_trace("N", num_tokens)
    batch_tokens = None if num_tokens is None else check_count(num_tokens, "N", minimum=0)
    check_count(loras, "--loras", minimum=0, maximum=MAX_LORAS)
    highest = RuntimeMode.parse(ceiling, "--ceiling")
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
    if trace is not None:
        facts: dict[str, Any] = {"--num-reqs": num_reqs, "--uniform": uniform}
        facts |= {"--loras": loras, "--value": values}
        for flag, value in facts.items():
            if value:
                raise _not_with_trace(flag, value)
        if highest is not RuntimeMode.FULL:
            raise _not_with_trace("--ceiling", ceiling)
        explain_trace = load_attribute("explain_trace", "explain --trace")
        explain_trace(trace, settings, show_all=show_all, as_json=as_json)
        return
    if show_all:
        message = "--all applies only to traces. Add --trace FILE, or omit --all."
        raise ConfigError("--all", show_all, "omitted without --trace", message=message)
    config = _config_for_batch(settings, batch_tokens or 0, loras)
    variant = _variant(config, loras, values or ())
    dispatcher = dispatcher_of(settings, config)
    query_class = _query_class(config, batch_tokens or 0, num_reqs) if uniform else 0
    answer = explain(dispatcher, batch_tokens or 0, num_reqs, query_class, variant, int(highest))
    model = _cost_model(settings)
    if model is not None and not answer.error:
        cost = StepCost.of(model, answer.decision, answer.batch.num_tokens)
        answer = attrs.evolve(answer, cost=cost)
    if answer.candidates:
        answer = attrs.evolve(answer, note="assumes that all declared graphs are captured")
    if as_json:
        print_json(answer.to_json())
    else:
        show(answer, console())


def _not_with_trace(option: str, value: Any) -> ConfigError:
    return ConfigError(
        option,
        value,
        "omitted with --trace",
        message=f"{option} cannot be combined with --trace, which explains all batches of a file. "
        "Omit one of them.",
    )


def _cost_model(settings: Settings) -> CostModel | None:
    """Return the cost model of the settings, or None if the default model is not installed."""
    try:
        return find_cost_model(settings["cost_model"])
    except MissingDistributionError:
        if settings.is_given("cost_model"):
            raise
        return None


def _config_for_batch(settings: Settings, num_tokens: int, loras: int) -> DispatchConfig:
    """Return the configuration for a batch.

    Limits that are not given are raised to fit the batch. If ``max_num_tokens`` is given, only
    ``max_loras`` is raised.
    """
    config = settings.dispatch_config(max_loras=loras)
    if settings.is_given("max_num_tokens") or num_tokens <= config.max_num_tokens:
        return config
    with warnings.catch_warnings():
        # The explanation states whether a graph covers the batch, so no warning is needed.
        warnings.simplefilter("ignore", CaptureSizeWarning)
        return settings.dispatch_config(
            max_loras=loras,
            max_num_tokens=num_tokens,
            sizes=config.sizes,
            max_num_seqs=max(config.max_num_seqs, min(num_tokens, 2**31 - 1)),
        )


def _query_class(config: DispatchConfig, num_tokens: int, num_reqs: int) -> int:
    """Return the ``uniform`` argument of ``dispatch`` for a uniform decode batch.

    If only one query length is configured, it is not compared with the batch, because engines may
    pad batches.

    Raises:
        ConfigError: Several query lengths are configured, and none equals the number of tokens per
            request.
    """
    lens = config.query_lens
    if len(lens) == 1:
        return 1
    query_len, rest = divmod(num_tokens, num_reqs) if num_reqs > 0 else (0, 0)
    if rest or query_len not in lens:
        each = ", ".join(map(str, lens))
        raise ConfigError(
            "--num-reqs",
            num_reqs,
            "the number of tokens divided by one of the query lengths",
            message=f"--num-reqs {num_reqs} does not select one of the query lengths ({each}). "
            f"With --uniform, {counted(num_tokens, 'token')} divided by --num-reqs must be one of "
            "them.",
        )
    return 1 + lens.index(query_len)


def _variant(config: DispatchConfig, loras: int, values: Sequence[str]) -> int:
    """Return the ``loras`` argument of ``dispatch`` for the given adapters and axis values."""
    given: dict[str, int] = {}
    for pair in values:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or name in given or not (text.isascii() and text.isdecimal()):
            raise ConfigError("--value", pair, "AXIS=N with a whole number N, given once per axis")
        given[name] = check_count(int(text[:20]), name, minimum=0)
    if not given and not config.axes:
        return loras
    if given and not config.axes:
        raise ConfigError(
            "--value",
            list(values),
            "omitted if --axes declares no axis",
            message="--value needs an axis. Declare it with --axes NAME=A,B.",
        )
    return config.variant(loras, **given)


def show(answer: Explanation, out: Console) -> None:
    """Print an explanation that fits 80 columns."""
    batch, decision = answer.batch, answer.decision
    allowed = ", ".join(mode.name for mode in sorted(batch.allowed_modes))
    out.print(Text(f"Batch    {', '.join(answer.facts)}; allowed: {allowed}"))
    out.print(
        Text(
            f"Runs as  {decision}" if not answer.error else f"Raises   {answer.error}", style="bold"
        )
    )
    out.print(Text(f"Because  {answer.because}"))
    if answer.nearest:
        out.print(Text(f"Nearest  {answer.nearest}"))
    out.print(Text(f"Padding  {counted(decision.padding, 'token')}"))
    if answer.cost is not None:
        out.print(Text(f"Cost     {answer.cost}"))
    out.print(Text(f"Policy   {answer.policy}"))
    if answer.note:
        out.print(Text(f"Note     {answer.note}"))
    if answer.no_candidates:
        out.print(Text(f"Graphs   {answer.no_candidates}"))
    if not answer.candidates:
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
    out.print(table(["Smallest graphs that fit", "Padding", "Verdict"], rows, right=[1]))
