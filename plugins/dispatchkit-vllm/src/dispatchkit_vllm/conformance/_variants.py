"""Compare the second model runner's graph manager and the drafter's dispatcher with records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dispatchkit_vllm.conformance._dispatchers import (
    build,
    config_for,
    error_of,
    keys_of,
    mode_of,
    plain,
    result_of,
)
from dispatchkit_vllm.conformance._records import Fields, Findings, attempt
from dispatchkit_vllm.facade import drafter, v0_33_manager

Record = Mapping[str, Any]

# -- the manager of the second model runner -----------------------------------------------

_MANAGER = Fields.of("id cfg lora_cases capture dispatch")
_MANAGER_CFG = Fields.of(
    "mode sizes max_num_seqs query_len varlen_decode lora max_loras specialize_lora "
    "specialize_active_lora captured"
)


def check_manager(record: Record, found: Findings) -> None:
    """Compare the graph manager with a record of its graphs and decisions."""
    _MANAGER.check(record["id"], record)
    cfg = _MANAGER_CFG.check("cfg", record["cfg"])
    sizes = sorted(set(cfg["sizes"]))
    manager = v0_33_manager.CudaGraphManager(
        config_for(cfg, sizes, max(sizes, default=0)),
        "cpu",
        mode_of(cfg),
        cfg["query_len"],
        varlen_decode=cfg["varlen_decode"],
    )
    manager.graphs_captured = cfg["captured"]
    found.compare("lora_cases", record["lora_cases"], manager.lora_capture_cases)
    captured = {
        str(mode): [_execution(each) for each in descriptors]
        for mode, descriptors in manager.capture_descs.items()
    }
    found.compare("capture", record["capture"], captured)
    for row in record["dispatch"]:
        num_reqs, num_tokens, uniform, loras, longest, *expected = row
        answer = manager.dispatch(num_reqs, num_tokens, uniform, loras, longest)
        found.compare(f"dispatch {row[:5]}", expected, [str(answer.cg_mode), *_execution(answer)])


def _execution(descriptor: Any) -> list[Any]:
    return [
        descriptor.num_tokens,
        descriptor.num_reqs,
        descriptor.uniform_token_count,
        descriptor.max_query_len,
        descriptor.num_active_loras,
    ]


# -- the drafter --------------------------------------------------------------------------

_DRAFTER_CFG = Fields.of(
    "config_mode mode sizes uniform_sizes disable_uniform_alignment max_num_seqs query_lens tp "
    "sequence_parallel is_drafter piecewise_compiled initialize"
)
_DRAFTER_PARTS = "keys capture_cases dispatch padded plans"
_DRAFTER_GROUP = Fields.of("uniform uniform_query_len cascade r")
_DRAFTER_PADDED = Fields.of("uniform uniform_query_len r")


def check_drafter(record: Record, found: Findings) -> None:
    """Compare the drafter's dispatcher with a record of its keys and decisions."""
    cfg = _DRAFTER_CFG.check("cfg", record["cfg"])
    ends = [name for name in ("construct_error", "init_error") if name in record]
    begins = "id cfg final_sizes final_uniform_sizes"
    if ends:
        Fields.of(f"{begins} {' '.join(ends)}").check(record["id"], record)
    else:
        # capture_cases is required if keys were initialized, and optional otherwise.
        parts = _DRAFTER_PARTS if cfg["initialize"] else _DRAFTER_PARTS.replace("capture_cases", "")
        Fields.of(f"{begins} {parts}", "capture_cases").check(record["id"], record)
    sizes = sorted(set(cfg["sizes"]))
    found.compare("final_sizes", record["final_sizes"], sizes)
    aligned = sorted(set(cfg["uniform_sizes"]))
    found.compare("final_uniform_sizes", record["final_uniform_sizes"], aligned)
    config = config_for(cfg, sizes, max(sizes, default=0))
    dispatcher = build(
        lambda: drafter.CudagraphDispatcher(config, is_drafter=cfg["is_drafter"]), record, found
    )
    if dispatcher is None:
        return
    if cfg["initialize"]:
        error = error_of(
            lambda: dispatcher.initialize_cudagraph_keys(mode_of(cfg), cfg["query_lens"])
        )
        found.compare_error("init_error", record.get("init_error"), error)
        if error is not None or "init_error" in record:
            return
    found.compare("keys", record["keys"], keys_of(dispatcher))
    for uniform, query_len, *expected in record.get("capture_cases", ()):
        got = attempt(expected[0], partial(_cases, dispatcher, uniform, query_len))
        got = got if isinstance(got, list) else [got]
        found.compare(f"capture_cases {uniform, query_len}", expected, got)
    for group in record["dispatch"]:
        _DRAFTER_GROUP.check("dispatch", group)
        for num_tokens, *expected in group["r"]:
            descriptor = drafter.BatchDescriptor(
                num_tokens, bool(group["uniform"]), group["uniform_query_len"]
            )
            got = attempt(
                expected[0],
                partial(_dispatched, dispatcher, descriptor, bool(group["cascade"])),
            )
            got = got if isinstance(got, list) else [got]
            found.compare(f"dispatch {descriptor} cascade={group['cascade']}", expected, got)
    for group in record["padded"]:
        _DRAFTER_PADDED.check("padded", group)
        for num_tokens, *expected in group["r"]:
            asked = (num_tokens, bool(group["uniform"]), group["uniform_query_len"])
            got = attempt(
                expected[0],
                partial(_as_list, dispatcher.cudagraph_padded_num_tokens, *asked),
            )
            got = got if isinstance(got, list) else [got]
            found.compare(f"padded {asked}", expected, got)
    for row in record["plans"]:
        _compare_plan(row, dispatcher, found)


def _as_list(call: Callable[..., Any], *args: Any) -> list[Any]:
    return list(call(*args))


def _dispatched(dispatcher: Any, *args: Any) -> list[Any]:
    return result_of(dispatcher.dispatch(*args))


def _cases(dispatcher: Any, uniform: Any, query_len: int) -> list[Any]:
    sizes, descriptors, mode = dispatcher.get_capture_cases(bool(uniform), query_len)
    return [sizes, [plain(each) for each in descriptors], str(mode)]


def _compare_plan(row: Any, dispatcher: Any, found: Findings) -> None:
    num_tokens, num_reqs, longest, cascade, uniform, described, *plan = row
    batch = (num_tokens, num_reqs, longest)
    got = attempt(uniform, lambda: list(dispatcher.caculate_uniform_decode(*batch)))
    found.compare(f"uniform {batch}", uniform, got)
    got = attempt(described, lambda: list(dispatcher.get_local_batch_description(*batch)))
    found.compare(f"description {batch}", described, got)

    def planned() -> list[Any]:
        mode, descriptor, tokens = dispatcher.fast_plan(*batch, bool(cascade))
        return [str(mode), plain(descriptor), tokens]

    got = attempt(plan[0], planned)
    found.compare(f"plan {batch} cascade={cascade}", plan, got if isinstance(got, list) else [got])
