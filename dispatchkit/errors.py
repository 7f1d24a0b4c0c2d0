"""Every exception that dispatchkit raises on purpose.

Each message says what was given, what is allowed, whose doing it is and the next step.
Each class also inherits the built-in exception a caller would expect, so that existing
``except ValueError`` clauses keep working, and carries the facts as attributes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs


def nearest_names(name: str, known: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """Return the known names closest to a misspelt one, best first."""
    by_lower = {one.lower(): one for one in sorted(known)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=limit, cutoff=0.5)
    return tuple(by_lower[one] for one in near)


_LONGEST_VALUE = 200
_LONGEST_MESSAGE = 1000


def shortened(text: str, most: int = _LONGEST_VALUE) -> str:
    """Return a text for a message, with its middle left out if it is longer than ``most``."""
    if len(text) <= most:
        return text
    head = 2 * most // 3
    return f"{text[:head]} ... {text[head - most :]} ({len(text):,} characters)"


def _shown(value: Any) -> str:
    """Return a value as messages show it, however large it is."""
    try:
        return shortened(repr(value))
    except ValueError:  # an int of thousands of digits
        return f"a {type(value).__name__} too large to print"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the names nearest to a misspelt one; empty if none is near."""
    near = nearest_names(name, known)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


@attrs.frozen
class Origin:
    """Where a plugin comes from.

    Attributes:
        plugin: Name of the plugin: its entry point's name, or the name it was passed in by.
        distribution: Distribution with the entry point; None for an object passed in.
        version: Version of that distribution; None for an object passed in.
        entry_point: What the entry point names (``module:object``); None likewise.
        is_there: False for a name that was asked for and fits no plugin.
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
    """A setting has a value that cannot be used.

    Attributes:
        setting: Name of the setting, as the user writes it.
        value: What was given.
        allowed: What would be accepted, in words.
    """

    setting: str
    value: Any
    allowed: str

    def __init__(self, setting: str, value: Any, allowed: str, hint: str = "") -> None:
        self.setting, self.value, self.allowed = setting, value, allowed
        text = f"{setting} must be {allowed}, got {_shown(value)}."
        super().__init__(f"{text} {hint}" if hint else text)


class UnknownNameError(ConfigError, LookupError):
    """A name was asked for that nothing goes by.

    Attributes:
        kind: What was looked for (``policy``, ``backend``, ``trace column``).
        name: The name asked for.
        known: All names there are.
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
    """The facts of a batch are impossible or outside the configured limits.

    Attributes:
        field: Which fact (``num_tokens``, ``num_reqs``, ``loras``, ...).
        value: What was given.
        allowed: What would be accepted, in words.
    """

    field: str
    value: Any
    allowed: str

    def __init__(self, field: str, value: Any, allowed: str, hint: str = "") -> None:
        self.field, self.value, self.allowed = field, value, allowed
        text = f"{field} must be {allowed}, got {_shown(value)}."
        super().__init__(f"{text} {hint}" if hint else text)


class InputError(DispatchkitError, ValueError):
    """A tensor given to a runner does not fit the declared static input.

    Attributes:
        name: Name of the input.
    """

    def __init__(self, name: str, message: str) -> None:
        self.name = name
        super().__init__(message)


class NoGraphError(DispatchkitError, RuntimeError):
    """No graph serves this batch, and running it eager is not allowed.

    Raised where the allowed modes exclude eager (a rank that agreed on a mode it has no
    graph for), and in strict mode.

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
        hook: Which method or hook answered so (``declare``, ``decide``, ``observe``).
        value: What it answered.
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
    """A plugin, a name or a key could not be registered; nothing of it was kept."""


class PluginError(RegistrationError):
    """One plugin, or one name that it claims, could not be taken.

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
    """Loading in strict mode found problems; the group holds a PluginError for each."""

    def __new__(cls, errors: Sequence[PluginError]) -> PluginLoadError:
        """Build the group; the message lists every problem."""
        listing = "".join(f"\n- {error}" for error in errors)
        text = f"loading plugins found {len(errors)} problem(s):{listing}\n"
        return super().__new__(cls, text, list(errors))


class RegistryError(DispatchkitError, RuntimeError):
    """A graph entry was asked for a transition that its state does not allow."""


class CaptureError(DispatchkitError, RuntimeError):
    """Capturing a graph failed; streams, generators and other keys are as before.

    Attributes:
        key: What was being captured, as text ("" when unknown at that depth).
        reason: A short word for counters (``host_sync``, ``out_of_memory``, ``error``).
    """

    key: str
    reason: str

    def __init__(self, message: str, *, key: str = "", reason: str = "error") -> None:
        self.key, self.reason = key, reason
        super().__init__(message)


class SwapError(DispatchkitError, RuntimeError):
    """A swap was refused while serving; what was in force stays as it was.

    Attributes:
        failed: Why, by key as text.
    """

    def __init__(self, message: str, *, failed: Mapping[str, str]) -> None:
        self.failed: dict[str, str] = dict(failed)
        super().__init__(message)


class ReplayError(DispatchkitError, RuntimeError):
    """A replay failed or was refused; the caller got no result of an earlier step."""


class BackendUnavailableError(DispatchkitError, ImportError):
    """A backend cannot run here: torch, a driver or a device is missing."""


class MissingDistributionError(DispatchkitError, ImportError):
    """A name comes with a distribution that is not installed; the message says which."""


class TraceError(DispatchkitError, ValueError):
    """A trace file cannot be read as one.

    Attributes:
        path: The file.
        line: 1-based line number, or None when the fault is of the file as a whole.
    """

    path: str
    line: int | None

    def __init__(self, path: str, line: int | None, message: str) -> None:
        self.path, self.line = path, line
        where = f"{path}, line {line}" if line is not None else path
        super().__init__(f"{where}: {shortened(message, _LONGEST_MESSAGE)}")


class RankError(DispatchkitError, RuntimeError):
    """Ranks cannot go on together: one is late, gone, has raised, or is set up otherwise.

    Attributes:
        ranks: Global numbers of the ranks it is put down to; empty where that is not known.
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
