"""Members of a composite: read them from text, tables or a file, and report on them."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from dispatchkit import Policy
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count
from dispatchkit.plugins import PluginSet, load_plugins

__all__ = ["Member", "MemberReport", "members_from_pyproject"]


@attrs.frozen
class Member:
    """One member of a composite.

    Attributes:
        name: Its name, unique in the composite.
        policy: A policy, or the name of one; by default the name of the member.
        priority: Members of higher priority are asked first, those of equal priority in the order
            in which they were added.
        options: Options for the policy's factory, if the policy is given by name.
    """

    name: str
    policy: Policy | str = ""
    priority: int = 0
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        name: Any = self.name  # a file may contain a value of any type
        if not isinstance(name, str) or not name or set(name) & set("/,:= "):
            allowed = "non-empty text without spaces or any of '/,:='"
            raise ConfigError("member name", self.name, allowed)
        setting = f"priority of member {self.name!r}"
        object.__setattr__(self, "priority", check_count(self.priority, setting, minimum=None))

    @classmethod
    def parse(cls, text: str) -> Member:
        """Parse a member from ``name[=policy][:priority]``.

        Raises:
            ConfigError: The text does not have that form.
        """
        what, colon, number = text.strip().partition(":")
        name, _, policy = (part.strip() for part in what.partition("="))
        try:
            return cls(name, policy, int(number) if colon else 0)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError("member", text, "name[=policy][:priority]") from error


@attrs.frozen
class MemberReport:
    """The state of a member, as reported by a composite.

    Attributes:
        name: Its name.
        priority: Its priority.
        policy: The name of its policy.
        faults: How often it raised or broke a hard constraint.
        last_fault: Description of the last fault; empty if there was none.
        suspended: It is no longer asked, until it is resumed.
    """

    name: str
    priority: int
    policy: str
    faults: int = 0
    last_fault: str = ""
    suspended: bool = False


@attrs.define(eq=False)
class Seat:
    """A member with its policy object and its faults."""

    name: str
    priority: int
    policy: Policy
    faults: int = 0
    faults_in_a_row: Counter[str] = attrs.field(factory=Counter)
    last_fault: str = ""
    suspended: bool = False


def read_members(members: str | Iterable[Member | str | Mapping[str, Any]]) -> list[Member]:
    """Return members given as records, tables or text.

    Raises:
        ConfigError: A member is invalid.
    """
    items: Iterable[Member | str | Mapping[str, Any]] = members
    if isinstance(members, str):
        items = [part for part in members.split(",") if part.strip()]
        if not items:
            raise ConfigError("members", members, "at least one name[=policy][:priority]")
    if not isinstance(items, Iterable):
        raise ConfigError("members", members, "a list of Members, tables or text")
    return [_read(item) for item in items]


def _read(item: Member | str | Mapping[str, Any]) -> Member:
    if isinstance(item, Member):
        return item
    if isinstance(item, str):
        return Member.parse(item)
    if not isinstance(item, Mapping):
        raise ConfigError("members", item, "Members, tables or text")
    known = [field.name for field in attrs.fields(Member)]
    for name in item:
        if name not in known:
            raise ConfigError("member", dict(item), f"a table with only {', '.join(known)}")
    given = dict(item)
    given.setdefault("name", given.get("policy", ""))
    return Member(**given)


def members_from_pyproject(path: str | Path = "pyproject.toml") -> list[Member]:
    """Return the members listed in a file's ``[[tool.dispatchkit.composite.members]]``.

    Raises:
        ConfigError: The file cannot be read, or contains no members.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("pyproject", str(path), "a TOML file", f"Error: {error}.") from error
    where: Any = table
    for part in ("tool", "dispatchkit", "composite", "members"):
        where = where.get(part) if isinstance(where, dict) else None
    if not isinstance(where, list) or not where:
        allowed = "a file with tables [[tool.dispatchkit.composite.members]]"
        raise ConfigError("pyproject", str(path), allowed)
    return read_members(where)


def seat(member: Member, plugins: PluginSet | None = None) -> Seat:
    """Return a member's seat; a policy given by name is created."""
    policy = member.policy or member.name
    if isinstance(policy, str):
        plugins = load_plugins() if plugins is None else plugins
        policy = plugins.create_policy(policy, **member.options)
    return Seat(member.name, member.priority, policy)
