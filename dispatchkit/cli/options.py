"""Options shared by several commands, and the settings and plugins derived from them.

Every option declares its flags and metavar, because different versions of typer derive different
names.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from dispatchkit.cli.output import print_stderr, report_skipped_plugins, short_origin
from dispatchkit.distributions import DEFAULT_POLICY, load_attribute
from dispatchkit.errors import ConfigError, MissingDistributionError, shortened
from dispatchkit.settings import SETTINGS, Settings, load_settings, shown

__all__ = [
    "COMMON",
    "AxesOption",
    "BackendOption",
    "CostModelOption",
    "MaxLorasOption",
    "MaxNumSeqsOption",
    "MaxNumTokensOption",
    "ModeOption",
    "PolicyOption",
    "QueryLensOption",
    "SizesOption",
    "TraceArgument",
    "dispatcher_of",
    "forget_plugins",
    "load_installed_plugins",
    "policy_name",
    "settings_of",
]

if TYPE_CHECKING:
    from dispatchkit.dispatch import Dispatcher
    from dispatchkit.keys import DispatchConfig
    from dispatchkit.plugins import PluginSet


@attrs.define
class Common:
    """Options given before the command.

    Attributes:
        config_file: The TOML file to read.
        sets: ``NAME=VALUE`` pairs given with ``--set``.
    """

    config_file: Path | None = None
    sets: tuple[str, ...] = ()


COMMON = Common()
"""The options given before the running command; set by the application."""


def setting_option(name: str, *flags: str, metavar: str, autocompletion: Any = None) -> Any:
    """Return the command-line option of a setting; the setting parses the given text."""
    setting = SETTINGS[name]
    default = shown(setting.default).strip('"') if setting.default is not None else setting.derived
    return typer.Option(
        *flags,
        metavar=metavar,
        help=f"{setting.help.removesuffix('.')} (default: {default}).",
        show_default=False,
        autocompletion=autocompletion,
        rich_help_panel="Settings",
    )


def complete_policies(incomplete: str) -> list[str]:
    """Return the names of installed policies that start with a prefix, for shell completion."""
    return [name for name in load_installed_plugins().policies if name.startswith(incomplete)]


def complete_modes(incomplete: str) -> list[str]:
    """Return the names of modes that start with a prefix, for shell completion."""
    from dispatchkit.keys import CUDAGraphMode

    names = [name for name in CUDAGraphMode.__members__ if name.startswith(incomplete.upper())]
    # Keep the case of the typed text, because shells discard completions that do not start with it.
    return names if incomplete == incomplete.upper() else [name.lower() for name in names]


def complete_cost_models(incomplete: str) -> list[str]:
    """Return the names of built-in cost models that start with a prefix, for shell completion."""
    try:
        models = load_attribute("BUILTIN_COST_MODELS")
    except MissingDistributionError:
        return []
    return [name for name in models if name.startswith(incomplete)]


PolicyOption = Annotated[
    str | None,
    setting_option("policy", "--policy", metavar="NAME", autocompletion=complete_policies),
]
ModeOption = Annotated[
    str | None, setting_option("mode", "--mode", metavar="MODE", autocompletion=complete_modes)
]
SizesOption = Annotated[str | None, setting_option("sizes", "--sizes", metavar="A,B,...")]
MaxNumTokensOption = Annotated[
    str | None, setting_option("max_num_tokens", "--max-num-tokens", metavar="N")
]
MaxNumSeqsOption = Annotated[
    str | None, setting_option("max_num_seqs", "--max-num-seqs", metavar="N")
]
QueryLensOption = Annotated[
    str | None, setting_option("query_lens", "--query-len", "--query-lens", metavar="A,B,...")
]
MaxLorasOption = Annotated[str | None, setting_option("max_loras", "--max-loras", metavar="N")]
AxesOption = Annotated[str | None, setting_option("axes", "--axes", metavar="NAME=A,B;...")]
BackendOption = Annotated[
    str | None, setting_option("backend", "--device", "--backend", metavar="DEVICE")
]
CostModelOption = Annotated[
    str | None,
    setting_option(
        "cost_model", "--cost-model", metavar="NAME|FILE", autocompletion=complete_cost_models
    ),
]
TraceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="A step trace, a histogram of sizes, or a log with vLLM's cudagraph statistics.",
    ),
]

_FLAGS = {
    "sizes": "--sizes",
    "query_lens": "--query-len",
    "backend": "--device",
}


def policy_name(settings: Settings, plugins: PluginSet, config: DispatchConfig) -> str:
    """Return the given policy name, the name that a plugin selects, or the default."""
    return str(settings["policy"] or plugins.select_policy(config) or DEFAULT_POLICY)


def settings_of(given: Mapping[str, Any] | None = None) -> Settings:
    """Return settings from the command line, environment and ``pyproject.toml``.

    Args:
        given: Values of the command's options, by setting name; None if not given.

    Raises:
        ConfigError: A value is invalid, or given twice on the command line.
    """
    values = {name: value for name, value in (given or {}).items() if value is not None}
    sources = {name: f"option {_FLAGS.get(name, '--' + name.replace('_', '-'))}" for name in values}
    for pair in COMMON.sets:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError("--set", pair, "NAME=VALUE")
        name = name.strip().replace("-", "_")
        if name in values:
            raise ConfigError(
                name,
                value,
                "given once on the command line",
                message=f"{name} is given twice: with {sources[name]}, and with option --set "
                f"{shortened(pair)}. Omit one of them.",
            )
        values[name], sources[name] = value, f"option --set {name}"
    settings = load_settings(values, sources=sources, file=COMMON.config_file)
    for sentence in settings.disagreements():
        print_stderr(f"Note: {sentence}")
    return settings


def dispatcher_of(settings: Settings, config: DispatchConfig) -> Dispatcher:
    """Return a dispatcher that treats all graphs of the chosen policy as captured."""
    from dispatchkit.dispatch import Dispatcher

    plugins = load_installed_plugins(settings)
    report_skipped_plugins(plugins)
    name = policy_name(settings, plugins, config)
    rule = plugins.create_policy(name, **settings["policy_options"])
    origin = short_origin(plugins.get_policy(name).origin)
    may_split = settings["rows_independent"]
    return Dispatcher(rule, config, lazy=True, may_split=may_split, origin=origin)


def load_installed_plugins(settings: Settings | None = None) -> PluginSet:
    """Return the installed plugins that the settings allow; load them only once.

    Args:
        settings: Settings that contain ``plugins`` and ``disable``; by default, the result of
            ``settings_of()``.

    Raises:
        ConfigError: The settings are invalid.
    """
    if settings is None:
        settings = settings_of()
    return _load(settings["plugins"], settings["disable"], bool(settings.chosen("plugins")))


@functools.cache
def _load(allow: tuple[str, ...] | None, block: tuple[str, ...], is_whole: bool) -> PluginSet:
    from dispatchkit.plugins import load_plugins

    # Commands report skipped plugins themselves, so the log records must not be printed.
    log = logging.getLogger("dispatchkit.plugins")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    # Plugin settings, if given, already include the values from the environment.
    return load_plugins(allow=allow, block=block or None, environ={} if is_whole else None)


def forget_plugins() -> None:
    """Clear the cache of ``load_installed_plugins``."""
    _load.cache_clear()
