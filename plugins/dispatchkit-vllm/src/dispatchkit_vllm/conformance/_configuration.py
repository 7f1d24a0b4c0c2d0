"""Compare mode properties, mode resolution and capture sizes with recorded results."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from dispatchkit.keys import (
    CUDAGraphMode,
    derive_capture_sizes,
    resolve_mode,
    round_sizes_for_query_len,
)

from dispatchkit_vllm.conformance._records import Fields, Findings, FormatError, attempt

Record = Mapping[str, Any]

_SIZES = Fields.of("id cfg", "sizes max adjusted error")
_SIZES_CFG = {
    "0.11": Fields.of(
        "version user_sizes max_num_seqs max_num_batched_tokens tp sequence_parallel enforce_eager"
    ),
    "0.13": Fields.of(
        "version user_sizes max_size max_num_seqs max_num_batched_tokens num_speculative_tokens "
        "tp sequence_parallel enforce_eager mode"
    ),
    "newest": Fields.of(
        "version user_sizes max_size max_num_seqs max_num_batched_tokens num_speculative_tokens "
        "tp sequence_parallel enforce_eager mode blackwell_datacenter performance_mode"
    ),
}
_RESOLVE = Fields.of(
    "id mode support query_len splits_attention full_compile second_runner result adjusts_sizes"
)
_ENUM = Fields.of(
    "mode decode_mode mixed_mode separate_routine requires_piecewise_compilation has_full "
    "has_piecewise max_mode without_piecewise truthy str valid_runtime has_mode"
)


def check_sizes(record: Record, found: Findings) -> None:
    """Compare derived and rounded capture sizes with recorded sizes."""
    _SIZES.check(record["id"], record)
    if ("error" in record) == ("sizes" in record) or ("sizes" in record) != ("max" in record):
        given = [name for name in ("error", "sizes", "max") if name in record]
        raise FormatError(
            "a record must have either the field error, or the fields sizes and max, got "
            f"{', '.join(given) or 'none of them'}."
        )
    version = record["cfg"].get("version")
    if version not in _SIZES_CFG:
        raise FormatError(f"cfg.version must be one of {sorted(_SIZES_CFG)}, got {version!r}.")
    cfg = _SIZES_CFG[version].check("cfg", record["cfg"])
    parallel = {
        "tensor_parallel_size": cfg["tp"],
        "sequence_parallel": cfg["sequence_parallel"],
    }

    def derived() -> list[Any]:
        sizes = derive_capture_sizes(
            version,
            user_sizes=cfg["user_sizes"],
            user_max_size=cfg.get("max_size"),
            max_num_seqs=cfg["max_num_seqs"],
            max_num_batched_tokens=cfg["max_num_batched_tokens"],
            mode=CUDAGraphMode.parse(cfg.get("mode", "FULL_AND_PIECEWISE")),
            query_len=1 + cfg.get("num_speculative_tokens", 0),
            enforce_eager=cfg["enforce_eager"],
            ceiling=1024 if cfg.get("blackwell_datacenter") else 512,
            small_steps=cfg.get("performance_mode") == "interactivity",
            **parallel,
        )
        return [list(sizes.sizes), sizes.max_size]

    expected = f"!{record['error']}" if "error" in record else [record["sizes"], record["max"]]
    found.compare("sizes", expected, attempt(expected, derived))
    for query_len, *rounded in record.get("adjusted", ()):
        rounding = partial(
            round_sizes_for_query_len,
            record["sizes"],
            query_len,
            generation=version,
            max_size=record["max"],
            **parallel,
        )
        got = attempt(rounded[0], rounding)
        if not isinstance(got, str):
            got = [list(got.sizes), got.max_size]
        found.compare(f"adjusted[{query_len}]", rounded, got if isinstance(got, list) else [got])


def check_resolution(record: Record, found: Findings) -> None:
    """Compare the mode that is chosen for an attention backend with the recorded mode."""
    _RESOLVE.check(record["id"], record)

    def resolved() -> list[Any]:
        resolution = resolve_mode(
            record["mode"],
            record["support"],
            query_len=record["query_len"],
            splits_attention=record["splits_attention"],
            fully_compiled=record["full_compile"],
            rounds_sizes=not record["second_runner"],
        )
        return [str(resolution.mode), resolution.rounds_sizes]

    result = record["result"]
    refused = result.startswith("!")
    if refused:
        found.compare("adjusts_sizes", False, record["adjusts_sizes"])
    expected = result if refused else [result, record["adjusts_sizes"]]
    found.compare("result", expected, attempt(result, resolved))


def check_mode(record: Record, found: Findings) -> None:
    """Compare the properties of a mode with the recorded properties."""
    _ENUM.check("a record of mode properties", record)
    mode = CUDAGraphMode[record["mode"]]
    got = {
        "mode": mode.name,
        "decode_mode": str(mode.decode_mode()),
        "mixed_mode": str(mode.mixed_mode()),
        "separate_routine": mode.separate_routine(),
        "requires_piecewise_compilation": mode.requires_piecewise_compilation(),
        "has_full": mode.has_full_cudagraphs(),
        "has_piecewise": mode.has_piecewise_cudagraphs(),
        "max_mode": str(mode.max_cudagraph_mode()),
        "without_piecewise": str(mode.without_piecewise()),
        "truthy": bool(mode),
        "str": str(mode),
        "valid_runtime": CUDAGraphMode.is_valid_runtime_mode(mode),
    }
    for name, value in got.items():
        found.compare(name, record[name], value)
    found.compare("has_mode", set(CUDAGraphMode.__members__), set(record["has_mode"]))
    for name, expected in record["has_mode"].items():
        other = CUDAGraphMode[name]
        answer = attempt(expected, partial(mode.has_mode, other))
        found.compare(f"has_mode[{name}]", expected, answer)
