"""Records of settings: how a field is declared, and how a record prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs

from dispatchkit.keys.reading import read_number

#: Where the metadata of a field holds its ``About``.
ABOUT: Final = "dispatchkit"


@attrs.frozen
class About:
    """What is said of a setting where it is listed.

    Attributes:
        help: What it is, in a sentence.
        derived: In words, what holds where nobody gives it and its default is None.
        read: Takes a value as a file, the environment or the command line has it, and the name
            of the setting; returns what the check takes.
    """

    help: str
    derived: str = ""
    read: Callable[[Any, str], Any] = read_number


def setting(
    default: Any,
    check: Callable[[Any, str], Any],
    about: About | None = None,
    **options: Any,
) -> Any:
    """Return the field of a setting.

    Args:
        default: What holds where nobody gives it; ``attrs.Factory`` for one of its own.
        check: Takes a value and the name of the setting; returns what is kept, or raises.
        about: For settings that a file, the environment and the command line may give.
        options: Those of ``attrs.field``.
    """

    def convert(value: Any, instance: Any, field: attrs.Attribute[Any]) -> Any:
        return check(value, field.alias or field.name)

    return attrs.field(
        default=default,
        converter=attrs.Converter(convert, takes_self=True, takes_field=True),
        metadata={} if about is None else described(about),
        **options,
    )


def described(about: About) -> dict[str, Any]:
    """Return the metadata of a field that is declared by ``attrs.field`` itself.

    That is for converters which type checkers must see, where text is taken for another type.
    """
    return {ABOUT: about}


def or_none(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return the same check for a setting that may be None."""
    return lambda value, name: None if value is None else check(value, name)


def default_of(field: attrs.Attribute[Any]) -> Any:
    """Return what a setting is where nobody gives it."""
    default: Any = field.default
    return default.factory() if hasattr(default, "factory") else default


def check_setting(field: attrs.Attribute[Any], value: Any) -> Any:
    """Return what a record would keep for one of its settings, alone.

    Raises:
        ConfigError: The value cannot be used.
    """
    converter: Any = field.converter
    wrapped = getattr(converter, "converter", None)  # where it is made by ``setting``
    return converter(value) if wrapped is None else wrapped(value, None, field)


def given_in(record: Any) -> dict[str, Any]:
    """Return the settings of a record that differ from their defaults, by name."""
    found = {}
    for field in attrs.fields(type(record)):
        if field.init and field.repr:
            value = getattr(record, field.name)
            if value != default_of(field):
                found[str(field.alias)] = value
    return found


def repr_of_given(record: Any) -> str:
    """Return the call that makes an equal record, without what equals the defaults.

    The ``__repr__`` of records of settings. A field with a ``repr`` of its own prints by it.
    """
    shown = {field.alias: field.repr for field in attrs.fields(type(record)) if field.init}
    arguments = []
    for name, value in given_in(record).items():
        own = shown[name]
        arguments.append(f"{name}={own(value) if callable(own) else repr(value)}")
    return f"{type(record).__name__}({', '.join(arguments)})"
