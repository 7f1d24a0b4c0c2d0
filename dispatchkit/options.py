"""Runner settings: frozen records of plain values.

The repr of a record is the call that creates it. Records can be compared and pickled;
``attrs.evolve`` returns a changed copy. Objects are passed elsewhere: tensors and generators in
``StepState``, policies and backends as arguments of ``GraphRunner``, lane policy objects in
``Lanes``, and plugins together with the policy, as ``plugins.with_policy()``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys.checks import (
    check_count,
    check_flag,
    check_instance,
    naming_unknown,
)
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.reading import read_flag, read_options, read_word
from dispatchkit.keys.records import SettingInfo, or_none, setting, settings_repr

__all__ = [
    "DERIVED",
    "BufferOptions",
    "CaptureOptions",
    "LaneOptions",
    "MemoryOptions",
    "RunnerOptions",
    "refuse_moved",
    "with_settings",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: The eviction orders, by name.
EVICTIONS: Final = ("benefit", "lru")
#: Value of ``check``: compare each graph's first replay and first padded replay with eager runs.
FIRST: Final = "first"
#: Value of ``output_batch_dims``: derive it from runs at two sizes.
DERIVED: Final = "derived"


# -- checks of one value ------------------------------------------------------------------


def _count(minimum: int) -> Callable[[Any, str], int]:
    return lambda value, name: check_count(value, name, minimum=minimum)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(name, value, "a name, or None")
    return value


def _eviction(value: Any, name: str) -> str:
    if value not in EVICTIONS:
        hint = "Pass a function to runner.controls.set_eviction." if callable(value) else ""
        raise UnknownNameError(name, value, EVICTIONS, hint)
    return str(value)


def _check(value: Any, name: str) -> int | str:
    try:
        return FIRST if value == FIRST else check_count(value, name, minimum=0)
    except ConfigError:
        allowed = "0 (off), a whole number of at least 1, or 'first'"
        raise ConfigError(name, value, allowed) from None


def _options(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, "a dictionary of options by name")
    return dict(value)


def _anything(value: Any, name: str) -> Any:
    return value


def _device(value: Any) -> str | None:
    # A torch.device is recognized by the name of its type, because this module does not import
    # torch.
    if value is None or isinstance(value, str) or type(value).__name__ == "device":
        return None if value is None else str(value)
    raise ConfigError("device", value, "a torch device such as 'cuda:0', or None")


def _one(kind: type[Any]) -> Callable[[Any, str], Any]:
    return lambda value, name: check_instance(value, kind, name)


def _names_the_place(kind: type[_T]) -> type[_T]:
    """Decorate a settings record so that errors for misplaced settings show where to set them."""
    made: Any = kind
    made.__init__ = naming_unknown(made.__init__, kind.__name__, _place_of)
    return kind


def _place_of(name: str) -> str:
    if name in _OF_RUNNER:
        return f"{name} is an argument of GraphRunner."
    group = _GROUP_OF.get(name)
    if group is None:
        return ""
    if not group:
        return f"Write: RunnerOptions({name}=...)"
    return f"Write: RunnerOptions({group}={GROUPS[group].__name__}({name}=...))"


# -- the records --------------------------------------------------------------------------


@_names_the_place
@attrs.frozen(kw_only=True, repr=False)
class CaptureOptions:
    """Settings for captures.

    Attributes:
        warmups: Number of eager runs before each capture.
        capture_after: With lazy capture, capture a graph at the Nth step that needs it, where N is
            this value.
        state_limit_bytes: Maximum bytes of undeclared state to save and restore around warmups.
        prove_rows: Whether each capture proves that padding does not change the rows of a batch. If
            the proof fails, batches that do not fill the graph run eager. Set to False only if you
            are certain that padding has no effect.
        break_on_unsafe: For a step that is a single function: whether PIECEWISE captures also break
            at operators tagged ``cudagraph_unsafe``. They always break at operators whose level,
            declared with ``declare_support``, is below ALWAYS.
    """

    warmups: int = setting(1, _count(0), SettingInfo("Number of eager runs before each capture."))
    capture_after: int = setting(
        1, _count(1), SettingInfo("If lazy is true, capture a graph at the Nth call that needs it.")
    )
    state_limit_bytes: int = setting(64 << 20, _count(0))
    prove_rows: bool = setting(True, check_flag)
    break_on_unsafe: bool = setting(False, check_flag)

    __repr__ = settings_repr


@_names_the_place
@attrs.frozen(kw_only=True, repr=False)
class MemoryOptions:
    """Limits on the graphs of each lane.

    Graphs are evicted to make room for a new graph. If the new graph still does not fit, it is not
    kept.

    Attributes:
        max_graphs: Maximum number of live graphs; None for no limit.
        max_bytes: Maximum bytes of the graphs' pool and outputs; None for no limit.
        eviction: Which graph is evicted first. ``lru``: the least recently used. ``benefit``: the
            graph with the fewest replays relative to its size in tokens. For a custom function,
            call ``runner.controls.set_eviction``.
    """

    max_graphs: int | None = setting(
        None, or_none(_count(0)), SettingInfo("Maximum number of live graphs per lane.", "no limit")
    )
    max_bytes: int | None = setting(
        None, or_none(_count(0)), SettingInfo("Maximum bytes of graph memory per lane.", "no limit")
    )
    eviction: str = setting(
        "lru",
        _eviction,
        SettingInfo(
            "Which graphs are evicted first. lru: the least recently used; benefit: those with the "
            "fewest replays relative to their capture size.",
            read=read_word,
        ),
    )

    __repr__ = settings_repr


@_names_the_place
@attrs.frozen(kw_only=True, repr=False)
class BufferOptions:
    """Settings for static input and output buffers.

    Attributes:
        row_count: Name of a 0-d int64 input on the device. The runner sets this input to the
            number of real rows of the batch. None if the step needs no such input.
        buffer_rows: Minimum number of rows in static inputs, so that a later swap can use larger
            sizes; by default the rows of the largest size.
        output_batch_dims: Index of each output's batch dimension, or None for outputs without one.
            Give one value for all outputs, or a nested structure that matches the outputs.
            ``derived`` finds the dimensions by comparing the outputs of runs at two sizes.
        share_outputs: Whether graphs copy their outputs to memory that all graphs share. False
            avoids the copy, but each graph then keeps its own output memory.
    """

    row_count: str | None = setting(None, or_none(_text))
    buffer_rows: int | None = setting(None, or_none(_count(1)))
    output_batch_dims: Any = setting(DERIVED, _anything, hash=False)
    share_outputs: bool = setting(True, check_flag)

    __repr__ = settings_repr


@_names_the_place
@attrs.frozen(kw_only=True, repr=False)
class LaneOptions:
    """Settings for distributing submitted steps over lanes.

    Attributes:
        lane_policy: Name of the policy that chooses the lane of each submitted step; by default
            ``round-robin``. To use a policy object, pass ``lanes=Lanes(4, policy)``.
        lane_policy_options: Keyword arguments for the function that creates the lane policy.
        disjoint_state: Whether concurrent steps change different parts of the state, such as
            different rows of a KV cache. If False, steps that change state run one after another,
            even on different lanes.
    """

    lane_policy: str | None = setting(None, or_none(_text))
    lane_policy_options: Mapping[str, Any] = setting(attrs.Factory(dict), _options, hash=False)
    disjoint_state: bool = setting(False, check_flag)

    __repr__ = settings_repr


@_names_the_place
@attrs.frozen(kw_only=True, repr=False)
class RunnerOptions:
    """Settings of a ``GraphRunner`` other than its own arguments.

    Attributes:
        config: Sizes, limits and modes, such as ``DispatchConfig(max_num_seqs=64)``. A setting may
            not be given both here and as an argument of the runner.
        policy_options: Keyword arguments for the function that creates a policy given by name.
        device: Device of the input tensors, such as ``cuda:1``; by default the backend's device.
        strict: Whether a step raises NoGraphError if it would run eager because no graph can serve
            it. If True, a step also raises PolicyError when the policy raised or returned an
            invalid value.
        check: Which replays are compared with an eager run, for tests and debugging (slow). N:
            every Nth replay. 0 or None: no replay. ``first``: the first replay and the first padded
            replay of each graph. Steps are not timed while checks are on.
        sample_every: Minimum number of steps from one measurement to the next, for decisions that a
            policy wants timed. A timed decision that is also one-shot is always measured.
        rows_independent: Whether the rows of a mixed batch are independent, so that a policy may
            split a batch over several graphs. Each capture proves this independence, unless
            ``prove_rows`` is False.
        capture: Settings for captures.
        memory: Limits on the number and memory of graphs.
        buffers: Static buffers of inputs and outputs.
        lanes: Settings for distributing submitted steps over lanes.

    Raises:
        ConfigError: A setting has an invalid value.
    """

    config: DispatchConfig = setting(attrs.Factory(DispatchConfig), _one(DispatchConfig))
    policy_options: Mapping[str, Any] = setting(
        attrs.Factory(dict),
        _options,
        SettingInfo("Options of the policy.", read=read_options),
        hash=False,
    )
    device: str | None = attrs.field(default=None, converter=_device)
    strict: bool = setting(
        False,
        check_flag,
        SettingInfo(
            "Raise an error if a step would run eager because no graph can serve it.",
            read=read_flag,
        ),
    )
    check: int | str | None = setting(
        None,
        or_none(_check),
        SettingInfo(
            "Compare every Nth replay with an eager run (0: none), or only the first replays of "
            "each graph (first).",
            "off",
        ),
    )
    sample_every: int = setting(
        16,
        _count(1),
        SettingInfo(
            "Minimum number of steps from one measurement to the next, if a policy wants steps "
            "timed."
        ),
    )
    rows_independent: bool = setting(
        False,
        check_flag,
        SettingInfo(
            "Declare that rows are independent, so that a policy may split batches across graphs.",
            read=read_flag,
        ),
    )
    capture: CaptureOptions = setting(attrs.Factory(CaptureOptions), _one(CaptureOptions))
    memory: MemoryOptions = setting(attrs.Factory(MemoryOptions), _one(MemoryOptions))
    buffers: BufferOptions = setting(attrs.Factory(BufferOptions), _one(BufferOptions))
    lanes: LaneOptions = setting(attrs.Factory(LaneOptions), _one(LaneOptions))

    __repr__ = settings_repr


#: The setting groups of RunnerOptions, by field name.
GROUPS: Final[Mapping[str, type[Any]]] = {
    "config": DispatchConfig,
    "capture": CaptureOptions,
    "memory": MemoryOptions,
    "buffers": BufferOptions,
    "lanes": LaneOptions,
}


def names_of(record: type[Any]) -> list[str]:
    """Return the names of a record's settings, in the order of their fields."""
    names = [str(field.alias) for field in attrs.fields(record) if field.init]
    return [name for name in names if not name.startswith("_")]


# Settings that are arguments of GraphRunner. Some of them are also settings of ``DispatchConfig``.
_OF_RUNNER = frozenset(
    {"axes", "backend", "lazy", "max_num_tokens", "mode", "outputs", "policy", "sizes"}
)
#: The group of each setting; "" for settings of RunnerOptions itself.
_GROUP_OF: Final[Mapping[str, str]] = {
    **{name: group for group, kind in GROUPS.items() for name in names_of(kind)},
    **dict.fromkeys(names_of(RunnerOptions), ""),
}


def settings_of(options: RunnerOptions) -> dict[str, Any]:
    """Return the values of the settings of all groups, by name."""
    return {name: _value_of(options, name) for name in _GROUP_OF if name not in GROUPS}


def _value_of(options: RunnerOptions, name: str) -> Any:
    """Return the value of a setting, or a group of settings."""
    group = _GROUP_OF[name]
    return getattr(getattr(options, group) if group else options, name)


def with_settings(options: RunnerOptions, settings: Mapping[str, Any]) -> RunnerOptions:
    """Return options with some settings changed; the settings may belong to different groups.

    Raises:
        UnknownNameError: A setting does not exist.
        ConfigError: A setting has an invalid value.
    """
    by_group: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in _GROUP_OF:
            raise UnknownNameError("option", name, _GROUP_OF)
        by_group.setdefault(_GROUP_OF[name], {})[name] = value
    changes = by_group.pop("", {})
    for group, values in by_group.items():
        changes[group] = attrs.evolve(changes.get(group, getattr(options, group)), **values)
    return attrs.evolve(options, **changes)


# -- moved keyword arguments --------------------------------------------------------------

# Settings that are also arguments of a runner.
_KEPT = frozenset({"sizes", "max_num_tokens", "mode", "axes", "lanes"})
_STATE = {"scratch": "scratch", "generators": "generators"}
_RENAMED = {"query_len": "query_lens"}
_MOVED = {*_GROUP_OF, *_STATE, *_RENAMED, "plugins"} - _KEPT


def refuse_moved(arguments: Mapping[str, Any]) -> None:
    """Reject keyword arguments of a runner that belong inside other arguments.

    Raises:
        ConfigError: A keyword argument belongs elsewhere. The message shows what to write instead.
    """
    moved = [name for name in arguments if name in _MOVED]
    if not moved:
        return
    value = arguments[moved[0]]
    if not isinstance(value, str | int | Mapping | DispatchConfig | None):
        value = type(value).__name__  # the repr of a tensor synchronizes with the device
    written, called, needless = _replacement({name: arguments[name] for name in moved}, arguments)
    hints = [
        f"Call: {called}" if called else "",
        f"Write: {written}" if written else "",
        f"Omit: {needless} (default)" if needless else "",
    ]
    text = "\n".join(filter(None, hints))
    names = ", ".join(moved)
    message = f"{names} is not a separate argument."
    if len(moved) > 1:
        message = f"{names} are not separate arguments."
    raise ConfigError(names, value, "passed in a different argument", text, message=message)


def _replacement(moved: dict[str, Any], arguments: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the arguments to write, the call to add and the settings to omit, as text.

    Objects that cannot be printed as code are represented by the name of their keyword.
    """
    written, called = [], ""
    if moved.pop("plugins", None) is not None:
        policy = arguments.get("policy")
        shown = "" if policy is None else repr(policy) if isinstance(policy, str) else "policy"
        written.append(f"policy=plugins.with_policy({shown})")
    held_back = [moved.pop(name) for name in _STATE if name in moved]
    if held_back:
        held = {"tensors": "state", **_STATE}
        listed = [f"{field}={name}" for field, name in held.items() if name in arguments]
        written.append(f"state=StepState({', '.join(listed)})")
    of_lanes = [
        name
        for name, kinds in (("lane_policy", str | None), ("memory", MemoryOptions | None))
        if not isinstance(moved.get(name), kinds)
    ]
    if of_lanes:
        listed = [f"{name.removeprefix('lane_')}={name}" for name in of_lanes]
        for name in of_lanes:
            del moved[name]
        written.append(f"lanes=Lanes({', '.join([str(arguments.get('lanes', 1)), *listed])})")
    if callable(moved.get("eviction")):
        del moved["eviction"]
        called = "runner.controls.set_eviction(eviction)"
    options = arguments.get("options")
    settings = {_RENAMED.get(name, name): value for name, value in moved.items()}
    needless = ""
    if settings:
        default = RunnerOptions()
        made = with_settings(options if isinstance(options, RunnerOptions) else default, settings)
        needless = ", ".join(
            f"{name}={value!r}"
            for name, value in settings.items()
            if _value_of(made, name) == _value_of(default, name)
        )
        if made != default:
            written.append(f"options={made!r}")
    return ", ".join(written), called, needless


def refuses_moved(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a runner's ``__init__`` to reject keyword arguments that it does not have.

    For a setting that belongs inside another argument, the error shows the replacement. For any
    other name, the error lists the closest names.
    """
    named = naming_unknown(function, "GraphRunner")

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        refuse_moved(kwargs)
        return named(*args, **kwargs)

    return checked
