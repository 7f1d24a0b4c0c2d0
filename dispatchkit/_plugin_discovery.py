"""Find plugins by entry point, and decide which of them may be loaded.

importlib.metadata is imported inside the functions: reading metadata costs more than the rest
of dispatchkit's import, and most programs need it once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import attrs

from dispatchkit._plugin_records import Origin
from dispatchkit.errors import nearest_names

if TYPE_CHECKING:
    from importlib.metadata import Distribution

GROUP = "dispatchkit"
ALLOW_VARIABLE = "DISPATCHKIT_PLUGINS"
BLOCK_VARIABLE = "DISPATCHKIT_DISABLE"


def normal(name: str) -> str:
    """Return a name as package indexes compare it: ``My_Plugin`` is ``my-plugin``."""
    return re.sub(r"[-_.]+", "-", name).lower()


@attrs.frozen
class Candidate:
    """A plugin that may be loaded.

    Attributes:
        origin: Its name and distribution.
        rank: Lower ranks win where two claim one name: 0 built in, 1 passed in, 2 found.
        load: Imports it and returns the plugin object.
    """

    origin: Origin
    rank: int
    load: Callable[[], object]

    def order(self, name: str) -> tuple[int, int, str, str, str]:
        """Return the sort key among those that claim a name; the smallest wins.

        It says nothing of ``sys.path``. Among plugins found, the distribution named after
        what is claimed comes first (``dispatchkit-vllm`` for ``vllm``, then for ``vllm@0.13``
        and ``vllm-drafter``), so that nobody takes a name over by an early letter; then
        the alphabet.
        """
        distribution = normal(self.origin.distribution or "")
        family = distribution.removeprefix(f"{GROUP}-")
        claimed = normal(name.replace("@", "-"))
        strangeness = 2
        if distribution.startswith(f"{GROUP}-"):
            strangeness = 0 if claimed == family else 2 - claimed.startswith(f"{family}-")
        value = self.origin.entry_point or ""
        return (self.rank, strangeness, distribution, self.origin.plugin, value)


@attrs.frozen
class Misfit:
    """Something found that cannot be a plugin.

    Attributes:
        origin: Where it was found.
        reason: Why it is none, in words.
    """

    origin: Origin
    reason: str


def discover() -> Iterator[Candidate | Misfit]:
    """Yield the plugins of all installed distributions; imports none of them.

    A distribution whose metadata cannot be read is a misfit, and does not hide the others.
    """
    from importlib.metadata import distributions

    seen = set()
    for distribution in distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
            # Most distributions end here, unparsed.
            if not _mentions_group(text):
                continue
            name = distribution.metadata["Name"]
            # Of several copies of one distribution Python imports the first on the path, so
            # its entry points are the ones that count.
            if normal(name) in seen:
                continue
            seen.add(normal(name))
            found = list(_read(distribution, name))
        except Exception as error:  # noqa: BLE001 - broken metadata of others is reported
            where = str(getattr(distribution, "_path", "a distribution"))
            reason = f"its metadata cannot be read: {type(error).__name__}: {error}"
            yield Misfit(Origin("?", where), reason)
        else:
            yield from found


def _mentions_group(text: str) -> bool:
    return any(_is_near(group) for group in re.findall(r"^\s*\[(.*?)\]", text, re.MULTILINE))


def _is_near(group: str) -> bool:
    """Return whether this is our group or one that was probably meant to be."""
    letters = re.sub(r"[^a-z]", "", group.lower())
    return letters.startswith(GROUP) or SequenceMatcher(None, letters, GROUP).ratio() > 0.85


def _read(distribution: Distribution, name: str) -> Iterator[Candidate | Misfit]:
    for point in distribution.entry_points:
        if not _is_near(point.group):
            continue
        origin = Origin(point.name, name, distribution.version, point.value)
        if point.group == GROUP:
            yield Candidate(origin, 2, point.load)
        else:
            yield Misfit(
                origin, f"it is in the entry-point group {point.group!r}; the group is {GROUP!r}."
            )


def built_in() -> Candidate:
    """Return what dispatchkit itself brings; it comes through the same hooks."""
    from dispatchkit._version import __version__

    def load() -> object:
        from dispatchkit import _plugin_builtins

        return _plugin_builtins

    return Candidate(Origin("dispatchkit", "dispatchkit", __version__), 0, load)


def passed_in(name: str, plugin: object) -> Candidate:
    """Return an object of the user's as a plugin of that name."""
    return Candidate(Origin(name), 1, lambda: plugin)


@attrs.frozen
class Filter:
    """Which plugins may be loaded, by name of entry point or of distribution.

    Attributes:
        allowed: One set per list in force (argument, environment); a plugin must be in all.
        blocked: Names that are not loaded, in any case.
    """

    allowed: tuple[frozenset[str], ...]
    blocked: frozenset[str]

    @classmethod
    def of(
        cls,
        allow: Collection[str] | None,
        block: Collection[str] | None,
        environ: Mapping[str, str],
    ) -> Filter:
        """Combine arguments and environment: lists only ever take away."""
        allowed = [] if allow is None else [_names(allow)]
        if ALLOW_VARIABLE in environ:
            allowed.append(_names(environ[ALLOW_VARIABLE]))
        blocked = _names(block or ()) | _names(environ.get(BLOCK_VARIABLE, ""))
        return cls(tuple(allowed), blocked)

    def refusal(self, origin: Origin, *, is_found: bool) -> str:
        """Return why a plugin may not be loaded; empty if it may.

        Args:
            origin: The plugin.
            is_found: It was found by its entry point; the lists of those allowed concern no
                others.
        """
        names = _names_of(origin)
        if names & self.blocked:
            return f"blocked by name (argument `block` or {BLOCK_VARIABLE})"
        if is_found and not all(names & one for one in self.allowed):
            return f"not among the allowed names (argument `allow` or {ALLOW_VARIABLE})"
        return ""

    def unmatched(self, origins: Collection[Origin]) -> list[tuple[Origin, str]]:
        """Return (whom, why) for listed names that fit no plugin.

        A blocked plugin may well not be installed; only a name that looks misspelt counts.
        """
        present = {name for origin in origins for name in _names_of(origin)}
        found = []
        for name in sorted(frozenset[str]().union(*self.allowed) - present):
            guess = _guess(name, present)
            origin = Origin(name, is_there=False)
            found.append((origin, f"allowed by name, but there is no such plugin.{guess}"))
        for name in sorted(self.blocked - present):
            guess = _guess(name, present)
            if guess:
                origin = Origin(name, is_there=False)
                found.append((origin, f"blocked by name, but not there.{guess}"))
        return found


def _guess(name: str, present: Collection[str]) -> str:
    nearest = nearest_names(name, present)
    return f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""


def _names(listed: str | Collection[str]) -> frozenset[str]:
    items = listed.split(",") if isinstance(listed, str) else listed
    return frozenset(normal(item.strip()) for item in items if item.strip())


def _names_of(origin: Origin) -> frozenset[str]:
    return frozenset(normal(name) for name in (origin.plugin, origin.distribution) if name)
