"""Find the hook implementations of a plugin object, and refuse what would never run.

pluggy takes any object: a class, a dictionary, a function marked for another project, a
misspelt hook or an ``async`` one all register, and then fail at the first call or do nothing
for ever. Its releases also differ: up to 1.6 it evaluates every property of a plugin and
keeps half of a plugin that it refuses. So a plugin is examined here, without running any of
its code, and pluggy only ever sees a plain namespace of checked functions.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import attrs

from dispatchkit.errors import nearest_names

PROJECT = "dispatchkit"
_MARK = f"{PROJECT}_impl"
_SPEC_MARK = f"{PROJECT}_spec"
_VERBS = tuple(f"{PROJECT}_{verb}_" for verb in ("register", "select", "on"))
# What a mark of pluggy's looks like, whichever project's it is.
_MARK_KEYS = {"hookwrapper", "optionalhook", "tryfirst", "trylast", "specname"}


class PluginFault(Exception):  # noqa: N818
    """A plugin cannot be taken; the text says why and what to do. Never leaves this room."""


@attrs.frozen
class Hook:
    """A hook as the contract has it.

    Attributes:
        name: The hook's name.
        arguments: Names of the arguments that an implementation may take.
    """

    name: str
    arguments: tuple[str, ...]

    @property
    def may_be_wrapped(self) -> bool:
        """Whether wrappers may go around it."""
        return self.name.startswith(f"{PROJECT}_select_")

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


@attrs.frozen
class Implementation:
    """A checked implementation of a hook.

    Attributes:
        hook: The hook.
        function: The function, bound to the plugin where it is a method.
        takes: The arguments it takes, by name.
        options: The options of its ``@hookimpl`` mark.
    """

    hook: Hook
    function: Callable[..., Any]
    takes: tuple[str, ...]
    options: dict[str, Any]


@cache
def known_hooks() -> dict[str, Hook]:
    """Return every hook of the contract by name, in its order."""
    from dispatchkit import hookspecs

    return {
        name: Hook(name, tuple(inspect.signature(function).parameters))
        for name, function in vars(hookspecs).items()
        if inspect.isfunction(function) and hasattr(function, _SPEC_MARK)
    }


def implementations(plugin: object) -> tuple[Implementation, ...]:
    """Return the checked hook implementations of a plugin, running none of its code.

    Raises:
        PluginFault: The object is no plugin, or one of its functions would never run, or
            not as its author meant.
    """
    _refuse_non_plugins(plugin)
    found: dict[str, Implementation] = {}
    for attribute, value in _members(plugin):
        implementation = _implementation(plugin, attribute, value)
        if implementation is None:
            continue
        name = implementation.hook.name
        if name in found:
            raise PluginFault(f"two of its functions implement {name}; keep one.")
        found[name] = implementation
    if not found:
        raise PluginFault(
            f"no hook at all in {_describe(plugin)}. Mark at least one function with "
            "@hookimpl (from dispatchkit.hookspecs), or name the right module in the entry point."
        )
    return tuple(found.values())


def _describe(plugin: object) -> str:
    if isinstance(plugin, types.ModuleType):
        return f"module {plugin.__name__!r}"
    return f"an instance of {type(plugin).__name__}"


def _refuse_non_plugins(plugin: object) -> None:
    if inspect.isclass(plugin):
        raise PluginFault(
            f"class {plugin.__name__} was given where an instance or a module is needed: its "
            "hooks would be called without `self`. Name an instance in the entry point."
        )
    if plugin is None or isinstance(plugin, (dict, list, tuple, set, str, bytes, int, float)):
        raise PluginFault(
            f"{type(plugin).__name__} {plugin!r:.60} was given where a module or an instance "
            "with functions marked @hookimpl is needed."
        )
    if inspect.isroutine(plugin):
        raise PluginFault(
            f"function {plugin.__name__} was given where a module or an instance with functions "
            "marked @hookimpl is needed. Name its module in the entry point."
        )


def _members(plugin: object) -> Iterator[tuple[str, Any]]:
    """Yield names and values as they are stored: descriptors are not run."""
    own = getattr(plugin, "__dict__", {})
    if isinstance(plugin, types.ModuleType):
        yield from list(own.items())
        return
    names = dict.fromkeys(
        name for base in reversed(type(plugin).__mro__) for name in vars(base)
    ) | dict.fromkeys(own)
    for name in names:
        if not (name.startswith("__") and name.endswith("__")):
            yield name, inspect.getattr_static(plugin, name)


def _plain(value: Any) -> Any:
    """Return the function inside a static method, class method or bound method."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return value.__func__
    return value


def _marks(value: Any) -> dict[str, dict[str, Any]]:
    """Return the pluggy marks of a function: project -> options."""
    return {
        name.removesuffix("_impl"): options
        for name, options in getattr(_plain(value), "__dict__", {}).items()
        if name.endswith("_impl") and isinstance(options, dict) and _MARK_KEYS <= options.keys()
    }


def _implementation(plugin: object, attribute: str, value: Any) -> Implementation | None:
    looks_like_hook = attribute.startswith(_VERBS)
    function = _plain(value)
    if not inspect.isfunction(function):
        # Classes and other objects are only of interest where their name says "hook".
        if looks_like_hook:
            raise PluginFault(
                f"{attribute} is a {type(value).__name__}, not a function; a hook is a function "
                "or method marked with @hookimpl."
            )
        return None
    if hasattr(function, _SPEC_MARK):
        return None  # a spec of ours, imported by the plugin
    marks = _marks(function)
    if PROJECT not in marks:
        if looks_like_hook:
            raise PluginFault(_unmarked(attribute, tuple(marks)))
        return None
    options = marks[PROJECT]
    name = options.get("specname") or attribute
    hook = known_hooks().get(name)
    if hook is None:
        if options.get("optionalhook"):
            return None  # made for another version of dispatchkit, and says so
        raise PluginFault(_unknown(name))
    _refuse_odd_functions(hook, function, options)
    # Functions, methods and their static kind alone come here: reading one runs no user code.
    bound = getattr(plugin, attribute)
    return Implementation(hook, bound, _arguments(hook, bound), dict(options))


def _unmarked(attribute: str, projects: tuple[str, ...]) -> str:
    if projects:
        return (
            f"{attribute} carries the mark of another project ({', '.join(projects)}), so it "
            "would never run. Take hookimpl from dispatchkit.hookspecs."
        )
    return (
        f"{attribute} is not marked, so it would never run. "
        "Put @hookimpl (from dispatchkit.hookspecs) above it, or rename it."
    )


def _unknown(name: str) -> str:
    nearest = nearest_names(name, known_hooks())
    guess = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    return (
        f"there is no hook {name}, so it would never run.{guess} Hooks of other versions of "
        "dispatchkit are marked @hookimpl(optionalhook=True)."
    )


def _refuse_odd_functions(hook: Hook, function: Any, options: dict[str, Any]) -> None:
    is_wrapper = bool(options.get("wrapper"))
    if options.get("hookwrapper"):
        raise PluginFault(
            f"{hook.name} is an old-style wrapper (hookwrapper=True); write a function that "
            "answers for itself" + (", or use wrapper=True." if hook.may_be_wrapped else ".")
        )
    if is_wrapper and not hook.may_be_wrapped:
        raise PluginFault(
            f"{hook.name} may not be wrapped (wrapper=True): each plugin's answer is taken for "
            "itself. Only dispatchkit_select_ hooks may be."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise PluginFault(
            f"{hook.name} is async, and nothing would await it; make it a plain function."
        )
    if inspect.isgeneratorfunction(function) != is_wrapper:
        raise PluginFault(
            f"{hook.name} is marked wrapper=True but does not yield; it must yield once."
            if is_wrapper
            else f"{hook.name} yields, so its body would not run; return a value instead."
        )


def _arguments(hook: Hook, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments, if pluggy would fill in every one."""
    takes = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hook.arguments or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            raise PluginFault(
                f"{hook.name} takes {str(parameter)!r}, which the hook does not give; its "
                f"arguments are {hook}, all or fewer of them, by these names."
            )
        if parameter.default is not parameter.empty:
            # Releases of pluggy differ: some pass the value, others keep the default.
            raise PluginFault(
                f"{hook.name} gives {parameter.name!r} a default; write it without: {hook}."
            )
        takes.append(parameter.name)
    return tuple(takes)
