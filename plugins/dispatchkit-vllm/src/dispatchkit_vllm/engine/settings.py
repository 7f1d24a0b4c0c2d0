"""Settings of dispatchkit inside vLLM, from the environment and ``additional_config``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.settings import VARIABLES

__all__ = ["OPTIONS", "EngineSettings"]

_PREFIX = "DISPATCHKIT_"
#: Key of these settings in ``additional_config``.
OPTIONS = "dispatchkit"
_OPTIONS = 'a JSON object or a dict with str keys, such as {"max_tokens": 64}'

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def _options(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except ValueError as error:
            raise ConfigError(
                "policy_options", value, _OPTIONS, f"The JSON error is: {error}."
            ) from error
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError("policy_options", value, _OPTIONS)
    return dict(value)


def _flag(value: Any) -> bool:
    word = str(value).strip().lower()
    if isinstance(value, bool) or word in _TRUE | _FALSE:
        return bool(value) if isinstance(value, bool) else word in _TRUE
    raise ConfigError("strict", value, "true or false")


def _text(value: Any) -> str:
    return str(value).strip()


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Settings of dispatchkit inside vLLM.

    A setting ``name`` is read from ``DISPATCHKIT_NAME`` in the environment, or from ``name`` under
    ``dispatchkit`` in vLLM's ``additional_config``. ``additional_config`` takes precedence.

    Attributes:
        policy: Name of the policy that decides; empty for vLLM's own dispatcher.
        policy_options: Options that the policy is created with, as a dict or as the text of a JSON
            object.
        strict: Whether to fail at startup if the configured policy cannot act, or if steps cannot
            be recorded or counted. If false, a warning is logged instead.
        trace: File to record steps to; empty to disable recording.
        metrics: Port or text file for Prometheus metrics; empty to disable them.

    Raises:
        ConfigError: A setting has an invalid value.
    """

    policy: str = attrs.field(default="", converter=_text)
    policy_options: dict[str, Any] = attrs.field(factory=dict, converter=_options)
    strict: bool = attrs.field(default=False, converter=_flag)
    trace: str = attrs.field(default="", converter=_text)
    metrics: str = attrs.field(default="", converter=_text)

    def __attrs_post_init__(self) -> None:
        if self.policy_options and not self.policy:
            raise ConfigError(
                "policy_options",
                self.policy_options,
                "omitted without a policy",
                "Set the policy in DISPATCHKIT_POLICY or in additional_config.",
            )

    @classmethod
    def read(cls, environ: Mapping[str, str], additional_config: Any = None) -> EngineSettings:
        """Return the settings of a process.

        Args:
            environ: Environment variables.
            additional_config: vLLM's ``additional_config``; ignored unless it is a mapping.

        Raises:
            ConfigError: A setting has an invalid value.
            UnknownNameError: ``additional_config`` or the environment contains an unknown setting.
        """
        names = [field.name for field in attrs.fields(cls)]
        for variable in environ:
            if variable.startswith(_PREFIX) and variable not in VARIABLES:
                raise UnknownNameError(
                    "environment variable",
                    variable,
                    VARIABLES,
                    "Unset it, or correct its name.",
                )
        given: dict[str, Any] = {
            name: environ[_PREFIX + name.upper()]
            for name in names
            if environ.get(_PREFIX + name.upper(), "").strip()
        }
        own = additional_config.get(OPTIONS, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(own, Mapping):
            raise ConfigError(
                f"additional_config[{OPTIONS!r}]",
                own,
                'a dict of settings, such as {"policy": "vllm"}',
            )
        for name in own:
            if name not in names:
                owner = f"additional_config[{OPTIONS!r}]"
                raise UnknownNameError("setting", name, names, owner=owner)
        return cls(**{**given, **own})

    @property
    def is_empty(self) -> bool:
        """Whether policy, trace and metrics are empty, so that vLLM stays unchanged."""
        return not (self.policy or self.trace or self.metrics)
