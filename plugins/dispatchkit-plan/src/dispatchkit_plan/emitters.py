"""Convert a plan to the settings of a serving engine.

Capture sizes have different units: vLLM counts the tokens of any step, whereas SGLang and
TensorRT-LLM count the requests of decode steps. ``EngineSettings.means`` names the unit. With
speculative decoding, a decode step has several tokens per request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import check_count, check_counts

from dispatchkit_plan.grid import GridPlan
from dispatchkit_plan.results import Plan

__all__ = ["EMITTERS", "EngineSettings", "emit", "emit_grid"]


@attrs.frozen
class EngineSettings:
    """Settings for one engine.

    Attributes:
        engine: Name of the engine, as passed to ``emit``.
        text: Text to paste into the command line or configuration of the engine.
        sizes: Capture sizes in the text.
        means: Unit of the sizes.
        notes: Further advice, one note per entry.
        source: Where the engine documents the format.
    """

    engine: str
    text: str
    sizes: tuple[int, ...]
    means: str
    notes: tuple[str, ...]
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return attrs.asdict(self)


def emit(plan: Plan | Sequence[int], engine: str, *, query_len: int = 1) -> EngineSettings:
    """Return the settings of an engine for a plan.

    Args:
        plan: Plan, whose ``robust`` plan is used, or a sequence of sizes in tokens.
        engine: ``dispatchkit``, ``vllm``, ``sglang``, ``sglang-legacy`` or ``tensorrt-llm``.
        query_len: Number of tokens per request in a uniform decode step: 1, or 1 plus the number of
            draft tokens. For engines that count requests, sizes are divided by this number and
            rounded up.

    Raises:
        UnknownNameError: The engine is unknown.
        ConfigError: The plan has no sizes, or a size or ``query_len`` is not a whole number of at
            least 1.
    """
    if engine not in tuple(EMITTERS):  # a tuple, because the value might be unhashable
        raise UnknownNameError("engine", engine, EMITTERS)
    make = EMITTERS[engine]
    query_len = check_count(query_len, "query_len")
    notes: tuple[str, ...] = ()
    if isinstance(plan, Plan):
        chosen = plan.robust
        sizes = chosen.sizes
        if len(chosen.families) > 1:
            if engine in _DECODE_ONLY:
                decode = [f.sizes for f in chosen.families if f.uniform]
                sizes = tuple(sorted({size for part in decode for size in part}))
            else:
                notes = (
                    (
                        "The plan has separate sizes for each kind of step, but this engine "
                        "accepts one list for all kinds, so it may capture more graphs than "
                        "planned."
                    ),
                )
    else:
        sizes = tuple(sorted(set(check_counts(plan, "plan"))))
    if not sizes:
        raise ConfigError("plan", (), "a plan, or a list of at least one size")
    made = make(sizes, query_len)
    return attrs.evolve(made, notes=(*made.notes, *notes))


def emit_grid(plan: GridPlan) -> EngineSettings:
    """Return the arguments of a ``GraphRunner`` for ``plan.robust``."""
    chosen = plan.robust
    grid = ", ".join(f"{bucket}: {_tuple(sizes)}" for bucket, sizes in chosen.grid.items())
    sizes = tuple(sorted({size for row in chosen.grid.values() for size in row}))
    return EngineSettings(
        engine="dispatchkit",
        text=f"axes=[Axis({chosen.axis!r}, {_tuple(tuple(chosen.grid))})],\n"
        f"sizes={_tuple(sizes)},\n"
        f"policy=GridPolicy({{{grid}}}),\n",
        sizes=sizes,
        means=f"rows per step, separately for each bucket of {chosen.axis}",
        notes=(
            (
                "These are arguments of a GraphRunner. The axis must be a parameter of the step or "
                "a dimension of an input. Imports: from dispatchkit import Axis; from "
                "dispatchkit_plan import GridPolicy."
            ),
        ),
        source="dispatchkit_plan.GridPolicy",
    )


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))}{',' if len(numbers) == 1 else ''})"


def _per_request(sizes: tuple[int, ...], query_len: int) -> tuple[int, ...]:
    return tuple(sorted({-(-size // query_len) for size in sizes}))


def _dispatchkit(sizes: tuple[int, ...], query_len: int) -> EngineSettings:
    query = f", query_lens=({query_len},)" if query_len > 1 else ""
    return EngineSettings(
        engine="dispatchkit",
        text=f"DispatchConfig(sizes={_tuple(sizes)}{query})",
        sizes=sizes,
        means="tokens per step, for all kinds of steps",
        notes=(),
        source="dispatchkit.keys.DispatchConfig",
    )


def _vllm(sizes: tuple[int, ...], query_len: int) -> EngineSettings:
    config = json.dumps({"cudagraph_capture_sizes": list(sizes)})
    notes = [
        (
            "Leave max_cudagraph_capture_size unset: if sizes are listed, it must equal the "
            "largest size."
        ),
        (
            "With FULL_AND_PIECEWISE, each size is captured for mixed steps and, up to "
            "max_num_seqs x tokens per request, again for uniform decode."
        ),
    ]
    if query_len > 1:
        notes.append(
            f"With {query_len} tokens per request, vLLM rounds every size up to a multiple of "
            f"{query_len}, so plan with align={query_len} (--align {query_len})."
        )
    return EngineSettings(
        engine="vllm",
        text=f"--compilation-config '{config}'",
        sizes=sizes,
        means="tokens per step, for all kinds of steps",
        notes=tuple(notes),
        source="docs.vllm.ai, api/vllm/config/compilation: CompilationConfig."
        "cudagraph_capture_sizes (0.11 to 0.19)",
    )


_SGLANG_NOTES = (
    (
        "The sizes apply only to decode steps. From a plan made with --keyed, only the uniform "
        "decode sizes are used."
    ),
    "With data-parallel attention, sizes count the requests of one rank.",
)


def _sglang(sizes: tuple[int, ...], query_len: int) -> EngineSettings:
    requests = _per_request(sizes, query_len)
    return EngineSettings(
        engine="sglang",
        text=f"--cuda-graph-bs-decode {' '.join(map(str, requests))}",
        sizes=requests,
        means="requests per decode step",
        notes=(
            (
                "In releases up to about 0.5.12, the flag is --cuda-graph-bs. For these releases, "
                "use the engine sglang-legacy."
            ),
            *_SGLANG_NOTES,
        ),
        source="sgl-project/sglang, python/sglang/srt/server_args.py: cuda_graph_bs_decode",
    )


def _sglang_legacy(sizes: tuple[int, ...], query_len: int) -> EngineSettings:
    requests = _per_request(sizes, query_len)
    return EngineSettings(
        engine="sglang-legacy",
        text=f"--cuda-graph-bs {' '.join(map(str, requests))}",
        sizes=requests,
        means="requests per decode step",
        notes=("Newer releases call the flag --cuda-graph-bs-decode.", *_SGLANG_NOTES),
        source="docs.sglang.ai, advanced_features/server_arguments: --cuda-graph-bs",
    )


def _tensorrt_llm(sizes: tuple[int, ...], query_len: int) -> EngineSettings:
    requests = _per_request(sizes, query_len)
    listed = ", ".join(map(str, requests))
    return EngineSettings(
        engine="tensorrt-llm",
        text=f"cuda_graph_config:\n  enable_padding: true\n  batch_sizes: [{listed}]\n",
        sizes=requests,
        means="requests per decode (generation-only) step",
        notes=(
            (
                "Use this YAML with `trtllm-serve --config FILE` (older releases: "
                "--extra_llm_api_options)."
            ),
            "Without enable_padding, only batches of exactly these sizes replay a graph.",
            (
                "Leave max_batch_size of cuda_graph_config unset: if sizes are listed, it must "
                "equal the largest size."
            ),
        ),
        source="nvidia.github.io/TensorRT-LLM, llm-api/reference/DecodeCudaGraphConfig (1.3)",
    )


EMITTERS: Mapping[str, Callable[[tuple[int, ...], int], EngineSettings]] = {
    "dispatchkit": _dispatchkit,
    "vllm": _vllm,
    "sglang": _sglang,
    "sglang-legacy": _sglang_legacy,
    "tensorrt-llm": _tensorrt_llm,
}
"""Functions that make the settings, by engine."""

_DECODE_ONLY = frozenset({"sglang", "sglang-legacy", "tensorrt-llm"})
