"""``explain``: what would happen to one batch, and why. Needs no torch and no device."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dispatchkit.cli.output import (
    JsonOption,
    console,
    load_installed_plugins,
    mention_problems,
    print_json,
    short_origin,
    table,
)
from dispatchkit.dispatch import Dispatcher, Explanation, explain
from dispatchkit.keys import DispatchConfig, RuntimeMode


def explain_batch(
    num_tokens: Annotated[int, typer.Argument(metavar="N", help="Tokens of the batch.")],
    num_reqs: Annotated[int, typer.Option(help="Requests of the batch; 0: not known.")] = 0,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="A uniform decode batch, rather than a mixed one.")
    ] = False,
    loras: Annotated[int, typer.Option(help="Adapters in use.")] = 0,
    ceiling: Annotated[
        str, typer.Option(metavar="MODE", help="Highest mode allowed: NONE, PIECEWISE or FULL.")
    ] = "FULL",
    policy: Annotated[str, typer.Option(help="The policy that decides.")] = "vllm",
    sizes: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Capture sizes; by default derived from the limit."),
    ] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option(help="Largest batch in tokens; by default the largest size.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most requests of a batch.")] = None,
    query_len: Annotated[int, typer.Option(help="Tokens per request when uniform.")] = 1,
    max_loras: Annotated[int | None, typer.Option(help="Most adapters at once.")] = None,
    mode: Annotated[
        str, typer.Option(help="Configured mode, as vLLM's cudagraph mode.")
    ] = "FULL_AND_PIECEWISE",
    as_json: JsonOption = False,
) -> None:
    """Say which graph a batch would get, by which policy, and what was near.

    Every graph that the policy declares is taken as captured.

    Example: dispatchkit explain 13 --num-reqs 13 --uniform
    """
    given: dict[str, Any] = {
        "capture_sizes": sizes,
        "max_num_tokens": max_num_tokens,
        "max_num_seqs": max_num_seqs,
        "query_lens": query_len,
        "max_loras": loras if max_loras is None else max_loras,
    }
    config = DispatchConfig(
        mode=mode, **{name: value for name, value in given.items() if value is not None}
    )
    highest = RuntimeMode.parse(ceiling)
    plugins = load_installed_plugins()
    mention_problems(plugins)
    rule = plugins.create_policy(policy)
    origin = short_origin(plugins.get_policy(policy).origin)
    dispatcher = Dispatcher(rule, config, lazy=True, origin=origin)
    answer = explain(dispatcher, num_tokens, num_reqs, int(uniform), loras, int(highest))
    if as_json:
        print_json(explanation_as_dict(answer))
    else:
        show(answer, console())


def show(answer: Explanation, out: Console) -> None:
    """Print an explanation, readable at 80 columns."""
    batch, decision = answer.batch, answer.decision
    facts = [f"{batch.num_tokens} tokens"]
    if batch.num_reqs is not None:
        facts.append(f"{batch.num_reqs} requests")
    facts.append(f"uniform decode of {batch.query_len}" if batch.uniform else "mixed")
    if batch.num_active_loras:
        facts.append(f"{batch.num_active_loras} adapters")
    allowed = ", ".join(mode.name for mode in sorted(batch.allowed_modes))
    out.print(Text(f"Batch    {', '.join(facts)}; allowed: {allowed}"))
    out.print(Text(f"Runs as  {decision}", style="bold"))
    out.print(Text(f"Padding  {decision.padding} tokens"))
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
            "allowed_modes": [mode.name for mode in sorted(batch.allowed_modes)],
        },
        "decision": {
            "mode": decision.mode.name,
            "key": None if decision.key is None else str(decision.key),
            "reason": decision.reason,
            "padded_num_tokens": decision.padded_num_tokens,
            "padding": decision.padding,
        },
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
    }
