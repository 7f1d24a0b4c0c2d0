"""HookManager: pluggy's manager, adding a plugin completely or not at all.

pluggy checks names and arguments of hooks, and can remove a plugin. It silently accepts some
plugins that would then never run: a class, a hook without its mark, an ``async`` hook. These are
refused here. pluggy is passed only a plain namespace of functions, since up to 1.6 it evaluates
every property of a plugin, and it compares plugins by ``==``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pluggy
from pluggy._callers import _multicall

from dispatchkit import hookspecs
from dispatchkit.errors import did_you_mean
from dispatchkit.hookspecs import RECORDS, Spec
from dispatchkit.plugins.discovery import PluginFault

_PROJECT = "dispatchkit"
_HOOK_PREFIXES = (f"{_PROJECT}_register_", f"{_PROJECT}_select_")
_MARK, _SPEC_MARK = f"{_PROJECT}_impl", f"{_PROJECT}_spec"


class Hooks(types.SimpleNamespace):
    """The hook functions of a plugin, without other attributes for pluggy to inspect."""

    def __dir__(self) -> list[str]:
        return list(vars(self))


class HookManager(pluggy.PluginManager):
    """A plugin manager with the hook specifications, initially without plugins."""

    # pluggy's own method is bound to the manager and referenced by each hook, a cycle: only the
    # garbage collector would free a runner's plugins.
    _hookexec = staticmethod(_multicall)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(_PROJECT)
        self.add_hookspecs(hookspecs)

    def add(self, name: str, plugin: object, doing: list[str]) -> tuple[Spec, ...]:
        """Add a plugin; return its records, in the order of ``RECORDS``.

        Args:
            name: The plugin's name, unique.
            plugin: A module or an instance, not added yet. Only its ``register`` hooks are called.
            doing: The current activity is appended to it, for reports of exceptions.

        Raises:
            PluginFault: The object is not a plugin; one of its functions would never run, or not as
                intended; or a hook returned something other than its records. The plugin is removed
                again, as with any exception of a hook.
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
                f"there is no hook {unknown}.{did_you_mean(unknown, known)} A hook of another "
                "version of dispatchkit is marked @hookimpl(optionalhook=True)."
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
        for name in object.__dir__(plugin):
            # Read from the class's dict: getattr would run a property.
            function = inspect.getattr_static(plugin, name, None)
            if isinstance(function, (staticmethod, classmethod, types.MethodType)):
                function = function.__func__
            if _is_hook(name, function):
                _check_function(name, function)
                functions[name] = getattr(plugin, name)
    if not functions:
        raise PluginFault(
            f"no hook at all in {_describe(plugin)}; name a module or an instance with functions "
            "marked @hookimpl (from dispatchkit.hookspecs) in the entry point."
        )
    return Hooks(**functions)


def _describe(plugin: object) -> str:
    if isinstance(plugin, types.ModuleType):
        return f"module {plugin.__name__!r}"
    if inspect.isclass(plugin):
        return f"class {plugin.__name__} itself"
    if inspect.isroutine(plugin):
        return f"function {plugin.__name__}"
    return f"an instance of {type(plugin).__name__}"


def _is_hook(name: str, function: Any) -> bool:
    """Return whether a function has our mark; refuse functions that only seem to."""
    attributes = getattr(function, "__dict__", {}) if inspect.isfunction(function) else {}
    if _MARK in attributes:
        return True
    if not name.startswith(_HOOK_PREFIXES) or _SPEC_MARK in attributes:
        return False  # a function of another kind, or one of our specs imported by the plugin
    if not inspect.isfunction(function):
        kind = type(function).__name__
        raise PluginFault(f"{name} is a {kind}, not a function or method marked with @hookimpl.")
    others = ", ".join(one.removesuffix("_impl") for one in attributes if one.endswith("_impl"))
    what = f"carries the mark of another project ({others})" if others else "is not marked"
    raise PluginFault(
        f"{name} {what}, so it would never run. Put @hookimpl (from dispatchkit.hookspecs) above "
        "it, or rename it."
    )


def _check_function(name: str, function: Any) -> None:
    """Refuse functions that pluggy would call differently than intended, or not at all."""
    marks = getattr(function, _MARK)
    if marks["hookwrapper"] or marks["wrapper"]:
        raise PluginFault(
            f"{name} is a wrapper; hooks of dispatchkit do not support wrappers. Write a function "
            "that returns its result."
        )
    if inspect.isgeneratorfunction(function):
        raise PluginFault(f"{name} yields, so its body would not run; return a value instead.")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise PluginFault(f"{name} is async, and nothing would await it; make it a plain function.")
    for parameter in inspect.signature(function).parameters.values():
        # Versions of pluggy differ: some pass the value, others keep the default.
        plain = (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if parameter.kind not in plain or parameter.default is not parameter.empty:
            raise PluginFault(f"{name} takes {str(parameter)!r}; write a plain argument.")


def _checked(result: Any, record: type[Any]) -> Sequence[Spec]:
    if not isinstance(result, (list, tuple)):
        if inspect.iscoroutine(result):
            result.close()  # or Python warns that it was never awaited
        raise PluginFault(
            f"{record.hook} returned {result!r:.60} ({type(result).__name__}); return a list of "
            f"{record.__name__}, [] for none."
        )
    names = set()
    for one in result:
        if not isinstance(one, record):
            raise PluginFault(
                f"{record.hook} returned {one!r:.60} ({type(one).__name__}) in its list; return "
                f"{record.__name__} records (from dispatchkit.hookspecs)."
            )
        if one.name in names:
            raise PluginFault(f"{record.hook} returned the name {one.name!r} twice.")
        names.add(one.name)
    return result
