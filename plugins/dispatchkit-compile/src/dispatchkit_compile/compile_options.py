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

#: Modes of inductor, which people may pass out of habit.
_MODES_OF_INDUCTOR = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: Options that have another place, and where that is.
_ELSEWHERE = {
    "skip_guards": "Give dispatchkit_compile.compile(skip_guards=True), or "
    "the option guard_filter_fn=torch.compiler.skip_all_guards_unsafe of torch.compile itself.",
    "dynamic": "It is an argument of torch.compile itself; better is to mark the batch "
    "dimension, as dispatchkit_compile.compile does.",
    "fullgraph": "It is an argument of torch.compile itself.",
    "backend": "The device's backend is the option device_backend.",
}


def _optional_mode(value: Any) -> CUDAGraphMode | None:
    if value is None or isinstance(value, CUDAGraphMode):
        return value
    if value in _MODES_OF_INDUCTOR:
        raise ConfigError(
            "mode",
            value,
            f"one of {', '.join(CUDAGraphMode.__members__)}",
            "Modes of inductor do not apply here; piece_compiler='inductor' compiles the pieces.",
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
    """What can be set.

    Attributes:
        at: What runs eager between graphs: as for ``split_module``.
        mode: Which runtime modes decode and mixed batches use; by default
            FULL_AND_PIECEWISE for a graph that is split and FULL for one that is not.
        support: For which batches the whole may be captured, beside what its operators state.
        fill: What rows without a token hold, by the name of the argument; others hold zeros.
            A graph that writes a buffer or cache is captured only if this is given: what it
            writes for these rows must do no harm (``{}`` if it writes nothing for them).
        sizes: Capture sizes in rows, by default derived from ``max_num_tokens``.
        max_num_tokens: Largest batch that graphs may serve; larger ones run plainly.
        policy: Name of the policy, or an object.
        device_backend: What captures: ``auto``, a backend's name, or an object.
        outputs: ``owned`` or ``view``.
        lazy: Capture a size when it is first needed; otherwise all in the first call.
        piece_compiler: Compiles each graph piece: ``"inductor"``, another backend of
            ``torch.compile``, or a function of a graph and the fake values of its arguments.
        options: Further settings of the runner; with ``strict`` a step that cannot be served by
            a graph raises.
        name: What graphs are called in messages, before a number.

    Raises:
        ConfigError: An option has a value that cannot be used.
        UnknownNameError: There is no option, mode or compiler of a name.
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
            raise ConfigError("fill", fill, "a dict of values by the name of an argument")
        if self.sizes is not None:
            set_(self, "sizes", tuple(self.sizes))

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, mode: Any = None) -> CompileOptions:
        """Return the options of a call of ``torch.compile``.

        Args:
            options: Its ``options``.
            mode: Its ``mode``, which may stand for the option of that name.

        Raises:
            ConfigError: They are no mapping, a setting belongs into ``options`` among them, or
                mode is given twice.
            UnknownNameError: There is no option of a name; it names the nearest.
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
