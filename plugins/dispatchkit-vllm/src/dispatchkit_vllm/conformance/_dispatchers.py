"""Comparing the dispatchers of all generations with recorded results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs

from dispatchkit.keys import CUDAGraphMode, padding_table, round_sizes_for_query_len

from dispatchkit_vllm.conformance._records import Fields, Findings, FormatError, attempt
from dispatchkit_vllm.facade import (
    drafter,
    lora_count,
    v0_11,
    v0_11_1,
    v0_13,
    v0_33,
    v0_33_manager,
)

Record = Mapping[str, Any]

_CFG = "config_mode mode sizes max_num_seqs query_len piecewise_compiled initialize"
_ENDINGS = "construct_error adjust_error init_error keys_before_error"


@attrs.frozen
class Kind:
    """How records of one generation are read.

    Attributes:
        module: The facade.
        cfg: Fields of the configuration.
        group: Arguments that the rows of a group share.
        parts: Fields of a record that ran to its end.
        optional: Fields that such a record may lack.
        descending: Sizes are stored from the largest down.
        sorts_sizes: The configuration layer puts sizes in order.
    """

    module: Any
    cfg: Fields
    group: tuple[str, ...]
    parts: str
    optional: str = ""
    descending: bool = False
    pads: bool = True


KINDS: Mapping[str, Kind] = {
    "vllm-0.11": Kind(
        v0_11,
        Fields.of(_CFG),
        ("uniform",),
        "final_sizes keys pad dispatch flow",
        descending=True,
        pads=False,
    ),
    "vllm-0.11.1": Kind(
        v0_11_1,
        Fields.of(f"{_CFG} lora specialize_lora"),
        ("uniform", "has_lora", "cascade"),
        "final_sizes keys pad dispatch flow",
        pads=False,
    ),
    "vllm-0.13": Kind(
        v0_13,
        Fields.of(f"{_CFG} adjusted_for_query_len init_query_len lora specialize_lora"),
        ("uniform", "has_lora", "disable_full"),
        "final_sizes max_size keys pad dispatch",
    ),
    "seed-003-lora": Kind(
        lora_count,
        Fields.of(f"{_CFG} adjusted_for_query_len init_query_len lora specialize_lora max_loras"),
        ("uniform", "has_lora", "disable_full", "num_active_loras"),
        "final_sizes max_size keys pad dispatch",
    ),
    "vllm-newest": Kind(
        v0_33,
        Fields.of(
            f"{_CFG} adjusted_for_query_len init_query_len lora specialize_lora max_loras "
            "specialize_active_lora compile_sizes"
        ),
        ("uniform", "has_lora", "num_active_loras", "valid", "invalid"),
        "final_sizes max_size keys capture_order dispatch",
        optional="pad",
    ),
}


def config_for(cfg: Record, sizes: list[int], largest: int) -> Any:
    """Return a configuration with the attributes that the facades read."""
    query_len = cfg.get("query_len", 1)
    lora = SimpleNamespace(
        max_loras=cfg.get("max_loras"),
        specialize_active_lora=cfg.get("specialize_active_lora", False),
    )
    if lora.max_loras is None:
        lora.max_loras = 1
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.parse(cfg.get("config_mode", cfg["mode"])),
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=largest,
        bs_to_padded_graph_size=list(padding_table(sizes)),
        cudagraph_specialize_lora=cfg.get("specialize_lora", True),
        compile_sizes=cfg.get("compile_sizes"),
        is_attention_compiled_piecewise=lambda: cfg.get("piecewise_compiled", True),
        pass_config=SimpleNamespace(enable_sp=cfg.get("sequence_parallel", False)),
        uniform_cudagraph_capture_sizes=sorted(set(cfg.get("uniform_sizes", ()))),
        disable_cudagraph_uniform_alignment=cfg.get("disable_uniform_alignment", False),
    )
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=cfg["max_num_seqs"]),
        speculative_config=(
            SimpleNamespace(num_speculative_tokens=query_len - 1) if query_len > 1 else None
        ),
        num_speculative_tokens=query_len - 1,
        lora_config=lora if cfg.get("lora") else None,
        parallel_config=SimpleNamespace(tensor_parallel_size=cfg.get("tp", 1)),
    )


def check_dispatcher(record: Record, found: Findings) -> None:
    """Compare a record of one of the dispatchers."""
    kind = KINDS[record["id"].split("/")[0]]
    ends = [name for name in _ENDINGS.split() if name in record]
    has_sizes = "adjust_error" not in record
    sized = set(kind.parts.split()) & {"final_sizes", "max_size"} if has_sizes else set()
    if ends:
        allowed = Fields(frozenset({"id", "cfg", *ends, *sized}))
    else:
        allowed = Fields.of(f"id cfg {kind.parts}", kind.optional)
    allowed.check(record["id"], record)
    cfg = kind.cfg.check("cfg", record["cfg"])
    if (
        kind.optional
        and not ends
        and ("pad" in record) != bool(record["capture_order"] or _on(cfg))
    ):
        raise FormatError("pad is there exactly when a table is built.")

    sizes = sorted(set(cfg["sizes"]), reverse=kind.descending)
    if cfg.get("adjusted_for_query_len"):
        try:
            sizes = list(round_sizes_for_query_len(sizes, cfg["query_len"]).sizes)
        except ValueError as refused:
            found.compare_error("adjust_error", record.get("adjust_error"), refused)
            return
    found.compare_error("adjust_error", record.get("adjust_error"), None)
    if "adjust_error" in record:
        return
    found.compare("final_sizes", record["final_sizes"], sizes)
    largest = max(sizes, default=0)
    if "max_size" in record:
        found.compare("max_size", record["max_size"], largest)

    config = config_for(cfg, sizes, largest)
    dispatcher = _build(lambda: kind.module.CudagraphDispatcher(config), record, found)
    if dispatcher is None:
        return
    if cfg["initialize"]:
        length = cfg.get("init_query_len", cfg["query_len"])
        error = _error_of(lambda: dispatcher.initialize_cudagraph_keys(_mode(cfg), length))
        found.compare_error("init_error", record.get("init_error"), error)
        if error is not None or "init_error" in record:
            before = record.get("keys_before_error", {})
            found.compare("keys_before_error", before, _keys(dispatcher))
            return
    found.compare("keys", record["keys"], _keys(dispatcher))
    # The newest release has a table of its own, the others read the configuration's.
    table = config.compilation_config.bs_to_padded_graph_size
    table = getattr(dispatcher, "padding_table", None) or table
    for num_tokens, padded in record.get("pad", ()):
        got = attempt(padded, partial(table.__getitem__, num_tokens))
        found.compare(f"pad[{num_tokens}]", padded, got)
    if "capture_order" in record:
        order = [
            [str(mode), [[each.num_tokens, each.num_active_loras] for each in descriptors]]
            for mode, descriptors in dispatcher.get_capture_descs()
        ]
        found.compare("capture_order", _as_pairs(record["capture_order"]), order)
    _compare_groups(record["dispatch"], kind, dispatcher, found)
    for row in record.get("flow", ()):
        _compare_flow(row, kind, dispatcher, cfg, table, found)


def _on(cfg: Record) -> bool:
    return bool(cfg["initialize"]) and cfg["mode"] != "NONE"


def _mode(cfg: Record) -> CUDAGraphMode:
    return CUDAGraphMode.parse(cfg["mode"])


def _build(make: Callable[[], Any], record: Record, found: Findings) -> Any:
    dispatcher: list[Any] = []
    error = _error_of(lambda: dispatcher.append(make()))
    found.compare_error("construct_error", record.get("construct_error"), error)
    return None if error is not None or "construct_error" in record else dispatcher[0]


def _error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any exception is a result to compare
        return error
    return None


def _keys(dispatcher: Any) -> dict[str, list[Any]]:
    keys = {
        str(mode): [_plain(each) for each in descriptors]
        for mode, descriptors in dispatcher.cudagraph_keys.items()
    }
    return {mode: descriptors for mode, descriptors in keys.items() if descriptors}


def _plain(descriptor: Any) -> list[Any] | None:
    """A descriptor as the records write it: an array, truth values as numbers."""
    if descriptor is None:
        return None
    fields = getattr(descriptor, "_fields", None) or descriptor.__dataclass_fields__
    values = [getattr(descriptor, name) for name in fields]
    return [int(value) if isinstance(value, bool) else value for value in values]


def _as_pairs(order: Any) -> Any:
    if isinstance(order, Mapping):
        return [[mode, pairs] for mode, pairs in order.items()]
    return order


def _result(answer: Any) -> list[Any]:
    mode, descriptor = answer
    return [str(mode), _plain(descriptor)]


def _compare_groups(groups: Any, kind: Kind, dispatcher: Any, found: Findings) -> None:
    fields = Fields(frozenset({*kind.group, "r"}))
    for number, group in enumerate(groups):
        fields.check(f"dispatch[{number}]", group)
        shared = {name: group[name] for name in kind.group}
        for num_tokens, *expected in group["r"]:
            call = _call(kind, dispatcher, num_tokens, shared)
            got = attempt(expected[0], call)
            got = got if isinstance(got, list) else [got]
            found.compare(f"dispatch {shared} num_tokens={num_tokens}", expected, got)


def _call(kind: Kind, dispatcher: Any, num_tokens: int, given: Record) -> Callable[[], Any]:
    if not kind.pads:
        flags = [bool(given[name]) for name in kind.group if name != "cascade"]
        descriptor = kind.module.BatchDescriptor(num_tokens, *flags)
        cascade = (bool(given["cascade"]),) if "cascade" in given else ()
        return lambda: _result(dispatcher.dispatch(descriptor, *cascade))
    options: dict[str, Any] = {"has_lora": bool(given["has_lora"])}
    if "disable_full" in given:
        options["disable_full"] = bool(given["disable_full"])
    if "num_active_loras" in given:
        options["num_active_loras"] = given["num_active_loras"]
    for name in ("valid", "invalid"):
        if given.get(name) is not None:
            options[f"{name}_modes"] = frozenset(map(CUDAGraphMode.parse, given[name]))
    return lambda: _result(dispatcher.dispatch(num_tokens, bool(given["uniform"]), **options))


def _compare_flow(
    row: Any, kind: Kind, dispatcher: Any, cfg: Record, table: Any, found: Findings
) -> None:
    """What a runner of the 0.11 line does: pad where a graph may be, then dispatch."""
    num_tokens, *expected = row
    got: list[Any] = []
    for uniform in (False, True):
        pads = cfg["mode"] != "NONE" and num_tokens < len(table)
        padded = table[num_tokens] if pads else num_tokens
        given = {"uniform": uniform, "has_lora": cfg.get("lora", False), "cascade": 0}
        shared = {name: given[name] for name in kind.group}
        place = len(got) + 1
        answer = attempt(
            expected[place] if place < len(expected) else None,
            _call(kind, dispatcher, padded, shared),
        )
        got += [padded, *(answer if isinstance(answer, list) else [answer])]
    found.compare(f"flow num_tokens={num_tokens}", expected, got)


# -- the manager of the second model runner -----------------------------------------------

_MANAGER = Fields.of("id cfg lora_cases capture dispatch")
_MANAGER_CFG = Fields.of(
    "mode sizes max_num_seqs query_len varlen_decode lora max_loras specialize_lora "
    "specialize_active_lora captured"
)


def check_manager(record: Record, found: Findings) -> None:
    """Compare a record of the graph manager."""
    _MANAGER.check(record["id"], record)
    cfg = _MANAGER_CFG.check("cfg", record["cfg"])
    sizes = sorted(set(cfg["sizes"]))
    manager = v0_33_manager.CudaGraphManager(
        config_for(cfg, sizes, max(sizes, default=0)),
        "cpu",
        _mode(cfg),
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
    """Compare a record of the dispatcher with several uniform query lengths."""
    cfg = _DRAFTER_CFG.check("cfg", record["cfg"])
    ends = [name for name in ("construct_error", "init_error") if name in record]
    begins = "id cfg final_sizes final_uniform_sizes"
    if ends:
        Fields.of(f"{begins} {' '.join(ends)}").check(record["id"], record)
    else:
        # Cases are listed only where keys were initialised.
        parts = _DRAFTER_PARTS if cfg["initialize"] else _DRAFTER_PARTS.replace("capture_cases", "")
        Fields.of(f"{begins} {parts}", "capture_cases").check(record["id"], record)
    sizes = sorted(set(cfg["sizes"]))
    found.compare("final_sizes", record["final_sizes"], sizes)
    aligned = sorted(set(cfg["uniform_sizes"]))
    found.compare("final_uniform_sizes", record["final_uniform_sizes"], aligned)
    config = config_for(cfg, sizes, max(sizes, default=0))
    dispatcher = _build(
        lambda: drafter.CudagraphDispatcher(config, is_drafter=cfg["is_drafter"]), record, found
    )
    if dispatcher is None:
        return
    if cfg["initialize"]:
        error = _error_of(
            lambda: dispatcher.initialize_cudagraph_keys(_mode(cfg), cfg["query_lens"])
        )
        found.compare_error("init_error", record.get("init_error"), error)
        if error is not None or "init_error" in record:
            return
    found.compare("keys", record["keys"], _keys(dispatcher))
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
    return _result(dispatcher.dispatch(*args))


def _cases(dispatcher: Any, uniform: Any, query_len: int) -> list[Any]:
    sizes, descriptors, mode = dispatcher.get_capture_cases(bool(uniform), query_len)
    return [sizes, [_plain(each) for each in descriptors], str(mode)]


def _compare_plan(row: Any, dispatcher: Any, found: Findings) -> None:
    num_tokens, num_reqs, longest, cascade, uniform, described, *plan = row
    batch = (num_tokens, num_reqs, longest)
    got = attempt(uniform, lambda: list(dispatcher.caculate_uniform_decode(*batch)))
    found.compare(f"uniform {batch}", uniform, got)
    got = attempt(described, lambda: list(dispatcher.get_local_batch_description(*batch)))
    found.compare(f"description {batch}", described, got)

    def planned() -> list[Any]:
        mode, descriptor, tokens = dispatcher.fast_plan(*batch, bool(cascade))
        return [str(mode), _plain(descriptor), tokens]

    got = attempt(plan[0], planned)
    found.compare(f"plan {batch} cascade={cascade}", plan, got if isinstance(got, list) else [got])
