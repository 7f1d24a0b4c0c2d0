"""Declare the fields of settings records, and print the records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs

from dispatchkit.keys.reading import read_number

#: Metadata key under which a field stores its ``SettingInfo``.
ABOUT: Final = "dispatchkit"


@attrs.frozen
class SettingInfo:
    """The description of a setting, and the function that reads its text.

    Attributes:
        help: A one-sentence description.
        derived: How the value is derived if the setting is omitted and its default is None.
        read: Function that converts a value from a file, the environment or the command line. It
            takes the value and the name of the setting, and returns the value to check.
    """

    help: str
    derived: str = ""
    read: Callable[[Any, str], Any] = read_number


def setting(
    default: Any,
    check: Callable[[Any, str], Any],
    about: SettingInfo | None = None,
    **options: Any,
) -> Any:
    """Return an attrs field for a setting.

    Args:
        default: The default; ``attrs.Factory`` for a new object per record.
        check: Function that takes a value and the name of the setting, and returns the value to
            store, or raises ConfigError.
        about: Description, for settings that a file, the environment or the command line can set.
        options: Further arguments of ``attrs.field``.
    """

    def convert(value: Any, instance: Any, field: attrs.Attribute[Any]) -> Any:
        return check(value, field.alias or field.name)

    return attrs.field(
        default=default,
        converter=attrs.Converter(convert, takes_self=True, takes_field=True),
        metadata={} if about is None else setting_metadata(about),
        **options,
    )


def setting_metadata(about: SettingInfo) -> dict[str, Any]:
    """Return the metadata for a field declared with ``attrs.field``.

    Use this for converters that accept text in place of another type, because type checkers must
    see the converter in the ``attrs.field`` call.
    """
    return {ABOUT: about}


def or_none(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return a check that also accepts None."""
    return lambda value, name: None if value is None else check(value, name)


def default_of(field: attrs.Attribute[Any]) -> Any:
    """Return the default of a setting."""
    default: Any = field.default
    return default.factory() if hasattr(default, "factory") else default


def check_setting(field: attrs.Attribute[Any], value: Any) -> Any:
    """Validate a value for a setting, and return it as a record would store it.

    Raises:
        ConfigError: The value is invalid.
    """
    converter: Any = field.converter
    wrapped = getattr(converter, "converter", None)  # declared with ``setting``
    return converter(value) if wrapped is None else wrapped(value, None, field)


def changed_settings(record: Any) -> dict[str, Any]:
    """Return the settings of a record that differ from their defaults, by name."""
    found = {}
    for field in attrs.fields(type(record)):
        if field.init and field.repr:
            value = getattr(record, field.name)
            if value != default_of(field):
                found[str(field.alias)] = value
    return found


def settings_repr(record: Any) -> str:
    """Return the call that creates an equal record, omitting default values.

    This is the ``__repr__`` of settings records. A field that defines ``repr`` is printed with that
    function.
    """
    shown = {field.alias: field.repr for field in attrs.fields(type(record)) if field.init}
    arguments = []
    for name, value in changed_settings(record).items():
        own = shown[name]
        arguments.append(f"{name}={own(value) if callable(own) else repr(value)}")
    return f"{type(record).__name__}({', '.join(arguments)})"
