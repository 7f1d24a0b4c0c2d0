"""Settings from Python, ``pyproject.toml``, the environment and the command line.

A setting has the same name, meaning and error text wherever it is given::

    load_settings(sizes=[1, 2, 4])      # Python
    sizes = [1, 2, 4]                   # pyproject.toml, under [tool.dispatchkit]
    DISPATCHKIT_SIZES=1,2,4             # environment
    dispatchkit --set sizes=1,2,4 ...   # command line

The later of ``pyproject.toml``, environment, and call (or command line) wins. Every value is
checked, even if overridden, and keeps its source.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import Axis, CUDAGraphMode, DispatchConfig
from dispatchkit.keys.capture_sizes import CaptureSizeWarning
from dispatchkit.keys.checks import check_flag
from dispatchkit.keys.reading import read_flag, read_word
from dispatchkit.keys.records import ABOUT, About, check_setting, default_of, or_none, setting
from dispatchkit.options import (
    CaptureOptions,
    MemoryOptions,
    RunnerOptions,
    names_of,
    with_settings,
)

__all__ = ["SETTINGS", "VARIABLES", "Setting", "SettingValue", "Settings", "load_settings"]

PREFIX = "DISPATCHKIT_"
FILE_VARIABLE = "DISPATCHKIT_CONFIG"
# Read elsewhere: by the GPU tests, and by dispatchkit-vllm inside vLLM.
_NO_SETTINGS = frozenset(
    {
        FILE_VARIABLE,
        "DISPATCHKIT_METRICS",
        "DISPATCHKIT_REQUIRE_GPU",
        "DISPATCHKIT_SLEEP_LIBRARY",
        "DISPATCHKIT_TRACE",
    }
)
_MAX_FILE_BYTES = 4 * 1024 * 1024


# -- settings outside the other records --------------------------------------------


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(name, value, "non-empty text")
    return value.strip()


def _outputs(value: Any, name: str) -> str:
    if value not in ("owned", "view"):
        raise UnknownNameError(name, str(value), ("owned", "view"))
    return str(value)


def _names(value: Any, name: str) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(name, value, "a list of names")
    return tuple(part.strip() for part in parts if part.strip())


def _as_given(value: Any, name: str) -> Any:
    return value


@attrs.frozen(kw_only=True)
class RunnerArguments:
    """Settings that are arguments of ``GraphRunner`` itself."""

    policy: str | None = setting(
        None,
        or_none(_text),
        About("The policy that decides.", "a plugin's choice, else vllm", _as_given),
    )
    backend: str = setting(
        "auto",
        _text,
        About(
            "Where graphs are captured: auto, cuda, cuda:1, tape, or a plugin's.", read=_as_given
        ),
    )
    outputs: str = setting(
        "owned",
        _outputs,
        About("owned: results are fresh; view: valid until the next call.", read=read_word),
    )
    lazy: bool = setting(
        False, check_flag, About("Capture a key when a call asks for it.", read=read_flag)
    )


@attrs.frozen(kw_only=True)
class CostSettings:
    """The cost model for planning and simulation."""

    cost_model: str = setting(
        "lm-decode-h100",
        _text,
        About("Cost model: name of a built-in model, or a file.", read=_as_given),
    )


@attrs.frozen(kw_only=True)
class PluginSettings:
    """Which plugins are loaded."""

    plugins: tuple[str, ...] | None = setting(
        None, or_none(_names), About("Load only these plugins.", "all", _as_given)
    )
    disable: tuple[str, ...] = setting((), _names, About("Plugins to skip.", read=_as_given))


# -- all settings -------------------------------------------------------------------------


@attrs.frozen
class Setting:
    """One setting.

    Attributes:
        name: Its name in Python and ``pyproject.toml``.
        group: The record it belongs to: ``dispatch`` (DispatchConfig), ``runner`` (GraphRunner),
            ``plugins`` or ``costs``.
        field: The record's field.
    """

    name: str
    group: str
    field: attrs.Attribute[Any]

    @property
    def about(self) -> About:
        """The description of the setting."""
        about: About = self.field.metadata[ABOUT]
        return about

    @property
    def help(self) -> str:
        """A one-sentence description."""
        return self.about.help

    @property
    def derived(self) -> str:
        """How it is derived if not given, in words."""
        return self.about.derived

    @property
    def default(self) -> Any:
        """The default; None if it is derived."""
        return default_of(self.field)

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()

    def check(self, value: Any) -> Any:
        """Convert a native or text value.

        Raises:
            ConfigError: The value is invalid.
        """
        return check_setting(self.field, self.about.read(value, self.name))


def _settings_of(record: type[Any], group: str) -> dict[str, Setting]:
    fields = [field for field in attrs.fields(record) if ABOUT in field.metadata]
    return {field.alias: Setting(field.alias, group, field) for field in fields}


SETTINGS: Mapping[str, Setting] = {
    **_settings_of(RunnerArguments, "runner"),
    **_settings_of(DispatchConfig, "dispatch"),
    **_settings_of(RunnerOptions, "runner"),
    **_settings_of(CaptureOptions, "runner"),
    **_settings_of(MemoryOptions, "runner"),
    **_settings_of(CostSettings, "costs"),
    **_settings_of(PluginSettings, "plugins"),
}
"""All settings, by name."""

VARIABLES: frozenset[str] = _NO_SETTINGS | {PREFIX + name.upper() for name in SETTINGS}
"""All environment variables of dispatchkit and its distributions."""

# Settings of a runner that are its own arguments.
_ARGUMENTS = names_of(RunnerArguments)


# -- the result ---------------------------------------------------------------------------


@attrs.frozen
class SettingValue:
    """A value and its source.

    Attributes:
        value: The value, checked.
        source: The source, in words.
        place: ``default``, ``file``, ``environment`` or ``call``.
    """

    value: Any
    source: str
    place: str


@attrs.frozen
class Settings:
    """The settings in effect, each with its source.

    Attributes:
        given: All values that were given, by name; the first one applies and overrides the others.
        file: The ``pyproject.toml`` that was read, if any.
    """

    given: Mapping[str, tuple[SettingValue, ...]] = attrs.field(factory=dict)
    file: Path | None = None

    def __getitem__(self, name: str) -> Any:
        return self.lookup(name).value

    def is_given(self, name: str) -> bool:
        """Return whether a setting was given."""
        return bool(self.given.get(_known(name).name))

    def lookup(self, name: str) -> SettingValue:
        """Return a setting's value, which may be the default, with its source.

        Raises:
            UnknownNameError: There is no such setting.
        """
        known = _known(name)
        found = self.given.get(name)
        return found[0] if found else SettingValue(known.default, "default", "default")

    def chosen(self, group: str) -> dict[str, Any]:
        """Return the settings of a group that were given."""
        return {
            name: found[0].value
            for name, found in self.given.items()
            if found and SETTINGS[name].group == group
        }

    def dispatch_config(self, **unless_given: Any) -> DispatchConfig:
        """Return the DispatchConfig of the settings.

        Args:
            unless_given: Values for settings that were not given.

        Raises:
            ConfigError: Two settings contradict each other; notes state their sources.
        """
        values = {
            **{name: value for name, value in unless_given.items() if value is not None},
            **self.chosen("dispatch"),
        }
        try:
            return DispatchConfig(**values)
        except ConfigError as error:
            for name in values:
                if name in str(error) and self.is_given(name):
                    error.add_note(f"{name} is from {self.lookup(name).source}.")
            raise

    def options(self, config: DispatchConfig | None = None) -> RunnerOptions:
        """Return the RunnerOptions of the settings.

        Args:
            config: The configuration; by default that of the settings.
        """
        chosen = self.chosen("runner")
        plain = {name: value for name, value in chosen.items() if name not in _ARGUMENTS}
        config = self.dispatch_config() if config is None else config
        return attrs.evolve(with_settings(RunnerOptions(), plain), config=config)

    def runner_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a GraphRunner with these settings.

        Example: ``GraphRunner(step, inputs, **load_settings().runner_arguments())``
        """
        chosen = self.chosen("runner")
        arguments = {name: chosen[name] for name in _ARGUMENTS if name in chosen}
        if self.chosen("dispatch") or len(chosen) > len(arguments):
            arguments["options"] = self.options()
        if self.chosen("plugins"):
            from dispatchkit.plugins import load_plugins

            plugins = load_plugins(**self.plugin_filter())
            arguments["policy"] = plugins.with_policy(chosen.get("policy"))
        return arguments

    def plugin_filter(self) -> dict[str, Any]:
        """Return the keyword arguments of ``load_plugins``.

        If the settings name plugins, the environment is already included in them, and must not
        exclude further plugins.
        """
        found: dict[str, Any] = {"allow": self["plugins"], "block": self["disable"] or None}
        return {**found, "environ": {}} if self.chosen("plugins") else found

    def disagreements(self) -> tuple[str, ...]:
        """Describe each setting whose values in file and environment differ.

        Overriding them by a call or on the command line is intended, but a value in the file or the
        environment may have been forgotten.
        """
        said = []
        for name, found in self.given.items():
            lower = [one for one in found if one.place != "call"]
            if found[0].place != "call" and len({repr(one.value) for one in lower}) > 1:
                winner, loser = lower[0], lower[-1]
                said.append(
                    f"{name}: {shown(winner.value)} from {winner.source} overrides "
                    f"{shown(loser.value)} from {loser.source}."
                )
        return tuple(said)

    def rows(self) -> list[dict[str, Any]]:
        """Return every setting with its value, source and overridden values, as plain values."""
        rows = []
        for name, one in SETTINGS.items():
            now = self.lookup(name)
            rows.append(
                {
                    "setting": name,
                    "value": plain(now.value),
                    "source": now.source,
                    "derived": one.derived if now.value is None else "",
                    "overrides": [
                        {"value": plain(other.value), "source": other.source}
                        for other in self.given.get(name, ())[1:]
                    ],
                    "variable": one.variable,
                    "help": one.help,
                }
            )
        return rows


def plain(value: Any) -> Any:
    """Return a value for JSON."""
    if isinstance(value, CUDAGraphMode):
        return str(value)
    if isinstance(value, tuple) and value and isinstance(value[0], Axis):
        return {
            axis.name: {"buckets": list(axis.buckets), "exact": True}
            if axis.exact
            else list(axis.buckets)
            for axis in value
        }
    return list(value) if isinstance(value, tuple) else value


def shown(value: Any) -> str:
    """Return a value as written in ``pyproject.toml``."""
    value = plain(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{_key(name)} = {shown(one)}" for name, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False, default=str)


def _key(name: str) -> str:
    """Return a key of a TOML table, quoted if necessary."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


# -- the four places ----------------------------------------------------------------------


def load_settings(
    given: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
    start: str | os.PathLike[str] | None = None,
    sources: Mapping[str, str] | None = None,
    **more: Any,
) -> Settings:
    """Return the settings of call, environment and ``pyproject.toml``; the first of these wins.

    Args:
        given: Settings of the call, by name; None means not given.
        more: Further settings of the call, as keyword arguments.
        environ: Environment variables; by default those of the process.
        file: The TOML file to read; by default the one in DISPATCHKIT_CONFIG, or else the nearest
            ``pyproject.toml`` with a table ``[tool.dispatchkit]``.
        start: The folder where the upward search for it begins; by default the current folder.
        sources: Descriptions of the sources of the call's settings, by name.

    Raises:
        UnknownNameError: There is no such setting; the message lists the closest ones.
        ConfigError: A value is invalid, or the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    call: dict[str, SettingValue] = {}
    for name, value in {**(given or {}), **more}.items():
        if value is None:
            continue
        source = (sources or {}).get(name, f"the argument {name}")
        call[name] = _checked_value(name, value, source, "call")
    from_environment = _from_environment(environ)
    path, table = _read_file(file, environ, start)
    from_file = {
        name: _checked_value(name, value, f"{path} [tool.dispatchkit]", "file")
        for name, value in table.items()
    }
    layers = (call, from_environment, from_file)
    return Settings(
        {
            name: tuple(layer[name] for layer in layers if name in layer)
            for name in SETTINGS
            if any(name in layer for layer in layers)
        },
        path,
    )


def _known(name: str, source: str = "") -> Setting:
    setting = SETTINGS.get(name)
    if setting is None:
        error = UnknownNameError("setting", name, SETTINGS)
        if source:
            error.add_note(f"It is from {source}.")
        raise error
    return setting


def _checked_value(name: str, value: Any, source: str, place: str) -> SettingValue:
    setting = _known(name, source)
    try:
        with warnings.catch_warnings():
            # The complete configuration warns once, when it is created.
            warnings.simplefilter("ignore", CaptureSizeWarning)
            return SettingValue(setting.check(value), source, place)
    except ConfigError as error:
        error.add_note(f"It is from {source}.")
        raise


def _from_environment(environ: Mapping[str, str]) -> dict[str, SettingValue]:
    found = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in _NO_SETTINGS:
            continue
        name = variable.removeprefix(PREFIX).lower()
        source = f"the environment variable {variable}"
        # An empty variable counts as unset, except where an empty list is meaningful.
        if text.strip() or _known(name, source).group == "plugins":
            found[name] = _checked_value(name, text, source, "environment")
    return found


def _read_file(
    file: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    start: str | os.PathLike[str] | None,
) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the file and its table, or nothing if there is no file."""
    wanted = file or environ.get(FILE_VARIABLE) or None
    if wanted is not None:
        path = Path(wanted)
        table = _table(path)
        if table is None:
            raise ConfigError(
                "configuration file", str(path), "a TOML file with a table [tool.dispatchkit]"
            )
        return path, table
    try:
        here = Path(start or Path.cwd()).absolute()
    except FileNotFoundError:  # the current folder was removed, so there are no parents
        return None, {}
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            table = _table(path)
            if table is not None:
                return path, table
    return None, {}


def _table(path: Path) -> Mapping[str, Any] | None:
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            "configuration file", str(path), f"a file that can be read ({error.strerror})"
        ) from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError("configuration file", str(path), f"at most {_MAX_FILE_BYTES} bytes")
    try:
        data = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError("configuration file", str(path), f"TOML ({error})") from error
    tools = data.get("tool", {})
    table = tools.get("dispatchkit") if isinstance(tools, Mapping) else None
    if table is not None and not isinstance(table, Mapping):
        raise ConfigError("tool.dispatchkit", table, f"a table ({path})")
    return table
