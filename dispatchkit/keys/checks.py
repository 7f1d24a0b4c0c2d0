"""Validate whole numbers, flags, types, and the names of arguments."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, Final, ParamSpec, TypeGuard, TypeVar

from dispatchkit.errors import ConfigError, UnknownNameError

__all__ = [
    "check_count",
    "check_counts",
    "check_flag",
    "check_instance",
    "is_flag",
    "naming_unknown",
    "read_flag",
    "refuses_unknown_names",
    "whole_number",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_WORDS: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def is_flag(value: object) -> bool:
    """Return whether a value is a boolean of Python, numpy or torch."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def whole_number(value: Any) -> int | None:
    """Return a whole number as an int, or None for any other value.

    Integers of numpy and torch are whole numbers. Booleans, floats and strings are not.
    """
    if type(value) is int:
        return value
    if is_flag(value):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # e.g. multi-element tensors
        return None


def check_count(
    value: Any, setting: str, *, minimum: int | None = 1, maximum: int | None = None
) -> int:
    """Validate a whole number given for a setting, and return it as an int.

    Text is accepted so that the command line, the environment and Python follow the same rules.

    Args:
        value: A whole number, including numpy integers, or its text.
        setting: Name of the setting, for the error message.
        minimum: Smallest number allowed; None means no minimum.
        maximum: Largest number allowed; None means no maximum.

    Raises:
        ConfigError: The value is a boolean, not a whole number, or out of range.
    """
    if minimum is not None and maximum is not None:
        limits = f" from {minimum} to {maximum}"
    elif maximum is not None:
        limits = f" of at most {maximum}"
    else:
        limits = "" if minimum is None else f" of at least {minimum}"
    allowed = f"a whole number{limits}"
    if is_flag(value):
        raise ConfigError(setting, value, allowed, "True and False are not counts.")
    number = _read_whole(value) if isinstance(value, str) else whole_number(value)
    if (
        number is None
        or (minimum is not None and number < minimum)
        or (maximum is not None and number > maximum)
    ):
        raise ConfigError(setting, value, allowed)
    return number


def check_counts(values: Any, setting: str, *, minimum: int = 1) -> tuple[int, ...]:
    """Validate a list of whole numbers given for a setting, and return them as ints.

    Args:
        values: An iterable of numbers, or one number.
        setting: Name of the setting. The error message adds the index of the invalid item.
        minimum: Smallest number allowed.

    Raises:
        ConfigError: An item is not a whole number of at least ``minimum``.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        return (check_count(values, setting, minimum=minimum),)
    return tuple(
        check_count(item, f"{setting}[{index}]", minimum=minimum)
        for index, item in enumerate(values)
    )


def _read_whole(text: str) -> int | None:
    try:
        return int(text.strip())
    except ValueError:
        return None


def check_flag(value: Any, setting: str) -> bool:
    """Validate a flag given for a setting, and return it as a bool.

    Text is rejected because every non-empty string, even "no", is true in Python.

    Raises:
        ConfigError: The value is neither True nor False.
    """
    if not is_flag(value):
        raise ConfigError(setting, value, "True or False")
    return bool(value)


def check_instance(
    value: Any, kind: type[_T], setting: str, hint: str = "", *, allowed: str = ""
) -> _T:
    """Validate the type of an object given for a setting, and return the object.

    Args:
        value: Object to check. Classes are rejected, including those that define the members of
            ``kind``.
        kind: Required type of the object: a class or a protocol.
        setting: Name of the setting, for the error message.
        hint: Next step, for the error message. If ``value`` is a class whose instances are allowed,
            the message asks for an instance instead.
        allowed: The allowed values, for the error message; by default, the name of ``kind``.

    Raises:
        ConfigError: The object has the wrong type.
    """
    is_class = isinstance(value, type)
    if _is_protocol(kind):
        missing = _missing_members(value, kind)
        fits = not missing
        hint = hint or (f"The object lacks {', '.join(missing)}." if missing else "")
    else:
        fits = issubclass(value, kind) if is_class else isinstance(value, kind)
    if is_class or not fits:
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        if fits:
            hint = f"Pass an instance: {value.__name__}(...)."
        raise ConfigError(setting, value, allowed or f"{article} {kind.__name__}", hint)
    checked: _T = value
    return checked


def has_members(value: Any, protocol: type[_T]) -> TypeGuard[_T]:
    """Return whether an object has the public members of a protocol.

    Members that a wrapper provides through ``__getattr__`` count too. From Python 3.12 on,
    ``isinstance`` ignores them.
    """
    return not _missing_members(value, protocol)


def _missing_members(value: Any, protocol: type) -> list[str]:
    bases = filter(_is_protocol, protocol.__mro__)
    members = [name for base in bases for name in (*vars(base), *inspect.get_annotations(base))]
    return [name for name in members if name[0] != "_" and not hasattr(value, name)]


def _is_protocol(kind: type) -> bool:
    return getattr(kind, "_is_protocol", False)


def read_flag(value: Any, setting: str) -> bool:
    """Return a flag read from a file, the environment or the command line.

    Raises:
        ConfigError: The value is neither a flag nor a word such as ``yes``, ``off`` or ``1``.
    """
    if is_flag(value):
        return bool(value)
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in _WORDS:
        raise ConfigError(setting, value, "true or false (or yes, no, on, off, 1 or 0)")
    return _WORDS[word]


def refuses_unknown_names(kind: type[_T]) -> type[_T]:
    """Decorate a class so that errors of its constructor name missing and unknown arguments."""
    made: Any = kind
    made.__init__ = naming_unknown(made.__init__, kind.__name__)
    return kind


def naming_unknown(
    function: Callable[_P, _T], owner: str, place_of: Callable[[str], str] | None = None
) -> Callable[_P, _T]:
    """Wrap a function to raise errors that name missing and unknown arguments.

    Args:
        function: Function to wrap.
        owner: Name of the class or function whose settings the arguments are, for the message.
        place_of: Function that takes the name of an unknown argument, and returns a hint for the
            message: where to pass the argument instead. It returns "" if no place accepts it.

    Raises:
        UnknownNameError: The wrapper got an unknown keyword argument. The message lists the closest
            names.
        ConfigError: A required argument is missing, there are too many positional arguments, or an
            argument is given twice.
    """

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except TypeError:
            signature = inspect.signature(function)
            parameters = signature.parameters
            known = {name for name in parameters if name != "self" and name[0] != "_"}
            for name in kwargs:
                if name not in known:
                    hint = place_of(name) if place_of else ""
                    raise UnknownNameError("setting", name, known, hint, owner=owner) from None
            try:
                bound = signature.bind_partial(*args, **kwargs).arguments
            except TypeError:  # too many positional arguments, or an argument given twice
                names = ", ".join(sorted(known))
                given = args["self" in parameters :]
                allowed = f"given by name ({names})"
                raise ConfigError(f"settings of {owner}", given, allowed) from None
            for name, one in parameters.items():
                is_named = one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
                if is_named and one.default is one.empty and name not in bound:
                    raise ConfigError(name, None, f"given to {owner}") from None
            raise

    return checked
