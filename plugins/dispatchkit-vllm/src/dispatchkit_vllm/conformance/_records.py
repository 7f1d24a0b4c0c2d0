"""Parse records of golden vectors, and collect the results of comparisons."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

_MODE_ENUM = "mode-enum"


class FormatError(ValueError):
    """Raised for an invalid record, such as one with an unknown or a missing field."""


@attrs.frozen
class Mismatch:
    """A failed comparison.

    Attributes:
        where: Name of the compared value, such as ``pad[3]``.
        expected: The recorded value.
        got: The value that the facade returned.
    """

    where: str
    expected: Any
    got: Any


@attrs.define
class Findings:
    """The results of comparing one record.

    Attributes:
        num_compared: Number of comparisons.
        mismatches: The failed comparisons.
    """

    num_compared: int = 0
    mismatches: list[Mismatch] = attrs.Factory(list)

    def compare(self, where: str, expected: Any, got: Any) -> None:
        """Compare one value; booleans equal 0 and 1."""
        self.num_compared += 1
        if expected != got:
            self.mismatches.append(Mismatch(where, expected, got))

    def compare_error(self, where: str, expected: str | None, error: Exception | None) -> None:
        """Compare an exception with the recorded class name; None means no exception."""
        self.num_compared += 1
        if expected is None and error is None:
            return
        if error is None or expected not in error_names(error):
            self.mismatches.append(Mismatch(where, expected, error and describe(error)))


def error_names(error: BaseException) -> set[str]:
    """Return the names of the classes that an exception is an instance of."""
    return {each.__name__ for each in type(error).__mro__} - {"object", "BaseException"}


def describe(error: BaseException) -> str:
    """Return the class name and message of an exception."""
    return f"{type(error).__name__}: {error}"


def attempt(expected: Any, call: Callable[[], Any]) -> Any:
    """Return the result of a call.

    If the call raises the recorded exception, return ``"!Name"``, as in the record. For any other
    exception, return ``"!Name: message"``.
    """
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - any exception is a result to compare
        if isinstance(expected, str) and expected[:1] == "!" and expected[1:] in error_names(error):
            return expected
        return f"!{describe(error)}"


@attrs.frozen
class Fields:
    """The field names that a JSON object must or may have.

    Attributes:
        required: Fields that must be present.
        optional: Fields that may be present.
    """

    required: frozenset[str]
    optional: frozenset[str] = frozenset()

    @classmethod
    def of(cls, required: str, optional: str = "") -> Fields:
        """Create an instance from names separated by spaces."""
        return cls(frozenset(required.split()), frozenset(optional.split()))

    def check(self, where: str, given: Any) -> Mapping[str, Any]:
        """Return ``given`` if its fields are valid.

        Raises:
            FormatError: ``given`` is not an object, or a field is unknown or missing.
        """
        if not isinstance(given, Mapping):
            raise FormatError(f"{where} must be an object, got {given!r}.")
        unknown = sorted(given.keys() - self.required - self.optional)
        missing = sorted(self.required - given.keys())
        if unknown:
            known = ", ".join(sorted(self.required | self.optional))
            raise FormatError(
                f"{where} has {_fields('unknown field', unknown)}; the allowed fields are {known}."
            )
        if missing:
            raise FormatError(f"{where} lacks {_fields('required field', missing)}.")
        return given


def _fields(noun: str, names: Sequence[str]) -> str:
    return f"the {noun}{'s' if len(names) > 1 else ''} {', '.join(names)}"


def kind_of(record: Mapping[str, Any]) -> str:
    """Return the kind of a record: its id up to the first slash.

    Records of a mode's properties have no id; their kind is ``mode-enum``.

    Raises:
        FormatError: The record has no valid id, and does not contain a mode's properties.
    """
    identity = record.get("id")
    if identity is None and "decode_mode" in record:
        return _MODE_ENUM
    if not isinstance(identity, str) or "/" not in identity:
        raise FormatError(f"id must be a string like 'kind/000', got {identity!r}.")
    return identity.split("/")[0]


def parse(line: str) -> Mapping[str, Any]:
    """Parse one line into a record.

    Raises:
        FormatError: The line is not a JSON object, or a field appears twice.
    """
    try:
        record = json.loads(line, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise FormatError(f"the line is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise FormatError(f"the line must be a JSON object, got {record!r}.")
    return record


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise FormatError(f"the field {name!r} appears twice.")
        found[name] = value
    return found
