"""The public exceptions of dispatchkit.

A message states what is wrong with the given value, what is allowed and the next step. Many classes
also have attributes with details, for code that handles the error. Each class also inherits from a
built-in exception, so that existing ``except ValueError`` clauses keep working.
"""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs


def nearest_names(name: Any, known: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """Return the known names closest to a misspelled name, best match first."""
    if not isinstance(name, str):
        return ()
    by_lower = {one.lower(): one for one in sorted(known)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=limit, cutoff=0.5)
    return tuple(by_lower[one] for one in near)


_LONGEST_VALUE = 200
_LONGEST_MESSAGE = 1000
# Maximum number of known names in a message; above it, only the closest names are listed.
_MOST_NAMES = 40


def shortened(text: str, most: int = _LONGEST_VALUE) -> str:
    """Shorten a text for a message by omitting its middle."""
    if len(text) <= most:
        return text
    head = 2 * most // 3
    return f"{text[:head]} ... {text[head - most :]} ({len(text):,} characters)"


class _Summary(str):
    """A string whose repr has no quotes, to be printed inside a container."""

    __slots__ = ()
    __repr__ = str.__str__


def _summarized(value: Any, depth: int = 2) -> Any:
    """Return a value with tensors and arrays, except scalars, replaced by their type and shape."""
    kind = type(value)
    if kind in (list, tuple) and depth:
        return kind(_summarized(item, depth - 1) for item in value)
    if kind is dict and depth:
        return {name: _summarized(item, depth - 1) for name, item in value.items()}
    if hasattr(kind, "__array__") and getattr(value, "shape", None):
        return _Summary(f"<{kind.__name__} of shape {tuple(value.shape)}>")
    return value


def format_value(value: Any) -> str:
    """Format a value for a message: its repr, shortened if it is long.

    Tensors and arrays, except scalars, are represented by type and shape, because printing the
    elements of a tensor would wait for the device. Values printed over several lines, such as
    modules, are represented by their type.
    """
    name = type(value).__name__
    try:
        text = repr(_summarized(value))
    except ValueError:  # an int with thousands of digits
        return f"<{name} too large to print>"
    except Exception:  # noqa: BLE001 - a faulty __repr__ must not hide the error
        return f"<{name} that cannot be printed>"
    return f"<{name}>" if "\n" in text else shortened(text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 token``, ``2,000 tokens``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return a sentence that suggests the closest names; empty if no name is close."""
    near = nearest_names(name, known)
    *others, last = map(repr, near or ("",))
    guess = f"{', '.join(others)} or {last}" if others else last
    return f" Did you mean {guess}?" if near else ""


_PACKAGE = Path(__file__).parent
_IMPORTLIB = Path(importlib.__file__).parent


def describe_exception(error: BaseException, where: str = "") -> str:
    """Describe an exception that a plugin raised, as ``raised TYPE: MESSAGE (FILE:LINE).``."""
    described = f"raised {type(error).__name__}{where}: {error}".rstrip(":. ")
    line = _line_that_raised(error)
    return f"{described} ({line})." if line else f"{described}."


def _line_that_raised(error: BaseException) -> str:
    """Return the file and line of the innermost frame outside dispatchkit and the import system.

    Returns:
        The text ``file:line``; empty if there is no such frame.
    """
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        is_import = file.name.startswith("<frozen") or _IMPORTLIB in file.parents
        if not is_import and _PACKAGE not in file.parents:
            line = f"{file.name}:{number}"
    return line


@attrs.frozen
class Origin:
    """The source of a plugin: a distribution, or an object passed in.

    Attributes:
        plugin: Name of the plugin: the name of its entry point, or the name given with the object.
        distribution: Distribution that declares the entry point; None for an object passed in.
        version: Version of that distribution; None for an object passed in.
        entry_point: Value of the entry point (``module:object``); None for an object passed in.
        is_there: False for a requested name that matches no plugin.
    """

    plugin: str
    distribution: str | None = None
    version: str | None = None
    entry_point: str | None = None
    is_there: bool = True

    def __str__(self) -> str:
        if not self.is_there:
            return "not found"
        if self.distribution is None:
            return f"passed in as {self.plugin!r}"
        what = " ".join(filter(None, (self.distribution, self.version)))
        if self.entry_point is None:
            return what
        return f"{what}, entry point '{self.plugin} = {self.entry_point}'"


class DispatchkitError(Exception):
    """Base class of all errors raised by dispatchkit."""


class ConfigError(DispatchkitError, ValueError):
    """A setting has an invalid value, or an operation is invalid in the current state.

    The message is ``SETTING must be ALLOWED, got VALUE.``, followed by ``hint``, the next step. For
    errors that are not about a wrong value, such as a file that cannot be read, ``message``
    replaces the first sentence.

    Attributes:
        setting: Name of the setting, as written by the user.
        value: The given value.
        allowed: The allowed values, in words.
    """

    setting: str
    value: Any
    allowed: str

    def __init__(
        self, setting: str, value: Any, allowed: str, hint: str = "", *, message: str = ""
    ) -> None:
        self.setting, self.value, self.allowed = setting, value, allowed
        # If a required value is missing, "got None" adds nothing.
        is_missing = value is None and allowed.startswith("given")
        got = "" if is_missing else f", got {format_value(value)}"
        text = message or f"{setting} must be {allowed}{got}."
        super().__init__(f"{text} {hint}" if hint else text)


class UnknownNameError(ConfigError, LookupError):
    """A requested name does not exist.

    The message is ``KIND must be one of: NAMES, got NAME.`` or, for names that belong to a class or
    function, ``OWNER has no KIND NAME; its KINDs are: NAMES.``. The closest names follow. If
    there are no names of this kind, the message is ``There is no KIND NAME; none is available.``

    Attributes:
        kind: Kind of name, such as ``policy``, ``backend`` or ``trace column``.
        name: The requested name, or the value given in place of a name.
        known: All existing names.
        nearest: The known names closest to the requested name.
    """

    kind: str
    name: Any
    known: tuple[str, ...]

    def __init__(
        self, kind: str, name: Any, known: Iterable[str], hint: str = "", *, owner: str = ""
    ) -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        self.nearest: tuple[str, ...] = nearest_names(name, self.known)
        listing = f"one of: {', '.join(self.known)}"
        if not self.known:
            listing = "omitted, because none is available"
        guess = did_you_mean(name, self.known)
        if len(self.known) > _MOST_NAMES:
            listing = f"one of {len(self.known)} names"
            if not (guess or hint):
                hint = "The attribute `known` of this error lists them."
        message = (
            "" if self.known else f"There is no {kind} {format_value(name)}; none is available."
        )
        if owner and self.known:
            names = f"its {kind}s are: {', '.join(self.known)}"
            if len(self.known) > _MOST_NAMES:
                names = f"it has {len(self.known)} {kind}s"
            message = f"{owner} has no {kind} {format_value(name)}; {names}."
        super().__init__(kind, name, listing, f"{guess} {hint}".strip(), message=message)


class DescriptorError(DispatchkitError, ValueError):
    """A property of a batch is impossible or exceeds the configured limits.

    The message is ``FIELD must be ALLOWED, got VALUE.``, or ``message`` if given, followed by
    ``hint``, the next step.

    Attributes:
        field: Name of the property, such as ``num_tokens``, ``num_reqs`` or ``loras``.
        value: The given value.
        allowed: The allowed values, in words.
    """

    field: str
    value: Any
    allowed: str

    def __init__(
        self, field: str, value: Any, allowed: str, hint: str = "", *, message: str = ""
    ) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        text = message or f"{field} must be {allowed}, got {format_value(value)}."
        super().__init__(f"{text} {hint}" if hint else text)


class InputError(DispatchkitError, ValueError):
    """An input of a call does not match its declared static input.

    Attributes:
        name: Name of the input at fault; "" if no single input is at fault.
    """

    def __init__(self, name: str, message: str) -> None:
        self.name = name
        super().__init__(message)


class NoGraphError(DispatchkitError, RuntimeError):
    """No graph can run this batch, and running it eager is not allowed.

    Raised if the option ``strict`` is set, or if the allowed modes exclude eager. For example, the
    ranks may have agreed on a mode for which this rank has no graph.

    Attributes:
        reason: Short reason why no graph can run the batch, such as ``not_captured``.
        nearest: The nearest existing keys, as text.
    """

    reason: str
    nearest: tuple[str, ...]

    def __init__(self, message: str, *, reason: str, nearest: tuple[str, ...] = ()) -> None:
        self.reason, self.nearest = reason, nearest
        super().__init__(message)


class PolicyError(DispatchkitError, RuntimeError):
    """A policy raised, returned an invalid value or violated a hard constraint.

    Attributes:
        policy: Name of the policy at fault.
        origin: The distribution that provides the policy, or the name under which it was passed in;
            "" if unknown.
        hook: The method, hook or attribute at fault, such as ``declare``, ``decide`` or ``traits``.
        value: The invalid value, if any; otherwise None, for example if the method raised.
    """

    policy: str
    hook: str
    origin: str
    value: Any

    def __init__(
        self, policy: str, hook: str, problem: str, *, origin: str = "", value: Any = None
    ) -> None:
        self.policy, self.hook, self.origin, self.value = policy, hook, origin, value
        source = f" ({origin})" if origin else ""
        super().__init__(f"Policy {policy!r}{source}: {hook} {problem}")


class RegistrationError(DispatchkitError, ValueError):
    """A plugin, a name or a key could not be registered; no state has changed."""


class PluginError(RegistrationError):
    """A plugin could not be loaded, or a name it claims could not be registered.

    Attributes:
        origin: The plugin and its distribution.
        reason: The problem and the next step, in words.
    """

    origin: Origin
    reason: str

    def __init__(self, origin: Origin, reason: str) -> None:
        self.origin, self.reason = origin, reason
        super().__init__(f"Plugin {origin.plugin!r} ({origin}): {reason}")


class PluginLoadError(ExceptionGroup[PluginError], RegistrationError):
    """Loading plugins with ``strict=True`` failed; the group has a PluginError for each problem."""

    def __new__(cls, errors: Sequence[PluginError]) -> PluginLoadError:
        """Create the group with a message that lists every problem."""
        listing = "".join(f"\n- {error}" for error in errors)
        text = f"Loading plugins failed with {counted(len(errors), 'problem')}:{listing}\n"
        return super().__new__(cls, text, list(errors))


class RegistryError(DispatchkitError, RuntimeError):
    """The state of a key or of the runner does not allow an operation."""


class CaptureError(DispatchkitError, RuntimeError):
    """A capture failed; streams, generators and other keys have not changed.

    Attributes:
        key: The key of the capture, as text; "" if unknown.
        reason: Short reason for counters, such as ``host_sync``, ``out_of_memory`` or ``error``.
    """

    key: str
    reason: str

    def __init__(self, message: str, *, key: str = "", reason: str = "error") -> None:
        self.key, self.reason = key, reason
        super().__init__(message)


class SwapError(DispatchkitError, RuntimeError):
    """A swap was refused; the policy and configuration in effect have not changed.

    Attributes:
        failed: Mapping from the key of each missing graph, as text, to the reason why the graph is
            missing.
    """

    def __init__(self, message: str, *, failed: Mapping[str, str]) -> None:
        self.failed: dict[str, str] = dict(failed)
        super().__init__(message)


class ReplayError(DispatchkitError, RuntimeError):
    """A replay failed or was refused; no stale result was returned."""


class BackendUnavailableError(DispatchkitError, ImportError):
    """A backend is unavailable because torch, a driver or a device is missing or fails."""


class MissingDistributionError(DispatchkitError, ImportError):
    """A requested name is provided by a distribution that is not installed."""


class TraceError(DispatchkitError, ValueError):
    """A trace file is missing, malformed or not writable.

    Attributes:
        path: Path of the trace file.
        line: 1-based line number; None if the error concerns the whole file.
    """

    path: str
    line: int | None

    def __init__(self, path: str, line: int | None, message: str) -> None:
        self.path, self.line = path, line
        where = f"{path}, line {line}" if line is not None else path
        super().__init__(f"{where}: {shortened(message, _LONGEST_MESSAGE)}")


class RankError(DispatchkitError, RuntimeError):
    """Ranks cannot continue together; ``reason`` says why.

    Attributes:
        ranks: Global ranks at fault; empty if unknown.
        step: The last step on which all ranks are known to have agreed; 0 before the first step.
        reason: Short reason: ``late`` (a rank is late or dead), ``raised`` (a rank raised an
            exception), ``left`` (a rank has closed the agreement), ``differs`` (a rank differs from
            the others), ``connection`` (the connection between ranks failed), or ``not_measured``
            (no capture has measured how outputs depend on an axis, so they cannot be trimmed).
    """

    ranks: tuple[int, ...]
    step: int
    reason: str

    def __init__(
        self, message: str, *, ranks: Iterable[int] = (), step: int = 0, reason: str = "late"
    ) -> None:
        self.ranks, self.step, self.reason = tuple(ranks), step, reason
        super().__init__(message)
