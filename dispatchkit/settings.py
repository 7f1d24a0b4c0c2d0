"""Settings from Python, ``pyproject.toml``, the environment and the command line.

A setting has the same name, meaning and error message in all sources::

    load_settings(sizes=[1, 2, 4])      # Python
    sizes = [1, 2, 4]                   # pyproject.toml, under [tool.dispatchkit]
    DISPATCHKIT_SIZES=1,2,4             # environment
    dispatchkit --set sizes=1,2,4 ...   # command line

The call (or command line) overrides the environment, which overrides ``pyproject.toml``. All values
are validated, including those that are overridden, and the source of each value is recorded.
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
from dispatchkit.files import check_path
from dispatchkit.keys import Axis, CUDAGraphMode, DispatchConfig
from dispatchkit.keys.capture_sizes import CaptureSizeWarning
from dispatchkit.keys.checks import check_flag
from dispatchkit.keys.reading import read_flag, read_word
from dispatchkit.keys.records import ABOUT, SettingInfo, check_setting, default_of, or_none, setting
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
# Environment variables that are not settings.
_NO_SETTINGS = frozenset(
    {
        FILE_VARIABLE,
        "DISPATCHKIT_METRICS",  # read by dispatchkit-vllm in a vLLM process
        "DISPATCHKIT_REQUIRE_GPU",  # read by the GPU tests
        "DISPATCHKIT_SLEEP_LIBRARY",  # read when the allocator for sleeping pools is loaded
        "DISPATCHKIT_TRACE",  # read by dispatchkit-vllm in a vLLM process
    }
)
_MAX_FILE_BYTES = 4 * 1024 * 1024


# -- settings defined in this module -----------------------------------------------


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
    if not isinstance(parts, list | tuple):
        raise ConfigError(name, value, "a list of names")
    for at, part in enumerate(parts):
        if not isinstance(part, str):
            raise ConfigError(f"{name}[{at}]", part, "a name")
    return tuple(part.strip() for part in parts if part.strip())


def _as_given(value: Any, name: str) -> Any:
    return value


@attrs.frozen(kw_only=True)
class RunnerArguments:
    """Settings that are arguments of ``GraphRunner`` itself."""

    policy: str | None = setting(
        None,
        or_none(_text),
        SettingInfo(
            "Name of the policy that decides how batches run.",
            "chosen by a plugin, otherwise vllm",
            _as_given,
        ),
    )
    backend: str = setting(
        "auto",
        _text,
        SettingInfo(
            "Backend: auto, tape, cuda (or one device, such as cuda:1), or a plugin's backend.",
            read=_as_given,
        ),
    )
    outputs: str = setting(
        "owned",
        _outputs,
        SettingInfo(
            ("owned: results are new tensors; view: results are valid until the next call."),
            read=read_word,
        ),
    )
    lazy: bool = setting(
        False,
        check_flag,
        SettingInfo("Capture each graph when a call first needs it.", read=read_flag),
    )


@attrs.frozen(kw_only=True)
class CostSettings:
    """Settings for planning and simulation."""

    cost_model: str = setting(
        "lm-decode-h100",
        _text,
        SettingInfo("Cost model: a built-in name or a file.", read=_as_given),
    )


@attrs.frozen(kw_only=True)
class PluginSettings:
    """Settings that select the plugins to load."""

    plugins: tuple[str, ...] | None = setting(
        None,
        or_none(_names),
        SettingInfo("Plugins to load; all others are skipped.", "all", _as_given),
    )
    disable: tuple[str, ...] = setting((), _names, SettingInfo("Plugins to skip.", read=_as_given))


# -- all settings -------------------------------------------------------------------------


@attrs.frozen
class Setting:
    """The definition of a setting: its name, group and field.

    Attributes:
        name: Name of the setting in Python and ``pyproject.toml``.
        group: The group of the setting: ``dispatch`` (DispatchConfig), ``runner`` (GraphRunner),
            ``plugins`` or ``costs``.
        field: The attrs field that defines the setting.
    """

    name: str
    group: str
    field: attrs.Attribute[Any]

    @property
    def about(self) -> SettingInfo:
        """The setting's help text, and the function that reads its value from text."""
        about: SettingInfo = self.field.metadata[ABOUT]
        return about

    @property
    def help(self) -> str:
        """Help text of the setting: one sentence."""
        return self.about.help

    @property
    def derived(self) -> str:
        """Text that describes a derived default; empty if the default is a plain value."""
        return self.about.derived

    @property
    def default(self) -> Any:
        """The default value; None if it is derived."""
        return default_of(self.field)

    @property
    def variable(self) -> str:
        """Name of the environment variable for the setting."""
        return PREFIX + self.name.upper()

    def check(self, value: Any) -> Any:
        """Convert and validate a value, which may be text.

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
"""All environment variables that dispatchkit and its distributions read."""

# Runner settings that are arguments of GraphRunner. The others are fields of RunnerOptions or of
# one of its groups, such as CaptureOptions.
_ARGUMENTS = names_of(RunnerArguments)


# -- the result ---------------------------------------------------------------------------


@attrs.frozen
class SettingValue:
    """The value of a setting, and its source.

    Attributes:
        value: The validated value.
        source: Where the value comes from, as text.
        place: The kind of source: ``default``, ``file``, ``environment`` or ``call``.
    """

    value: Any
    source: str
    place: str


@attrs.frozen
class Settings:
    """The settings in effect, each with its source.

    Attributes:
        given: The values given for each setting, by its name. The first value of a setting
            overrides the others.
        file: The TOML file that was read, or None.
    """

    given: Mapping[str, tuple[SettingValue, ...]] = attrs.field(factory=dict)
    file: Path | None = None

    def __getitem__(self, name: str) -> Any:
        return self.lookup(name).value

    def is_given(self, name: str) -> bool:
        """Return whether any source gives a value for the setting."""
        return bool(self.given.get(_known(name).name))

    def lookup(self, name: str) -> SettingValue:
        """Return a setting's value or default, with the source.

        Raises:
            UnknownNameError: The setting does not exist.
        """
        known = _known(name)
        found = self.given.get(name)
        return found[0] if found else SettingValue(known.default, "default", "default")

    def chosen(self, group: str) -> dict[str, Any]:
        """Return the values given for the settings of a group, by name."""
        return {
            name: found[0].value
            for name, found in self.given.items()
            if found and SETTINGS[name].group == group
        }

    def dispatch_config(self, **unless_given: Any) -> DispatchConfig:
        """Create a DispatchConfig from the settings.

        Args:
            unless_given: Values for settings that no source gives.

        Raises:
            ConfigError: Settings contradict each other. The notes of the error state the sources.
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
                    error.add_note(f"{name} comes from {self.lookup(name).source}.")
            raise

    def options(self, config: DispatchConfig | None = None) -> RunnerOptions:
        """Create RunnerOptions from the settings.

        Args:
            config: The configuration; by default ``dispatch_config()``.
        """
        chosen = self.chosen("runner")
        plain = {name: value for name, value in chosen.items() if name not in _ARGUMENTS}
        config = self.dispatch_config() if config is None else config
        return attrs.evolve(with_settings(RunnerOptions(), plain), config=config)

    def runner_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for GraphRunner.

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
        """Return keyword arguments for ``load_plugins``.

        If any source gives a plugin setting, the environment has already been taken into account,
        so the arguments make ``load_plugins`` ignore the environment.
        """
        found: dict[str, Any] = {"allow": self["plugins"], "block": self["disable"] or None}
        return {**found, "environ": {}} if self.chosen("plugins") else found

    def disagreements(self) -> tuple[str, ...]:
        """Describe settings whose values in the file and the environment differ.

        One of the two values may have been forgotten. Settings that the call or command line
        overrides are not included.
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
        """Return every setting with its value, source and overridden values, for JSON."""
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
    """Convert a value to JSON-compatible types."""
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
    """Return a value in TOML notation."""
    value = plain(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{_key(name)} = {shown(one)}" for name, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False, default=str)


def _key(name: str) -> str:
    """Return a TOML key, quoted if necessary."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


# -- sources ------------------------------------------------------------------------------


def load_settings(
    given: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
    start: str | os.PathLike[str] | None = None,
    sources: Mapping[str, str] | None = None,
    **more: Any,
) -> Settings:
    """Load settings from the call, the environment and ``pyproject.toml``.

    The call overrides the environment, which overrides the file.

    Args:
        given: Settings given in the call, by name. A value of None counts as not given.
        more: Additional settings given in the call, as keyword arguments.
        environ: Environment variables; by default those of the process.
        file: The TOML file to read. By default the file named in DISPATCHKIT_CONFIG, or else the
            nearest ``pyproject.toml`` with a table ``[tool.dispatchkit]``.
        start: The folder where the upward search for ``pyproject.toml`` begins; by default the
            current folder.
        sources: Sources of the values given in the call, as text for messages, by name of the
            setting. The default source is ``the argument NAME``.

    Raises:
        UnknownNameError: A setting does not exist. The message lists the closest names.
        ConfigError: A value is invalid, or the file cannot be read or is not TOML. Also raised if
            ``file`` or DISPATCHKIT_CONFIG names a file without a table ``[tool.dispatchkit]``.
    """
    for name, one in (("given", given), ("environ", environ), ("sources", sources)):
        if one is not None and not isinstance(one, Mapping):
            raise ConfigError(name, one, "a dictionary of values by name, or None")
    for name, path_given in (("file", file), ("start", start)):
        if path_given is not None:
            check_path(path_given, name)
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
            error.add_note(f"This setting comes from {source}.")
        raise error
    return setting


def _checked_value(name: str, value: Any, source: str, place: str) -> SettingValue:
    setting = _known(name, source)
    try:
        with warnings.catch_warnings():
            # The warning is issued once, when the DispatchConfig is created.
            warnings.simplefilter("ignore", CaptureSizeWarning)
            return SettingValue(setting.check(value), source, place)
    except ConfigError as error:
        error.add_note(f"The value comes from {source}.")
        raise


def _from_environment(environ: Mapping[str, str]) -> dict[str, SettingValue]:
    found = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in _NO_SETTINGS:
            continue
        name = variable.removeprefix(PREFIX).lower()
        source = f"the environment variable {variable}"
        # An empty variable counts as unset, except for plugin lists, which may be empty.
        if text.strip() or _known(name, source).group == "plugins":
            found[name] = _checked_value(name, text, source, "environment")
    return found


def _read_file(
    file: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    start: str | os.PathLike[str] | None,
) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the file and its [tool.dispatchkit] table; (None, {}) if no file has the table."""
    wanted = file or environ.get(FILE_VARIABLE) or None
    if wanted is not None:
        path = Path(wanted)
        try:
            return path, _required_table(path)
        except ConfigError as error:
            if not file:
                error.add_note(f"The path comes from the environment variable {FILE_VARIABLE}.")
            raise
    try:
        here = Path(start or Path.cwd()).absolute()
    except FileNotFoundError:  # the current folder was deleted
        return None, {}
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            table = _table(path)
            if table is not None:
                return path, table
    return None, {}


def _required_table(path: Path) -> Mapping[str, Any]:
    table = _table(path)
    if table is None:
        raise ConfigError(
            "configuration file",
            str(path),
            "a TOML file with a table [tool.dispatchkit]",
            message=f"Configuration file {str(path)!r} has no table [tool.dispatchkit]. Add the "
            "table, or choose a different file.",
        )
    return table


def _table(path: Path) -> Mapping[str, Any] | None:
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            "configuration file",
            str(path),
            "a file that can be read",
            message=f"Configuration file {str(path)!r} cannot be read: {error.strerror}. Check the "
            "path.",
        ) from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(
            "configuration file",
            str(path),
            f"at most {_MAX_FILE_BYTES} bytes",
            message=f"Configuration file {str(path)!r} is larger than the limit of "
            f"{_MAX_FILE_BYTES:,} bytes. Choose a different file.",
        )
    try:
        data = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "configuration file",
            str(path),
            "TOML",
            "Correct the file.",
            message=f"Configuration file {str(path)!r} is not valid TOML: {error}.",
        ) from error
    tools = data.get("tool", {})
    table = tools.get("dispatchkit") if isinstance(tools, Mapping) else None
    if table is not None and not isinstance(table, Mapping):
        raise ConfigError("tool.dispatchkit", table, f"a table in {path}")
    return table
