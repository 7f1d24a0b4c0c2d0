"""The settings of a runner: frozen records of plain values.

They print as the call that makes them, compare, pickle, and change by ``attrs.evolve``. What is
no plain value stays outside: tensors and generators are in ``StepState``, policies and backends
are arguments of ``GraphRunner``, a lane policy that is an object is in ``Lanes``, and plugins
come with the policy (``plugins.with_policy()``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys.checks import check_count, check_flag
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.reading import read_flag, read_options, read_word
from dispatchkit.keys.records import About, or_none, repr_of_given, setting

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

#: The order in which graphs are evicted, by name.
EVICTIONS: Final = ("benefit", "lru")
#: ``check``: compare the first replay of each graph, and its first padded one.
FIRST: Final = "first"
#: ``output_batch_dims``: measured at two sizes.
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
        raise UnknownNameError(name, str(value), EVICTIONS)
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
    return None if value is None else str(value)  # of a torch.device, as a plain value


def _one(kind: type[Any]) -> Callable[[Any, str], Any]:
    def check(value: Any, name: str) -> Any:
        if not isinstance(value, kind):
            raise ConfigError(name, value, f"a {kind.__name__}")
        return value

    return check


# -- the records --------------------------------------------------------------------------


@attrs.frozen(kw_only=True, repr=False)
class CaptureOptions:
    """How keys are captured.

    Attributes:
        warmups: Eager runs before each capture.
        capture_after: Number of calls that ask for a key before it is captured lazily.
        state_limit_bytes: Most bytes of undeclared state to save around warmups.
        prove_rows: Prove for each graph that padding changes no row of a batch; a batch smaller
            than a graph that fails runs eager. False: you know that padding does not matter.
        break_on_unsafe: In PIECEWISE, a step that is one function also breaks at operators that
            are tagged ``cudagraph_unsafe``, beside those of ``declare_support``.
    """

    warmups: int = setting(1, _count(0), About("Eager runs before each capture."))
    capture_after: int = setting(1, _count(1), About("Calls before a key is captured lazily."))
    state_limit_bytes: int = setting(64 << 20, _count(0))
    prove_rows: bool = setting(True, check_flag)
    break_on_unsafe: bool = setting(False, check_flag)

    __repr__ = repr_of_given


@attrs.frozen(kw_only=True, repr=False)
class MemoryOptions:
    """Limits that hold at every moment, also while one graph takes another's place.

    Attributes:
        max_graphs: Most live graphs; None for no limit.
        max_bytes: Most bytes that the graphs' pool and outputs take; None for no limit.
        eviction: Which graph is evicted first: ``lru``, the one not used for longest, or
            ``benefit``, the one with the fewest replays for its size. A function of your own
            is set by ``runner.controls.set_eviction``.
    """

    max_graphs: int | None = setting(
        None, or_none(_count(0)), About("Most live graphs.", "no limit")
    )
    max_bytes: int | None = setting(
        None, or_none(_count(0)), About("Most bytes of graph memory.", "no limit")
    )
    eviction: str = setting(
        "lru", _eviction, About("Which graph is evicted first: lru or benefit.", read=read_word)
    )

    __repr__ = repr_of_given


@attrs.frozen(kw_only=True, repr=False)
class BufferOptions:
    """Static buffers of inputs and outputs.

    Attributes:
        row_count: Name of an input that the runner itself provides: the true number of rows, a
            0-d int64 tensor on the device.
        buffer_rows: Rows that the static inputs have room for at least, where a swap may bring
            larger sizes; by default those of the largest size.
        output_batch_dims: Index of the batch dimension of the outputs (None: none), for all
            of them or as a structure; ``derived``: measured at two sizes.
        share_outputs: Where there are several, graphs write their outputs to one memory, by a
            copy inside the graph; False saves the copy and spends memory for each graph.
    """

    row_count: str | None = setting(None, or_none(_text))
    buffer_rows: int | None = setting(None, or_none(_count(1)))
    output_batch_dims: Any = setting(DERIVED, _anything, hash=False)
    share_outputs: bool = setting(True, check_flag)

    __repr__ = repr_of_given


@attrs.frozen(kw_only=True, repr=False)
class LaneOptions:
    """How submitted steps are spread over lanes.

    Attributes:
        lane_policy: Name of the policy that chooses the lane of each submitted step;
            ``round-robin`` by default. An object is passed as ``lanes=Lanes(4, policy)``.
        lane_policy_options: Options of the lane policy.
        disjoint_state: Steps in flight at a time change different parts of the state, such
            as other rows of a KV cache. Otherwise steps that change state run one after
            another, whatever the lane.
    """

    lane_policy: str | None = setting(None, or_none(_text))
    lane_policy_options: Mapping[str, Any] = setting(attrs.Factory(dict), _options, hash=False)
    disjoint_state: bool = setting(False, check_flag)

    __repr__ = repr_of_given


@attrs.frozen(kw_only=True, repr=False)
class RunnerOptions:
    """Settings of a ``GraphRunner`` beyond those that are its own arguments.

    Attributes:
        config: Sizes, limits and modes beyond those that are arguments of the runner, such as
            ``DispatchConfig(max_num_seqs=64)``.
        policy_options: Options of a policy that is chosen by name.
        device: Where the tensors of a call are, such as ``cuda:1``.
        strict: A downgrade to eager raises.
        check: Compare one replay in this many with eager (slow, for tests and doubts); 0: off.
            ``first``: the first replay of each graph, and its first padded one. Nothing is
            measured then. None: off.
        sample_every: Of the steps that a learning policy wants timed as a rule, measure one
            in this many; those of its one-shot decisions are all measured.
        rows_independent: No row of a mixed batch depends on another one, so that a policy may
            split a batch over several graphs. It is proven at each capture, unless rows are not
            proven at all.
        capture: How keys are captured.
        memory: Limits of the graphs' number and memory.
        buffers: Static buffers of inputs and outputs.
        lanes: How submitted steps are spread over lanes.

    Raises:
        ConfigError: A setting has a value that cannot be used.
    """

    config: DispatchConfig = setting(attrs.Factory(DispatchConfig), _one(DispatchConfig))
    policy_options: Mapping[str, Any] = setting(
        attrs.Factory(dict),
        _options,
        About("Options of the policy.", read=read_options),
        hash=False,
    )
    device: str | None = attrs.field(default=None, converter=_device)
    strict: bool = setting(False, check_flag, About("A downgrade to eager raises.", read=read_flag))
    check: int | str | None = setting(
        None,
        or_none(_check),
        About("Compare one replay in this many with eager; 0: off.", "off"),
    )
    sample_every: int = setting(
        16,
        _count(1),
        About("Of the steps that a policy wants timed, measure one in this many."),
    )
    rows_independent: bool = setting(
        False,
        check_flag,
        About("Rows are independent: a policy may split a batch over graphs.", read=read_flag),
    )
    capture: CaptureOptions = setting(attrs.Factory(CaptureOptions), _one(CaptureOptions))
    memory: MemoryOptions = setting(attrs.Factory(MemoryOptions), _one(MemoryOptions))
    buffers: BufferOptions = setting(attrs.Factory(BufferOptions), _one(BufferOptions))
    lanes: LaneOptions = setting(attrs.Factory(LaneOptions), _one(LaneOptions))

    __repr__ = repr_of_given


#: The groups of RunnerOptions, by the name of the field.
GROUPS: Final[Mapping[str, type[Any]]] = {
    "config": DispatchConfig,
    "capture": CaptureOptions,
    "memory": MemoryOptions,
    "buffers": BufferOptions,
    "lanes": LaneOptions,
}


def names_of(record: type[Any]) -> list[str]:
    """Return the names of a record's settings, in order."""
    names = [str(field.alias) for field in attrs.fields(record) if field.init]
    return [name for name in names if not name.startswith("_")]


#: The group that each setting is in, "" for those of RunnerOptions itself.
_GROUP_OF: Final[Mapping[str, str]] = {
    **{name: group for group, kind in GROUPS.items() for name in names_of(kind)},
    **dict.fromkeys(names_of(RunnerOptions), ""),
}


def settings_of(options: RunnerOptions) -> dict[str, Any]:
    """Return every setting of all groups by name, as it holds."""
    return {
        name: getattr(getattr(options, group) if group else options, name)
        for name, group in _GROUP_OF.items()
        if name not in GROUPS
    }


def with_settings(options: RunnerOptions, settings: Mapping[str, Any]) -> RunnerOptions:
    """Return options with some settings changed, in whichever group each of them is.

    Raises:
        UnknownNameError: There is no such setting.
        ConfigError: A setting has a value that cannot be used.
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


# -- keywords that moved ------------------------------------------------------------------

# Arguments of a runner that are settings too.
_KEPT = frozenset({"sizes", "max_num_tokens", "mode", "axes", "lanes"})
_STATE = {"scratch": "scratch", "generators": "generators"}
_RENAMED = {"query_len": "query_lens"}
_MOVED = {*_GROUP_OF, *_STATE, *_RENAMED, "plugins"} - _KEPT


def refuse_moved(arguments: Mapping[str, Any]) -> None:
    """Refuse keywords of a runner that are settings of its options.

    Raises:
        ConfigError: There are such; it ends with the arguments to write in their place.
    """
    moved = [name for name in arguments if name in _MOVED]
    if not moved:
        return
    value = arguments[moved[0]]
    if not isinstance(value, str | int | Mapping | DispatchConfig | None):
        value = type(value).__name__  # printing a tensor waits for the device
    written, called, needless = _replacement({name: arguments[name] for name in moved}, arguments)
    hints = [
        f"Call: {called}" if called else "",
        f"Write: {written}" if written else "",
        f"Leave out: {needless} (the default)" if needless else "",
    ]
    text = "\n".join(filter(None, hints))
    raise ConfigError(", ".join(moved), value, "given in another place", text)


def _replacement(moved: dict[str, Any], arguments: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the arguments to write, what to call afterwards, and what is a default anyway.

    Objects go by the names of the keywords that they were given as.
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
        holds, plain = settings_of(made), settings_of(default)
        needless = ", ".join(
            f"{name}={value!r}" for name, value in settings.items() if holds[name] == plain[name]
        )
        if made != default:
            written.append(f"options={made!r}")
    return ", ".join(written), called, needless


def refuses_moved(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function so that keywords which moved to options are refused with a way out."""

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        refuse_moved(kwargs)
        return function(*args, **kwargs)

    return checked
