"""Every exception that dispatchkit raises on purpose.

Each message says what was given, what is allowed, which component is at fault, and the next step.
Each class also inherits from the built-in exception that a caller would expect, so that existing
``except ValueError`` clauses keep working, and has the details as attributes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs


def nearest_names(name: str, known: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """Return the known names closest to a misspelled one, best first."""
    by_lower = {one.lower(): one for one in sorted(known)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=limit, cutoff=0.5)
    return tuple(by_lower[one] for one in near)


_LONGEST_VALUE = 200
_LONGEST_MESSAGE = 1000


def shortened(text: str, most: int = _LONGEST_VALUE) -> str:
    """Shorten a text for a message, omitting its middle if it is longer than ``most``."""
    if len(text) <= most:
        return text
    head = 2 * most // 3
    return f"{text[:head]} ... {text[head - most :]} ({len(text):,} characters)"


def _shown(value: Any) -> str:
    """Return a value's text for messages, shortened if large."""
    try:
        return shortened(repr(value))
    except ValueError:  # an int of thousands of digits
        return f"a {type(value).__name__} too large to print"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the names closest to a misspelled one; may be empty."""
    near = nearest_names(name, known)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


@attrs.frozen
class Origin:
    """Where a plugin comes from.

    Attributes:
        plugin: Name of the plugin: its entry point's name, or the name it was passed in under.
        distribution: Distribution with the entry point; None for an object passed in.
        version: Version of that distribution; None for an object passed in.
        entry_point: The entry point's value (``module:object``); None for an object passed in.
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
    """Base of all errors raised by dispatchkit."""


class ConfigError(DispatchkitError, ValueError):
    """A setting has an invalid value.

    Attributes:
        setting: Name of the setting, as the user writes it.
        value: The given value.
        allowed: The allowed values, in words.
    """

    setting: str
    value: Any
    allowed: str

    def __init__(self, setting: str, value: Any, allowed: str, hint: str = "") -> None:
        self.setting, self.value, self.allowed = setting, value, allowed
        text = f"{setting} must be {allowed}, got {_shown(value)}."
        super().__init__(f"{text} {hint}" if hint else text)


class UnknownNameError(ConfigError, LookupError):
    """A requested name does not exist.

    Attributes:
        kind: The kind of name (``policy``, ``backend``, ``trace column``).
        name: The requested name.
        known: All existing names.
        nearest: The known names closest to it.
    """

    kind: str
    name: str
    known: tuple[str, ...]

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        self.nearest: tuple[str, ...] = nearest_names(name, self.known)
        listing = ", ".join(self.known) or "none"
        guess = did_you_mean(name, self.known)
        super().__init__(kind, name, f"one of: {listing}", f"{guess} {hint}".strip())


class DescriptorError(DispatchkitError, ValueError):
    """The properties of a batch are impossible or outside the configured limits.

    Attributes:
        field: The property (``num_tokens``, ``num_reqs``, ``loras``, ...).
        value: The given value.
        allowed: The allowed values, in words.
    """

    field: str
    value: Any
    allowed: str

    def __init__(self, field: str, value: Any, allowed: str, hint: str = "") -> None:
        self.field, self.value, self.allowed = field, value, allowed
        text = f"{field} must be {allowed}, got {_shown(value)}."
        super().__init__(f"{text} {hint}" if hint else text)


class InputError(DispatchkitError, ValueError):
    """A tensor passed to a runner does not match the declared static input.

    Attributes:
        name: Name of the input.
    """

    def __init__(self, name: str, message: str) -> None:
        self.name = name
        super().__init__(message)


class NoGraphError(DispatchkitError, RuntimeError):
    """No graph serves this batch, and running it eager is not allowed.

    Raised if the allowed modes exclude eager (for example on a rank that agreed to a mode without a
    graph), and in strict mode.

    Attributes:
        reason: Why no graph serves it.
        nearest: The nearest keys that exist, as text.
    """

    reason: str
    nearest: tuple[str, ...]

    def __init__(self, message: str, *, reason: str, nearest: tuple[str, ...] = ()) -> None:
        self.reason, self.nearest = reason, nearest
        super().__init__(message)


class PolicyError(DispatchkitError, RuntimeError):
    """A policy raised, or answered with a decision that breaks a hard constraint.

    Attributes:
        policy: Name of the policy.
        origin: Distribution and version that provides it, or where it was passed in.
        hook: The method or hook at fault (``declare``, ``decide``, ``observe``).
        value: The value it returned.
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
        super().__init__(f"Policy {policy!r}{source}, {hook}: {problem}")


class RegistrationError(DispatchkitError, ValueError):
    """A plugin, a name or a key could not be registered; nothing was changed."""


class PluginError(RegistrationError):
    """One plugin, or one name that it claims, could not be loaded.

    Attributes:
        origin: The plugin and its distribution.
        reason: What is wrong and what to do, in words.
    """

    origin: Origin
    reason: str

    def __init__(self, origin: Origin, reason: str) -> None:
        self.origin, self.reason = origin, reason
        super().__init__(f"Plugin {origin.plugin!r} ({origin}): {reason}")


class PluginLoadError(ExceptionGroup[PluginError], RegistrationError):
    """Loading in strict mode found problems; the group has one PluginError each."""

    def __new__(cls, errors: Sequence[PluginError]) -> PluginLoadError:
        """Create the group; the message lists every problem."""
        listing = "".join(f"\n- {error}" for error in errors)
        text = f"loading plugins found {len(errors)} problem(s):{listing}\n"
        return super().__new__(cls, text, list(errors))


class RegistryError(DispatchkitError, RuntimeError):
    """A transition is not allowed in the state of a graph's entry."""


class CaptureError(DispatchkitError, RuntimeError):
    """Capturing a graph failed; streams, generators and other keys are unchanged.

    Attributes:
        key: The key being captured, as text; "" if unknown.
        reason: A short word for counters (``host_sync``, ``out_of_memory``, ``error``).
    """

    key: str
    reason: str

    def __init__(self, message: str, *, key: str = "", reason: str = "error") -> None:
        self.key, self.reason = key, reason
        super().__init__(message)


class SwapError(DispatchkitError, RuntimeError):
    """A swap was refused while serving; the policy and configuration in force did not change.

    Attributes:
        failed: Reasons, by key as text.
    """

    def __init__(self, message: str, *, failed: Mapping[str, str]) -> None:
        self.failed: dict[str, str] = dict(failed)
        super().__init__(message)


class ReplayError(DispatchkitError, RuntimeError):
    """A replay failed or was refused; no result of an earlier step was returned."""


class BackendUnavailableError(DispatchkitError, ImportError):
    """A backend cannot run here: torch, a driver or a device is missing."""


class MissingDistributionError(DispatchkitError, ImportError):
    """A name belongs to a distribution that is not installed; the message names it."""


class TraceError(DispatchkitError, ValueError):
    """A trace file is missing or malformed, or cannot be written.

    Attributes:
        path: The file.
        line: 1-based line number, or None if the fault concerns the whole file.
    """

    path: str
    line: int | None

    def __init__(self, path: str, line: int | None, message: str) -> None:
        self.path, self.line = path, line
        where = f"{path}, line {line}" if line is not None else path
        super().__init__(f"{where}: {shortened(message, _LONGEST_MESSAGE)}")


class RankError(DispatchkitError, RuntimeError):
    """Ranks cannot continue together: one is late, gone, has raised, or is configured differently.

    Attributes:
        ranks: Global numbers of the ranks at fault; empty if unknown.
        step: Last step that all ranks are known to have agreed on, 0 before the first.
        reason: A short word: ``late`` (or dead), ``raised``, ``left``, ``differs``,
            ``connection``, ``not_measured`` (how outputs are cut along an axis).
    """

    ranks: tuple[int, ...]
    step: int
    reason: str

    def __init__(
        self, message: str, *, ranks: Iterable[int] = (), step: int = 0, reason: str = "late"
    ) -> None:
        self.ranks, self.step, self.reason = tuple(ranks), step, reason
        super().__init__(message)
