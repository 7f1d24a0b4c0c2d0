"""Read the members of a composite from strings, dicts or a file."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from dispatchkit import Policy
from dispatchkit.errors import ConfigError
from dispatchkit.files import check_path
from dispatchkit.keys import check_count, check_instance
from dispatchkit.plugins import PluginSet, load_plugins

__all__ = ["Member", "MemberReport", "members_from_pyproject"]


@attrs.frozen
class Member:
    """A member of a composite.

    Attributes:
        name: Name of the member, unique in the composite.
        policy: Policy, or its name; by default, the policy with the member's name.
        priority: Priority of the member. Members with higher priority are asked first. Members with
            equal priority are asked in the order in which they were added.
        options: Options for the policy's factory, if the policy is given by name.
    """

    name: str
    policy: Policy | str = ""
    priority: int = 0
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        name: Any = self.name  # a file may contain a value of any type
        if not isinstance(name, str) or not name or set(name) & set("/,:= "):
            allowed = "a non-empty string without spaces or any of '/,:='"
            raise ConfigError("member name", self.name, allowed)
        options: Any = self.options
        if not isinstance(options, Mapping):
            allowed = "a dict of options by name"
            raise ConfigError(f"options of member {self.name!r}", options, allowed)
        setting = f"priority of member {self.name!r}"
        object.__setattr__(self, "priority", check_count(self.priority, setting, minimum=None))

    @classmethod
    def parse(cls, text: str) -> Member:
        """Parse a member from ``name[=policy][:priority]``.

        Raises:
            ConfigError: The text does not match this form.
        """
        what, colon, number = text.strip().partition(":")
        name, _, policy = (part.strip() for part in what.partition("="))
        try:
            return cls(name, policy, int(number) if colon else 0)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                "member", text, "a string of the form name[=policy][:priority]"
            ) from error


@attrs.frozen
class MemberReport:
    """State of a member of a composite.

    Attributes:
        name: Name of the member.
        priority: Priority of the member; members with higher priority are asked first.
        policy: Name of the member's policy.
        faults: Number of times that the member raised or violated a hard constraint.
        last_fault: Description of the last fault; empty if there was none.
        suspended: Whether the member is skipped until it is resumed.
    """

    name: str
    priority: int
    policy: str
    faults: int = 0
    last_fault: str = ""
    suspended: bool = False


@attrs.define(eq=False)
class MemberState:
    """A member's policy object and fault counters."""

    name: str
    priority: int
    policy: Policy
    faults: int = 0
    faults_in_a_row: Counter[str] = attrs.field(factory=Counter)
    last_fault: str = ""
    suspended: bool = False


def read_members(members: str | Iterable[Member | str | Mapping[str, Any]]) -> list[Member]:
    """Read members from ``Member`` records, dicts or strings.

    Raises:
        ConfigError: A member is invalid.
    """
    items: Iterable[Member | str | Mapping[str, Any]] = members
    if isinstance(members, str):
        items = [part for part in members.split(",") if part.strip()]
        if not items:
            raise ConfigError(
                "members",
                members,
                "a comma-separated list of at least one name[=policy][:priority]",
            )
    if not isinstance(items, Iterable):
        raise ConfigError("members", members, "a list of Members, dicts or strings")
    return [_read(item, index) for index, item in enumerate(items)]


def _read(item: Member | str | Mapping[str, Any], index: int) -> Member:
    if isinstance(item, Member):
        return item
    if isinstance(item, str):
        return Member.parse(item)
    if not isinstance(item, Mapping):
        raise ConfigError(f"members[{index}]", item, "a Member, a dict or a string")
    known = [field.name for field in attrs.fields(Member)]
    for name in item:
        if name not in known:
            allowed = f"a dict or TOML table with no keys other than {', '.join(known)}"
            raise ConfigError(f"members[{index}]", dict(item), allowed)
    given = dict(item)
    given.setdefault("name", given.get("policy", ""))
    return Member(**given)


def members_from_pyproject(path: str | Path = "pyproject.toml") -> list[Member]:
    """Return the members listed in ``[[tool.dispatchkit.composite.members]]`` of a file.

    Raises:
        ConfigError: The file cannot be read, is not valid TOML, lists no members, or lists an
            invalid member.
    """
    name = check_path(path, "pyproject")
    try:
        table = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "pyproject",
            name,
            "a readable file",
            "Pass the path of a readable TOML file.",
            message=f"Cannot read {name}: {error.strerror}.",
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            "pyproject",
            name,
            "a TOML file",
            "Correct the file.",
            message=f"{name} is not valid TOML: {error}.",
        ) from error
    where: Any = table
    for part in ("tool", "dispatchkit", "composite", "members"):
        where = where.get(part) if isinstance(where, dict) else None
    if not isinstance(where, list) or not where:
        allowed = "a file with tables [[tool.dispatchkit.composite.members]]"
        raise ConfigError(
            "pyproject",
            name,
            allowed,
            "Add a table [[tool.dispatchkit.composite.members]] for each member.",
            message=f"{name} lists no members.",
        )
    return read_members(where)


def member_state(member: Member, plugins: PluginSet | None = None) -> MemberState:
    """Return the initial state of a member, and create its policy if given by name."""
    policy = member.policy or member.name
    if isinstance(policy, str):
        plugins = load_plugins() if plugins is None else plugins
        policy = plugins.create_policy(policy, **member.options)
    allowed = "a policy object or the name of a policy"
    check_instance(policy, Policy, f"policy of member {member.name!r}", allowed=allowed)
    return MemberState(member.name, member.priority, policy)
