"""Compare the wrappers with traces recorded on a fake device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dispatchkit_vllm.conformance._records import Fields, Findings, FormatError, error_names
from dispatchkit_vllm.facade import _wrapper
from dispatchkit_vllm.wrapper import (
    GraphWrapper,
    WrapperOptions,
    capture_counter,
    set_capturing_enabled,
    set_forward_context,
)

Record = Mapping[str, Any]
_RULES = {"0.11": _wrapper.OLD_RULES, "0.13": _wrapper.OLD_RULES, "newest": _wrapper.NEW_RULES}
_BASE = "id version name wrapper_mode options debug pool"
_RUN = Fields.of(f"{_BASE} steps attr_passthrough missing_attr_error unwrap_is_runnable")
_REFUSED = Fields.of(f"{_BASE} construct_error")
_STEP = Fields.of("", "mode n ptrs extra allow ctx boom op")
_OUTCOME = Fields.of("step events captured entries", "returned error")
_OPTIONS = Fields.of("", "debug_log_enable gc_disable weak_ref_output")


class _Tensor:
    def __init__(self, address: int) -> None:
        self.address = address


class _FakeDevice:
    """A device that records captures, replays and related calls as trace events."""

    def __init__(self, events: list[list[Any]], pool: Any) -> None:
        self.events, self.pool = events, pool
        self.num_graphs = 0
        self.quiet = False

    def global_pool(self) -> Any:
        return self.pool

    def new_pool(self) -> Any:
        return "NEW_POOL"

    def new_graph(self) -> int:
        self.num_graphs += 1
        self.events.append(["graph_new", self.num_graphs])
        return self.num_graphs

    def announce_pool(self, pool: Any) -> None:
        self.events.append(["set_pool", pool])

    def current_stream(self) -> str:
        return "STREAM"

    def capture(self, graph: int, run: Callable[[], Any], *, pool: Any, stream: Any) -> Any:
        self.events.append(["enter_capture", graph, pool, stream])
        if not self.quiet:
            self.events += [["gc_collect"], ["empty_cache"]]
        try:
            return run()
        finally:
            self.events.append(["exit_capture", graph])

    def replay(self, graph: int) -> None:
        self.events.append(["replay", graph])

    def release(self, graph: int) -> None:
        """Do nothing: traces do not record releases."""

    def weak_ref(self, output: Any) -> str:
        self.events.append(["weak_ref"])
        return "weak"

    def address(self, value: Any) -> int | None:
        return value.address if isinstance(value, _Tensor) else None

    @contextmanager
    def without_collection(self) -> Iterator[None]:
        self.quiet = True
        yield
        self.quiet = False

    def sync_offload(self) -> None:
        self.events.append(["offload_sync"])

    def join_offload(self) -> None:
        self.events.append(["offload_join"])


class _Runnable:
    attribute = 5

    def __init__(self, events: list[list[Any]]) -> None:
        self.events = events
        self.num_calls = 0
        self.fails = False

    def __call__(self, *args: Any) -> str:
        self.num_calls += 1
        self.events.append(["runnable", self.num_calls])
        if self.fails:
            raise ValueError("the trace requests this error")
        return "output"


class _LogEvents(logging.Handler):
    def __init__(self, events: list[list[Any]]) -> None:
        super().__init__(logging.DEBUG)
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(["log"])


@contextmanager
def _logged(events: list[list[Any]]) -> Iterator[None]:
    logger, handler = logging.getLogger(GraphWrapper.__module__), _LogEvents(events)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def _debugging(on: bool) -> Iterator[None]:
    before = os.environ.get("VLLM_LOGGING_LEVEL")
    os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG" if on else "INFO"
    try:
        yield
    finally:
        if before is None:
            del os.environ["VLLM_LOGGING_LEVEL"]
        else:
            os.environ["VLLM_LOGGING_LEVEL"] = before


class _Traced(_wrapper.CUDAGraphWrapper):
    """A wrapper that records an event when it checks whether captures are enabled.

    It can also behave as if no forward context were available.
    """

    events: list[list[Any]]
    hides_context = False
    _own = _wrapper.CUDAGraphWrapper._own | {"events", "hides_context"}  # noqa: SLF001

    def _context_is_available(self) -> bool:
        return not self.hides_context and super()._context_is_available()

    def _validate(self, descriptor: Any) -> None:
        self.events.append(["validate"])
        super()._validate(descriptor)


def check_wrapper(record: Record, found: Findings) -> None:
    """Compare a wrapper's captures and replays with a recorded trace."""
    refused = "construct_error" in record
    (_REFUSED if refused else _RUN).check(record["id"], record)
    if record["version"] not in _RULES:
        raise FormatError(f"version must be one of {sorted(_RULES)}, got {record['version']!r}.")
    events: list[list[Any]] = []
    runnable, device = _Runnable(events), _FakeDevice(events, record["pool"])
    options = record["options"]
    if options is not None:
        options = WrapperOptions(**_OPTIONS.check("options", options))
    traced = type("_Traced", (_Traced,), {"release_rules": _RULES[record["version"]]})
    before = list(_wrapper._device)  # noqa: SLF001 - restored below
    _wrapper.use_device(device)
    captured = capture_counter.num_captured
    try:
        with _debugging(record["debug"]), _logged(events):
            try:
                wrapper = traced(runnable, None, record["wrapper_mode"], options)
            except Exception as error:  # noqa: BLE001 - any exception is a result to compare
                found.compare_error("construct_error", record.get("construct_error"), error)
                return
            found.compare_error("construct_error", record.get("construct_error"), None)
            wrapper.events = events
            for number, outcome in enumerate(record.get("steps", ())):
                _check_step(f"steps[{number}]", outcome, wrapper, runnable, captured, found)
    finally:
        _wrapper._device[:] = before  # noqa: SLF001
        set_capturing_enabled(True)
    found.compare("attr_passthrough", record["attr_passthrough"], wrapper.attribute)
    try:
        _ = wrapper.missing
        names: set[str] = set()
    except Exception as error:  # noqa: BLE001 - any exception is a result to compare
        names = error_names(error)
    found.compare("missing_attr_error", True, record["missing_attr_error"] in names)
    same = wrapper.unwrap() is runnable
    found.compare("unwrap_is_runnable", record["unwrap_is_runnable"], same)


def _check_step(
    where: str,
    outcome: Any,
    wrapper: Any,
    runnable: _Runnable,
    captured: int,
    found: Findings,
) -> None:
    _OUTCOME.check(where, outcome)
    step = _STEP.check(f"{where}.step", outcome["step"])
    events = wrapper.events
    events.clear()
    set_capturing_enabled(step.get("allow", True))
    runnable.fails = step.get("boom", False)
    wrapper.hides_context = not step.get("ctx", True)
    result: dict[str, Any] = {}
    try:
        if "op" in step:
            if step["op"] != "clear":
                raise FormatError(f"{where}.step.op must be 'clear', got {step['op']!r}.")
            wrapper.clear_graphs()
        else:
            args = [_Tensor(address) for address in step.get("ptrs", [11, 12])]
            with set_forward_context(step["mode"], step["n"]):
                result["returned"] = wrapper(*args, *step.get("extra", ()))
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001 - any exception is a result to compare
        expected = outcome.get("error")
        result["error"] = expected if expected in error_names(error) else repr(error)
    for name in ("returned", "error"):
        if name in outcome or name in result:
            found.compare(f"{where}.{name}", outcome.get(name), result.get(name))
    found.compare(f"{where}.events", outcome["events"], list(events))
    num_captured = capture_counter.num_captured - captured
    found.compare(f"{where}.captured", outcome["captured"], num_captured)
    entries = [
        [entry.batch_descriptor, entry.cudagraph is not None, entry.input_addresses]
        for entry in wrapper.concrete_cudagraph_entries.values()
    ]
    found.compare(f"{where}.entries", outcome["entries"], entries)
