"""Find plugins by their entry points, and filter them by name.

importlib.metadata is imported inside functions, because importing it takes longer than importing
the rest of dispatchkit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

import attrs

from dispatchkit.errors import Origin, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

GROUP = "dispatchkit"
ALLOW_VARIABLE = "DISPATCHKIT_PLUGINS"
BLOCK_VARIABLE = "DISPATCHKIT_DISABLE"
BUILT_IN, PASSED_IN, FOUND = range(3)


class PluginFault(Exception):  # noqa: N818
    """A plugin cannot be loaded; the message gives the reason and the next step. Internal."""


def normalize_name(name: str) -> str:
    """Normalize a distribution name as package indexes do: ``My_Plugin`` to ``my-plugin``."""
    return re.sub(r"[-_.]+", "-", name).lower()


@attrs.frozen
class Candidate:
    """A plugin that may be loaded.

    Attributes:
        origin: Name and distribution of the plugin.
        rank: ``BUILT_IN``, ``PASSED_IN`` or ``FOUND``. If two plugins register the same name, the
            plugin with the lower rank provides it, except for built-in names in the argument
            ``replace`` of ``load_plugins``.
        load: Function that imports and returns the plugin object; it may raise anything.
    """

    origin: Origin
    rank: int
    load: Callable[[], object]

    def order(self, name: str) -> tuple[int, int, str, str, str]:
        """Return the sort key of this plugin for a name; the plugin with the smallest key wins.

        The key does not depend on ``sys.path``. Among installed plugins, the distribution whose
        name matches comes first: ``dispatchkit-vllm`` for ``vllm``, and also for ``vllm@0.13`` and
        ``vllm-drafter``. Without this rule, a plugin that is earlier in the alphabet would take
        these names. The other plugins follow in alphabetical order.
        """
        distribution = normalize_name(self.origin.distribution or "")
        family = distribution.removeprefix(f"{GROUP}-")
        claimed = normalize_name(name.replace("@", "-"))
        distance = 2
        if distribution.startswith(f"{GROUP}-"):
            distance = 0 if claimed == family else 2 - claimed.startswith(f"{family}-")
        value = self.origin.entry_point or ""
        return (self.rank, distance, distribution, self.origin.plugin, value)


def discover() -> Iterator[Candidate]:
    """Yield the plugins of all installed distributions, without importing them.

    A distribution with unreadable metadata yields a candidate that fails to load.
    """
    from importlib.metadata import distributions

    seen = set()
    for distribution in distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
            # Most distributions are skipped without parsing their entry points.
            if not any(map(_resembles_group, re.findall(r"^\s*\[(.*?)\]", text, re.MULTILINE))):
                continue
            metadata = distribution.metadata  # parsed again on each access
            name = normalize_name(metadata["Name"])
            # Python imports the first copy of a distribution on the path. Ignore the entry points
            # of other copies.
            if name not in seen:
                seen.add(name)
                points = distribution.entry_points
                yield from list(_entries(points, metadata["Name"], metadata["Version"]))
        except Exception as error:  # noqa: BLE001 - broken metadata is reported as a plugin
            where = str(getattr(distribution, "_path", "a distribution"))
            problem = f"{type(error).__name__}: {error}"
            reason = f"the distribution has unreadable metadata ({problem}); reinstall it."
            yield Candidate(Origin("?", where), FOUND, _failing_loader(reason))


@functools.cache  # all installed distributions together have few groups
def _resembles_group(group: str) -> bool:
    """Return whether an entry point group is ``dispatchkit`` or probably a misspelling of it."""
    letters = re.sub(r"[^a-z]", "", group.lower())
    return letters.startswith(GROUP) or bool(get_close_matches(letters, [GROUP], cutoff=0.85))


def _entries(points: EntryPoints, distribution: str, version: str) -> Iterator[Candidate]:
    for point in filter(lambda point: _resembles_group(point.group), points):
        origin = Origin(point.name, distribution, version, point.value)
        load = point.load
        if point.group != GROUP:
            load = _failing_loader(
                f"its entry point is in the group {point.group!r}; declare it in the group "
                f"{GROUP!r}."
            )
        yield Candidate(origin, FOUND, load)


def _failing_loader(reason: str) -> Callable[[], object]:
    def load() -> object:
        raise PluginFault(reason)

    return load


@attrs.frozen
class Filter:
    """A filter for plugins, by name of the entry point or distribution.

    Attributes:
        allowed: Sets of allowed names: from the argument ``allow``, if given, and from the
            environment variable ``DISPATCHKIT_PLUGINS``, if set. An installed plugin is loaded only
            if every set contains its name or the name of its distribution.
        blocked: Names of plugins or distributions that are never loaded.
    """

    allowed: tuple[frozenset[str], ...] = ()
    blocked: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        allow: Collection[str] | None,
        block: Collection[str] | None,
        environ: Mapping[str, str],
    ) -> Filter:
        """Return the filter that combines the arguments with the environment."""
        allowed = [] if allow is None else [_names(allow)]
        if ALLOW_VARIABLE in environ:
            allowed.append(_names(environ[ALLOW_VARIABLE].split(",")))
        blocked = _names(block or ()) | _names(environ.get(BLOCK_VARIABLE, "").split(","))
        return cls(tuple(allowed), blocked)

    def refusal(self, candidate: Candidate) -> str:
        """Return the reason not to load a plugin; empty if it may be loaded.

        Lists of allowed names apply only to plugins that were found by entry point.
        """
        names = _names_of(candidate.origin)
        if names & self.blocked:
            return f"blocked by name (argument `block`, setting `disable` or {BLOCK_VARIABLE})"
        if candidate.rank == FOUND and not all(names & one for one in self.allowed):
            return (
                f"not among the allowed names (argument `allow`, setting `plugins` or "
                f"{ALLOW_VARIABLE})"
            )
        return ""

    def unmatched(self, candidates: Collection[Candidate]) -> Iterator[tuple[Origin, str]]:
        """Yield (origin, reason) for listed names that match no plugin.

        A blocked plugin need not be installed, so a blocked name is reported only if it is probably
        misspelled.
        """
        present = {name for one in candidates for name in _names_of(one.origin)}
        for name in sorted(frozenset[str]().union(*self.allowed) - present):
            hint = did_you_mean(name, present) or (
                " Install the plugin, or remove the name from the argument `allow`, the setting "
                f"`plugins` or {ALLOW_VARIABLE}."
            )
            reason = f"allowed by name, but no plugin has this name.{hint}"
            yield Origin(name, is_there=False), reason
        for name in sorted(self.blocked - present):
            hint = did_you_mean(name, present)
            if hint:
                yield (
                    Origin(name, is_there=False),
                    f"blocked by name, but no plugin has this name.{hint}",
                )


def _names(listed: Collection[str]) -> frozenset[str]:
    return frozenset(normalize_name(item.strip()) for item in listed if item.strip())


def _names_of(origin: Origin) -> frozenset[str]:
    return frozenset(normalize_name(name) for name in (origin.plugin, origin.distribution) if name)
