"""The options of ``torch.compile(model, backend="dispatchkit", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import (
    AttentionSupport,
    CUDAGraphMode,
    check_capture_sizes,
    check_count,
    check_flag,
    check_instance,
)
from dispatchkit.options import RunnerOptions, refuse_moved

from dispatchkit_compile.split import SplitRules

__all__ = ["CompileOptions"]

#: Inductor's modes, which this backend rejects with a hint.
_INDUCTOR_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: Options that must be passed elsewhere, with a hint for each.
_MISPLACED = {
    "skip_guards": "Use dispatchkit_compile.compile(skip_guards=True), or pass "
    "guard_filter_fn=torch.compiler.skip_all_guards_unsafe in the options of torch.compile.",
    "dynamic": "With torch.compile, pass dynamic outside `options`. With "
    "dispatchkit_compile.compile, omit it: only the batch dimension is marked as dynamic.",
    "fullgraph": "Pass it to torch.compile itself, outside `options`.",
    "backend": "To select the capture backend, use the option device_backend.",
}


def _optional_mode(value: Any) -> CUDAGraphMode | None:
    if value is None or isinstance(value, CUDAGraphMode):
        return value
    if value in _INDUCTOR_MODES:
        raise ConfigError(
            "mode",
            value,
            f"one of {', '.join(CUDAGraphMode.__members__)}",
            f"{value!r} is an inductor mode. To compile the pieces, pass "
            "piece_compiler='inductor'.",
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
        hint = "A function that compiles a graph is also allowed."
        raise UnknownNameError("piece_compiler", value, known, hint)


def _runner_options(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    check_instance(value, RunnerOptions, attribute.name)


@attrs.frozen(kw_only=True)
class CompileOptions:
    """Options of the ``torch.compile`` backend.

    Attributes:
        at: Operators, modules and functions that run eager between graphs; see ``split_module``.
        mode: Runtime modes of decode and mixed batches. The default is FULL_AND_PIECEWISE for a
            Dynamo graph that is split, and FULL for one that is not.
        support: Kinds of batches for which a whole Dynamo graph is captured. Its operators may
            restrict these kinds further.
        fill: Fill values of padding rows by argument name; 0 by default. If a Dynamo graph for
            varying batch sizes writes a buffer or cache, all its steps run eager unless ``fill`` is
            set.
            Choose values for which the writes of padding rows are harmless, or pass ``{}`` if
            padding rows write nothing.
        sizes: Capture sizes in rows; derived from ``max_num_tokens`` by default.
        max_num_tokens: Largest batch that graphs serve; larger batches run eager. By default, the
            largest of ``sizes``; 512 if ``sizes`` is also omitted.
        policy: The policy of the runner, or its name.
        device_backend: The capture backend: ``auto``, a name or an instance.
        outputs: ``owned`` (results belong to the caller) or ``view`` (results are valid until the
            next replay).
        lazy: Whether to capture each size when it is first needed. If False, the first call
            captures all sizes.
        piece_compiler: Compiler of the graph pieces: ``"inductor"``, the name of another
            ``torch.compile`` backend, or a function that takes a graph and the fake values of its
            arguments and returns a callable. By default, pieces are not compiled.
        options: Further settings of the runner. With ``strict``, a step that no graph can serve
            raises an error.
        name: Prefix of graph names in messages, followed by a number.

    Raises:
        ConfigError: An option has an invalid value.
        UnknownNameError: No mode, support level or compiler has the given name.
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
            set_(self, "sizes", check_capture_sizes(self.sizes))
        if self.max_num_tokens is not None:
            set_(self, "max_num_tokens", check_count(self.max_num_tokens, "max_num_tokens"))
        if self.outputs not in ("owned", "view"):
            raise ConfigError("outputs", self.outputs, "'owned' or 'view'")
        check_instance(self.name, str, "name")

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, mode: Any = None) -> CompileOptions:
        """Return the options of a ``torch.compile`` call.

        Args:
            options: The ``options`` argument of the call.
            mode: The ``mode`` argument of the call; sets the option ``mode``.

        Raises:
            ConfigError: ``options`` is not a mapping or contains a field of ``RunnerOptions``,
                or the mode is given twice.
            UnknownNameError: No option has the given name; the error suggests similar names.
        """
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError("options", options, "a dict of options by name")
        given = dict(options or {})
        refuse_moved(given)
        known = [field.name for field in attrs.fields(cls)]
        for name in given:
            if name not in known:
                hint = _MISPLACED.get(name, "")
                raise UnknownNameError(
                    "option", str(name), known, hint, owner="The backend 'dispatchkit'"
                )
        if mode is not None:
            if given.get("mode") is not None:
                raise ConfigError(
                    "mode",
                    mode,
                    "passed only once, as mode= or in the options",
                    "Pass it only once.",
                    message=f"mode is passed as mode={mode!r} and in the options, as "
                    f"{given['mode']!r}.",
                )
            given["mode"] = mode
        return cls(**given)
