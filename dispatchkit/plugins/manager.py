"""HookManager: a pluggy manager that adds a plugin completely or not at all.

pluggy validates the names and arguments of hooks, but silently accepts some plugins with hooks that
would never run: a class, or a plugin with an unmarked or ``async`` hook. This manager rejects such
plugins. It passes pluggy only a plain namespace of functions, because pluggy (up to 1.6) evaluates
every property of a plugin and compares plugins by ``==``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pluggy
from pluggy._callers import _multicall

from dispatchkit import hookspecs
from dispatchkit.errors import did_you_mean, format_value
from dispatchkit.hookspecs import RECORDS, Spec
from dispatchkit.plugins.discovery import PluginFault

_PROJECT = "dispatchkit"
_HOOK_PREFIXES = (f"{_PROJECT}_register_", f"{_PROJECT}_select_")
_MARK, _SPEC_MARK = f"{_PROJECT}_impl", f"{_PROJECT}_spec"


class Hooks(types.SimpleNamespace):
    """The hook functions of a plugin, and no other attributes for pluggy to inspect."""

    def __dir__(self) -> list[str]:
        return list(vars(self))


class HookManager(pluggy.PluginManager):
    """A pluggy manager with dispatchkit's hook specifications; it starts without plugins."""

    # pluggy would store a bound method in each hook. This reference cycle would keep the plugins of
    # a runner alive until a garbage collection.
    _hookexec = staticmethod(_multicall)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(_PROJECT)
        self.add_hookspecs(hookspecs)

    def add(self, name: str, plugin: object, doing: list[str]) -> tuple[Spec, ...]:
        """Add a plugin and return its records in the order of ``RECORDS``.

        Args:
            name: A unique name for the plugin.
            plugin: A module or instance that has not been added. Only its ``register`` hooks are
                called.
            doing: List to which the current activity is appended, for error messages.

        Raises:
            PluginFault: The object is not a plugin, a function would not run as intended, or a hook
                did not return records. After any exception, the plugin is removed again.
        """
        doing.append("examining its hooks")
        hooks = _hooks_of(plugin)
        try:
            self.register(hooks, name)
            self._validate(hooks)
            return tuple(self._records(hooks, doing))
        except BaseException:
            self.unregister(name=name)
            raise

    def _validate(self, hooks: Hooks) -> None:
        callers = self.get_hookcallers(hooks) or ()
        try:
            self.check_pending()
        except pluggy.PluginValidationError as error:
            unknown = next(one.name for one in callers if not one.has_spec())
            known = [name for name in dir(hookspecs) if name.startswith(_HOOK_PREFIXES)]
            raise PluginFault(
                f"there is no hook {unknown}.{did_you_mean(unknown, known)} If another version "
                "of dispatchkit has this hook, mark your function @hookimpl(optionalhook=True)."
            ) from error
        for caller in callers:
            if sum(one.plugin is hooks for one in caller.get_hookimpls()) > 1:
                raise PluginFault(f"two of its functions implement {caller.name}; keep only one.")

    def _records(self, hooks: Hooks, doing: list[str]) -> Iterator[Spec]:
        for record in RECORDS:
            for one in getattr(self.hook, record.hook).get_hookimpls():
                if one.plugin is hooks:
                    doing.append(f"running {record.hook}")
                    yield from _checked(one.function(), record)


def _hooks_of(plugin: object) -> Hooks:
    functions: dict[str, Callable[..., Any]] = {}
    if not inspect.isclass(plugin):
        # All attributes of a plain module are in vars(). The attributes of other plugins are
        # looked up statically, because getattr would evaluate properties.
        own = vars(plugin) if type(plugin) is types.ModuleType else None
        for name in object.__dir__(plugin) if own is None else list(own):
            function = inspect.getattr_static(plugin, name, None) if own is None else own[name]
            if isinstance(function, (staticmethod, classmethod, types.MethodType)):
                function = function.__func__
            if _is_hook(name, function):
                _check_function(name, function)
                functions[name] = getattr(plugin, name)
    if not functions:
        problem = "is not an instance" if inspect.isclass(plugin) else "has no hooks"
        raise PluginFault(
            f"{_describe(plugin)} {problem}; a plugin must be a module or an instance with "
            "functions marked @hookimpl (from dispatchkit.hookspecs)."
        )
    return Hooks(**functions)


def _describe(plugin: object) -> str:
    if isinstance(plugin, types.ModuleType):
        return f"module {plugin.__name__!r}"
    if inspect.isclass(plugin):
        return f"class {plugin.__name__}"
    if inspect.isroutine(plugin):
        return f"function {plugin.__name__}"
    return f"an instance of {type(plugin).__name__}"


def _is_hook(name: str, function: Any) -> bool:
    """Return whether a function is marked as a hook; reject unmarked functions named like hooks."""
    attributes = getattr(function, "__dict__", {}) if inspect.isfunction(function) else {}
    if _MARK in attributes:
        return True
    if not name.startswith(_HOOK_PREFIXES) or _SPEC_MARK in attributes:
        return False  # another function, or a hook specification that the plugin imported
    if not inspect.isfunction(function):
        kind = type(function).__name__
        raise PluginFault(
            f"{name} is not a function ({kind}). Make it a function or method marked @hookimpl, or "
            "rename it."
        )
    others = ", ".join(one.removesuffix("_impl") for one in attributes if one.endswith("_impl"))
    what = f"is marked as a hook of another project ({others})" if others else "is not marked"
    raise PluginFault(
        f"{name} {what}, so it would never run. Mark it @hookimpl (from dispatchkit.hookspecs), "
        "or rename it."
    )


def _check_function(name: str, function: Any) -> None:
    """Reject functions that pluggy would not call as intended."""
    marks = getattr(function, _MARK)
    if marks["hookwrapper"] or marks["wrapper"]:
        raise PluginFault(
            f"{name} is a hook wrapper, which dispatchkit does not support. Write a plain "
            "function that returns the result."
        )
    if inspect.isgeneratorfunction(function):
        raise PluginFault(
            f"{name} is a generator function, so its body would not run; return a value instead."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise PluginFault(f"{name} is async, but hooks are not awaited; make it a plain function.")
    for parameter in inspect.signature(function).parameters.values():
        # Only some versions of pluggy pass values for keyword-only, variadic or optional
        # parameters.
        plain = (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if parameter.kind not in plain or parameter.default is not parameter.empty:
            raise PluginFault(
                f"{name} has the parameter {str(parameter)!r}; use a positional parameter "
                "without a default."
            )


def _checked(result: Any, record: type[Any]) -> Sequence[Spec]:
    if not isinstance(result, (list, tuple)):
        if inspect.iscoroutine(result):
            result.close()  # otherwise Python warns that it was never awaited
        raise PluginFault(
            f"{record.hook} returned {format_value(result)} ({type(result).__name__}); return a "
            f"list of {record.__name__} records, or an empty list."
        )
    names = set()
    for one in result:
        if not isinstance(one, record):
            raise PluginFault(
                f"{record.hook} returned {format_value(one)} ({type(one).__name__}) in its list; "
                f"return {record.__name__} records (from dispatchkit.hookspecs)."
            )
        if one.name in names:
            raise PluginFault(
                f"{record.hook} returned the name {one.name!r} twice; names must be unique."
            )
        names.add(one.name)
    return result
