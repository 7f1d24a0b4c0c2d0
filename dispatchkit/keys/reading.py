"""Read settings from a file, the environment or the command line.

Each function takes a value (text or a Python object) and the name of the setting. It returns the
value to pass to the setting's check. Settings from all sources pass through the same check, so they
cause the same error messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dispatchkit.errors import ConfigError
from dispatchkit.keys import checks
from dispatchkit.keys.axes import Axis

_AXES_ALLOWED = (
    "a table of buckets by axis name, such as {length = [16, 64], kind = {buckets = [1, 3], exact "
    "= true}}, or the same as text: `length=16,64; kind=1,3 exact`"
)


def read_number(value: Any, name: str) -> Any:
    """Convert text to a number if possible; return other values unchanged."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    for read in (int, float):
        try:
            number = read(text)
        except ValueError:
            continue
        if isinstance(number, int):  # isfinite() would raise for ints too large for a float
            return number
        return number if math.isfinite(number) else text
    return text


def read_numbers(value: Any, name: str) -> Any:
    """Return the items of a list or of comma-separated text as numbers."""
    if isinstance(value, str):
        return [read_number(part, name) for part in value.split(",") if part.strip()]
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        return [read_number(part, name) for part in value]
    return value


def read_number_or_numbers(value: Any, name: str) -> Any:
    """Return the numbers in a list or in text; a single number becomes a list with one item."""
    value = read_number(value, name)
    return [value] if isinstance(value, int) else read_numbers(value, name)


def read_flag(value: Any, name: str) -> bool:
    """Return a flag, converting words such as ``yes`` and ``off``.

    Raises:
        ConfigError: The value is neither a flag nor a known word.
    """
    try:
        return checks.read_flag(value, name)
    except ConfigError as error:
        raise ConfigError(name, read_number(value, name), error.allowed) from None


def read_word(value: Any, name: str) -> str:
    """Return a word in lower case, stripped of whitespace."""
    return str(value).strip().lower()


def read_options(value: Any, name: str) -> dict[str, Any]:
    """Return a table of options; text is parsed as a JSON object.

    Raises:
        ConfigError: The value is neither a table nor the text of a JSON object.
    """
    allowed = "a table of options, or a JSON object as text"
    if isinstance(value, str):
        import json  # imported only for options given as text

        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(name, value, allowed) from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(name, value, allowed)
    return dict(value)


def read_axes(value: Any, name: str) -> Any:
    """Return axes from a table, or from text such as ``length=16,64; kind=1,3 exact``.

    Raises:
        ConfigError: The table or the text cannot be read.
    """
    if isinstance(value, str):
        value = _table_of_axes(value, name)
    if isinstance(value, Mapping):
        return tuple(_axis(one, given, name) for one, given in value.items())
    return value


def _table_of_axes(text: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        axis, equals, buckets = map(str.strip, part.partition("="))
        if not equals or axis in found:
            hint = f"Axis {axis!r} is listed twice." if equals else ""
            raise ConfigError(name, text, _AXES_ALLOWED, hint)
        bare = buckets.removesuffix(" exact")
        found[axis] = {"buckets": bare, "exact": bare != buckets}
    return found


def _axis(name: Any, given: Any, setting: str) -> Axis:
    table = given if isinstance(given, Mapping) else {"buckets": given}
    if not {"buckets"} <= set(table) <= {"buckets", "exact"}:
        raise ConfigError(setting, {name: given}, _AXES_ALLOWED)
    try:
        buckets = read_number_or_numbers(table["buckets"], "buckets")
        return Axis(name, buckets, read_flag(table.get("exact", False), "exact"))
    except ConfigError as error:
        raise ConfigError(setting, {name: given}, _AXES_ALLOWED, str(error)) from None
