"""The options of ``torch.compile(model, backend="dispatchkit", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import AttentionSupport, CUDAGraphMode, check_flag
from dispatchkit.options import RunnerOptions, refuse_moved

from dispatchkit_compile.split import SplitRules

__all__ = ["CompileOptions"]

#: Modes of inductor, which users may pass out of habit.
_MODES_OF_INDUCTOR = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: Options that belong elsewhere, and where to pass them instead.
_ELSEWHERE = {
    "skip_guards": "Use dispatchkit_compile.compile(skip_guards=True), or pass "
    "guard_filter_fn=torch.compiler.skip_all_guards_unsafe in the options of torch.compile.",
    "dynamic": "It is an argument of torch.compile itself; prefer to mark the batch "
    "dimension, as dispatchkit_compile.compile does.",
    "fullgraph": "It is an argument of torch.compile itself.",
    "backend": "Use the option device_backend for the device's backend.",
}


def _optional_mode(value: Any) -> CUDAGraphMode | None:
    if value is None or isinstance(value, CUDAGraphMode):
        return value
    if value in _MODES_OF_INDUCTOR:
        raise ConfigError(
            "mode",
            value,
            f"one of {', '.join(CUDAGraphMode.__members__)}",
            "Inductor's modes do not apply; to compile the pieces, use piece_compiler='inductor'.",
        )
    return CUDAGraphMode.parse(value)


def _support(value: Any) -> AttentionSupport:
    return AttentionSupport.parse(value)


def _bool(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    check_flag(value, attribute.name)


def _compiler(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is None or callable(value) or value == "inductor":
        return
    from torch._dynamo import list_backends

    known = [name for name in list_backends(exclude_tags=()) if name != "dispatchkit"]
    if not isinstance(value, str) or value not in known:
        raise UnknownNameError("piece_compiler", str(value), known)


def _runner_options(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, RunnerOptions):
        raise ConfigError(attribute.name, value, "RunnerOptions")


@attrs.frozen(kw_only=True)
class CompileOptions:
    """Options of the ``torch.compile`` backend.

    Attributes:
        at: Operators, modules and functions that run eager between graphs, as for
            ``split_module``.
        mode: Runtime modes of decode and mixed batches; by default FULL_AND_PIECEWISE for a
            graph that is split and FULL for one that is not.
        support: Batches for which the whole graph may be captured; its operators may limit
            this further.
        fill: Values of padding rows, by argument name; 0 for arguments not named. A graph that
            writes a buffer or cache is captured only if this is given, and its writes for
            padding rows must be harmless (``{}`` if it writes nothing for them).
        sizes: Capture sizes in rows; by default derived from ``max_num_tokens``.
        max_num_tokens: Largest batch that graphs may serve; larger ones run eager.
        policy: A policy's name or instance.
        device_backend: The backend that captures: ``auto``, a name or an instance.
        outputs: ``owned`` or ``view``.
        lazy: Capture each size when it is first needed; if False, all in the first call.
        piece_compiler: Compiler of the graph pieces: ``"inductor"``, another backend of
            ``torch.compile``, or a function of a graph and the fake values of its arguments.
        options: Further settings of the runner; with ``strict`` a step that no graph can serve
            raises.
        name: Prefix of the graphs' names in messages; a number follows.

    Raises:
        ConfigError: An option has an invalid value.
        UnknownNameError: An option, a mode or a compiler is unknown.
    """

    at: tuple[Any, ...] = ()
    mode: CUDAGraphMode | None = attrs.field(default=None, converter=_optional_mode)
    support: AttentionSupport = attrs.field(default=AttentionSupport.ALWAYS, converter=_support)
    fill: dict[str, Any] | None = None
    sizes: tuple[int, ...] | None = None
    max_num_tokens: int | None = None
    policy: Any = "vllm"
    device_backend: Any = "auto"
    outputs: str = "owned"
    lazy: bool = attrs.field(default=True, validator=_bool)
    piece_compiler: Any = attrs.field(default=None, validator=_compiler)
    options: RunnerOptions = attrs.field(factory=RunnerOptions, validator=_runner_options)
    name: str = "graph"

    def __attrs_post_init__(self) -> None:
        set_ = object.__setattr__  # the class is frozen
        set_(self, "at", SplitRules(self.at).given)
        fill: Any = self.fill
        if fill is not None and not isinstance(fill, Mapping):
            raise ConfigError("fill", fill, "a dict of values by argument name")
        if self.sizes is not None:
            set_(self, "sizes", tuple(self.sizes))

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, mode: Any = None) -> CompileOptions:
        """Return the options of a call of ``torch.compile``.

        Args:
            options: The call's ``options``.
            mode: The call's ``mode``, which may replace the option ``mode``.

        Raises:
            ConfigError: ``options`` is not a mapping, holds a setting that belongs in its entry
                ``options``, or mode is given twice.
            UnknownNameError: An option is unknown; the error suggests the nearest names.
        """
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError("options", options, "a dict of options by name")
        given = dict(options or {})
        refuse_moved(given)
        known = [field.name for field in attrs.fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownNameError(
                    "option of the dispatchkit backend", str(name), known, _ELSEWHERE.get(name, "")
                )
        if mode is not None:
            if given.get("mode") is not None:
                raise ConfigError("mode", mode, "given once: as mode= or among the options")
            given["mode"] = mode
        return cls(**given)
