"""Compare the dispatchers of several vLLM versions with recorded results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs

from dispatchkit.keys import CUDAGraphMode, padding_table, round_sizes_for_query_len

from dispatchkit_vllm.conformance._records import Fields, Findings, FormatError, attempt
from dispatchkit_vllm.facade import lora_count, v0_11, v0_11_1, v0_13, v0_33

Record = Mapping[str, Any]

_CFG = "config_mode mode sizes max_num_seqs query_len piecewise_compiled initialize"
_ENDINGS = "construct_error adjust_error init_error keys_before_error"


@attrs.frozen
class Kind:
    """The record format for one version of the dispatcher.

    Attributes:
        module: Module of the facade.
        cfg: Fields of the configuration.
        group: Names of the ``dispatch`` arguments that are recorded once for a group of calls.
        parts: Fields of a record without errors, besides id and configuration.
        optional: Fields that a record without errors may have in addition.
        descending: Whether the configuration lists the capture sizes in descending order.
        pads: Whether the dispatcher pads; otherwise it takes a padded descriptor.
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
    """Return a configuration object with the attributes that facades read."""
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
    """Compare a dispatcher with a record of its keys and decisions."""
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
    if kind.optional and not ends:
        has_table = bool(record["capture_order"] or _on(cfg))
        if has_table and "pad" not in record:
            raise FormatError("the field pad is missing, but the dispatcher has a padding table.")
        if not has_table and "pad" in record:
            raise FormatError("the field pad is present, but the dispatcher has no padding table.")

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
    dispatcher = build(lambda: kind.module.CudagraphDispatcher(config), record, found)
    if dispatcher is None:
        return
    if cfg["initialize"]:
        length = cfg.get("init_query_len", cfg["query_len"])
        error = error_of(lambda: dispatcher.initialize_cudagraph_keys(mode_of(cfg), length))
        found.compare_error("init_error", record.get("init_error"), error)
        if error is not None or "init_error" in record:
            before = record.get("keys_before_error", {})
            found.compare("keys_before_error", before, keys_of(dispatcher))
            return
    found.compare("keys", record["keys"], keys_of(dispatcher))
    # The newest dispatcher has its own padding table; older dispatchers read the configuration's.
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


def mode_of(cfg: Record) -> CUDAGraphMode:
    """Return the mode to initialize keys with."""
    return CUDAGraphMode.parse(cfg["mode"])


def build(make: Callable[[], Any], record: Record, found: Findings) -> Any:
    """Return a new dispatcher, or None if its construction fails or a failure is recorded."""
    dispatcher: list[Any] = []
    error = error_of(lambda: dispatcher.append(make()))
    found.compare_error("construct_error", record.get("construct_error"), error)
    return None if error is not None or "construct_error" in record else dispatcher[0]


def error_of(call: Callable[[], Any]) -> Exception | None:
    """Return the exception raised by a call, or None."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any exception is a result to compare
        return error
    return None


def keys_of(dispatcher: Any) -> dict[str, list[Any]]:
    """Return the registered keys by mode, omitting modes without keys."""
    keys = {
        str(mode): [plain(each) for each in descriptors]
        for mode, descriptors in dispatcher.cudagraph_keys.items()
    }
    return {mode: descriptors for mode, descriptors in keys.items() if descriptors}


def plain(descriptor: Any) -> list[Any] | None:
    """Return a descriptor as a list in the format of records, with integers for booleans."""
    if descriptor is None:
        return None
    fields = getattr(descriptor, "_fields", None) or descriptor.__dataclass_fields__
    values = [getattr(descriptor, name) for name in fields]
    return [int(value) if isinstance(value, bool) else value for value in values]


def _as_pairs(order: Any) -> Any:
    if isinstance(order, Mapping):
        return [[mode, pairs] for mode, pairs in order.items()]
    return order


def result_of(answer: Any) -> list[Any]:
    """Return a dispatch result in the format of records."""
    mode, descriptor = answer
    return [str(mode), plain(descriptor)]


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
        return lambda: result_of(dispatcher.dispatch(descriptor, *cascade))
    options: dict[str, Any] = {"has_lora": bool(given["has_lora"])}
    if "disable_full" in given:
        options["disable_full"] = bool(given["disable_full"])
    if "num_active_loras" in given:
        options["num_active_loras"] = given["num_active_loras"]
    for name in ("valid", "invalid"):
        if given.get(name) is not None:
            options[f"{name}_modes"] = frozenset(map(CUDAGraphMode.parse, given[name]))
    return lambda: result_of(dispatcher.dispatch(num_tokens, bool(given["uniform"]), **options))


def _compare_flow(
    row: Any, kind: Kind, dispatcher: Any, cfg: Record, table: Any, found: Findings
) -> None:
    """Compare the steps of a 0.11 or 0.11.1 runner, which pads a batch and then dispatches it.

    The runner does not pad if the mode is NONE or the batch is too large for the padding table.
    """
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
