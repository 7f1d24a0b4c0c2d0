"""Policies for vLLM's first model runner and its ``CudagraphDispatcher``.

A subclass of vLLM's class asks the policy first, and falls back to vLLM's class if the policy does
not decide. Only the runner's dispatcher is replaced; drafters keep vLLM's class.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dispatchkit import Batch, BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.keys import CUDAGraphMode, allowed_modes_code

from dispatchkit_vllm.engine.controller import StepController, as_dummy_run, settings_of
from dispatchkit_vllm.facade import _config

__all__ = ["DISPATCHER", "MODULE", "attach", "detach", "dispatcher_class", "unsupported_reason"]

MODULE = "vllm.v1.worker.gpu_model_runner"
DISPATCHER = "CudagraphDispatcher"
RUNNER = "vLLM's first model runner"

_COMMON_ARGUMENTS = {"self", "num_tokens", "uniform_decode", "has_lora", "num_active_loras"}
#: Arguments that disable FULL graphs: the first in 0.12, the second in 0.13 to 0.16.
_FLAGS = ("use_cascade_attn", "disable_full")
#: Arguments for sets of modes, from 0.17 on.
_SETS = {"valid_modes", "invalid_modes"}
_STEP = "_determine_batch_execution_and_padding"


def unsupported_reason(original: Any) -> str:
    """Return why a dispatcher class is not supported, or ""."""
    names = ("dispatch", "initialize_cudagraph_keys")
    missing = [name for name in names if not callable(getattr(original, name, None))]
    if missing:
        return f"its {DISPATCHER} has no {' and no '.join(missing)}"
    takes = set(inspect.signature(original.dispatch).parameters)
    if "num_tokens" not in takes:
        return f"its {DISPATCHER}.dispatch takes a padded descriptor, as in releases before 0.12"
    ways = [flag for flag in _FLAGS if flag in takes] + [*(["sets"] if takes >= _SETS else [])]
    unknown = takes - _COMMON_ARGUMENTS - _SETS - set(_FLAGS)
    if unknown or len(ways) != 1:
        shown = ", ".join(sorted(takes - {"self"}))
        return f"its {DISPATCHER}.dispatch has an unsupported combination of arguments ({shown})"
    return ""


def attach(module: ModuleType) -> None:
    """Make a module's runner create dispatchkit's dispatcher if the settings request it."""
    current = getattr(module, DISPATCHER)
    original = getattr(current, "replaces", current)

    @functools.wraps(original, updated=())
    def build(vllm_config: Any, *args: Any, **options: Any) -> Any:
        settings = settings_of(vllm_config)
        if settings.is_empty or unsupported_reason(original):
            return original(vllm_config, *args, **options)
        _patch_runner(module)
        return dispatcher_class(original)(vllm_config, *args, **options)

    build.replaces = original  # type: ignore[attr-defined]
    setattr(module, DISPATCHER, build)


def detach(module: ModuleType) -> None:
    """Restore vLLM's own dispatcher for new runners."""
    current = getattr(module, DISPATCHER)
    setattr(module, DISPATCHER, getattr(current, "replaces", current))


@functools.cache
def dispatcher_class(original: type[Any]) -> type[Any]:
    """Return a subclass of vLLM's dispatcher that asks a policy first."""
    takes = inspect.signature(original.dispatch).parameters
    base = _set_dispatch if takes.keys() >= _SETS else _flag_dispatch
    flag = next((flag for flag in _FLAGS if flag in takes), "")
    counts = "num_active_loras" in takes

    class PolicyDispatcher(original):  # type: ignore[misc]
        """vLLM's dispatcher, extended to ask a dispatchkit policy first."""

        def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
            super().__init__(vllm_config, *args, **options)
            self.controller = StepController(settings_of(vllm_config), vllm_config, RUNNER)

        def initialize_cudagraph_keys(self, cudagraph_mode: Any, *args: Any, **options: Any) -> Any:
            """Register vLLM's keys, then install the policy for them."""
            super().initialize_cudagraph_keys(cudagraph_mode, *args, **options)
            _install(self, original, CUDAGraphMode.parse(cudagraph_mode), flag, counts)

        dispatch = base(original, flag, counts)

    PolicyDispatcher.__name__ = PolicyDispatcher.__qualname__ = "PolicyDispatcher"
    return PolicyDispatcher


# -- dispatch, by release ---------------------------------------------------------------


def _set_dispatch(original: Any, flag: str, counts: bool) -> Callable[..., Any]:
    """Return ``dispatch`` for releases from 0.17 on, where it takes sets of modes."""

    def dispatch(
        self: Any,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: Any = None,
        invalid_modes: Any = None,
    ) -> Any:
        if self.controller.is_open and num_tokens <= self._largest:
            ceiling = 2
            if valid_modes or invalid_modes:
                ceiling = _ceiling(valid_modes, invalid_modes)
            kind = 1 if uniform_decode and self._separates else 0
            case = self._case(has_lora, num_active_loras) if has_lora else 0
            found = (
                None if case is None else self.controller.ask(num_tokens, 0, kind, case, ceiling)
            )
            if found is not None:
                return found.result
        return original.dispatch(
            self, num_tokens, uniform_decode, has_lora, num_active_loras, valid_modes, invalid_modes
        )

    return dispatch


def _flag_dispatch(original: Any, flag: str, counts: bool) -> Callable[..., Any]:
    """Return ``dispatch`` for releases up to 0.16, where a flag disables FULL graphs."""

    def dispatch(
        self: Any,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        *switch: bool,
        **options: Any,
    ) -> Any:
        loras = options.get("num_active_loras", int(has_lora))
        if self.controller.is_open and num_tokens <= self._largest:
            is_off = switch[0] if switch else options.get(flag, False)
            kind = 1 if uniform_decode and self._separates else 0
            case = self._case(has_lora, loras) if has_lora else 0
            ceiling = 1 if is_off else 2
            found = (
                None if case is None else self.controller.ask(num_tokens, 0, kind, case, ceiling)
            )
            if found is not None:
                return found.result
        return original.dispatch(self, num_tokens, uniform_decode, has_lora, *switch, **options)

    return dispatch


def _ceiling(valid: Any, invalid: Any) -> int:
    names = {mode.name for mode in valid} if valid else {"NONE", "PIECEWISE", "FULL"}
    names -= {mode.name for mode in invalid or ()}
    return allowed_modes_code(frozenset(RuntimeMode[name] for name in names))


# -- setup ------------------------------------------------------------------------------


def _install(
    dispatcher: Any, original: type[Any], mode: CUDAGraphMode, flag: str, counts: bool
) -> None:
    config = dispatcher.vllm_config
    defined = sys.modules[original.__module__]
    modes = {each: getattr(defined.CUDAGraphMode, each.name) for each in RuntimeMode}
    query_len = int(dispatcher.uniform_decode_query_len)
    graphs: dict[GraphKey, Any] = {}
    for each in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
        for descriptor in dispatcher.cudagraph_keys[modes[each]]:
            graphs[_key(each, descriptor, query_len, counts)] = (modes[each], descriptor)
    cases = sorted({key.descriptor.num_active_loras for key in graphs} - {0})
    dispatcher._largest = max((key.num_tokens for key in graphs), default=0)  # noqa: SLF001
    dispatcher._case = lambda has_lora, count: next(  # noqa: SLF001
        (case for case in cases if has_lora and 0 < count <= case), None
    )
    own = original.dispatch
    dispatcher._separates = any(  # noqa: SLF001
        _distinguishes_uniform(dispatcher, own, count)
        for count in range(1, dispatcher._largest + 1)  # noqa: SLF001
    )

    def ask(batch: Batch) -> GraphKey | None:
        loras = batch.num_active_loras
        options: dict[str, Any] = {"num_active_loras": loras} if counts else {}
        if flag:
            options[flag] = not batch.allows(RuntimeMode.FULL)
        else:
            options["invalid_modes"] = {modes[one] for one in RuntimeMode if not batch.allows(one)}
        found, descriptor = own(dispatcher, batch.num_tokens, batch.uniform, loras > 0, **options)
        if found == modes[RuntimeMode.NONE]:
            return None
        return _key(RuntimeMode[found.name], descriptor, query_len, counts)

    dispatcher.controller.install(
        mode,
        graphs,
        facts=lambda: {
            "sizes": tuple(sorted({key.num_tokens for key in graphs})),
            "max_num_tokens": dispatcher._largest,  # noqa: SLF001
            "max_num_seqs": _config.max_num_seqs(config),
            "query_lens": (query_len,),
            "max_loras": max(cases, default=0),
            "specialize_lora": any(not key.descriptor.num_active_loras for key in graphs),
            "specialize_active_loras": len(cases) > 1,
        },
        ask=ask,
        eager=lambda batch, _: (
            modes[RuntimeMode.NONE],
            defined.BatchDescriptor(batch.num_tokens),
        ),
    )


def _distinguishes_uniform(dispatcher: Any, own: Callable[..., Any], num_tokens: int) -> bool:
    """Return whether vLLM's own class distinguishes uniform and mixed batches of a size.

    For some modes, the answer differs between releases.
    """
    mixed = own(dispatcher, num_tokens, False, False)
    try:
        return bool(own(dispatcher, num_tokens, True, False) != mixed)
    except AssertionError:  # the bucket is not a multiple of the query length
        return True


def _key(mode: RuntimeMode, descriptor: Any, query_len: int, counts: bool) -> GraphKey:
    loras = descriptor.num_active_loras if counts else int(descriptor.has_lora)
    uniform = bool(descriptor.uniform)
    return GraphKey(
        mode,
        BatchDescriptor(
            descriptor.num_tokens,
            num_reqs=descriptor.num_reqs,
            uniform=uniform,
            num_active_loras=int(loras),
            query_len=query_len if uniform else 0,
        ),
    )


# -- the runner's steps -----------------------------------------------------------------


def _patch_runner(module: ModuleType) -> None:
    """Patch the runner class to open and close steps, mark dummy runs and time forward passes."""
    runner = module.GPUModelRunner
    if hasattr(runner, "dispatchkit_patched"):
        return
    runner.dispatchkit_patched = True
    setattr(runner, _STEP, _in_step(getattr(runner, _STEP)))
    runner._dummy_run = as_dummy_run(runner._dummy_run, _controller_of)  # noqa: SLF001 - vLLM's name
    runner._model_forward = _timed(runner._model_forward)  # noqa: SLF001


def _controller_of(runner: Any) -> StepController | None:
    return getattr(getattr(runner, "cudagraph_dispatcher", None), "controller", None)


def _in_step(own: Any) -> Any:
    signature = inspect.signature(own)

    @functools.wraps(own)
    def determine(self: Any, *args: Any, **options: Any) -> Any:
        controller = _controller_of(self)
        if controller is None or controller.is_dummy:
            return own(self, *args, **options)
        controller.open()
        try:
            found = own(self, *args, **options)
        finally:
            controller.is_open = False
        if controller.log is not None or controller.counts is not None:
            facts = options if not args else signature.bind(self, *args, **options).arguments
            tokens, reqs = facts["num_tokens"], int(facts["num_reqs"])
            longest = int(facts["max_num_scheduled_tokens"])
            uniform = longest == self.uniform_decode_query_len and tokens == reqs * longest
            active = getattr(self, "input_batch", None)
            loras = len(getattr(active, "lora_id_to_lora_request", ()))
            if controller.log is not None:
                controller.log.add(tokens, reqs, uniform, loras)
            if controller.counts is not None:
                mode, descriptor = found[:2]
                reason = controller.reason_of((mode, descriptor))
                controller.counts.add(mode.name, reason, tokens, descriptor.num_tokens)
        return found

    return determine


def _timed(own: Any) -> Any:
    @functools.wraps(own)
    def model_forward(self: Any, *args: Any, **options: Any) -> Any:
        controller = _controller_of(self)
        timer = None if controller is None else controller.timer
        if timer is None or controller is None or controller.is_dummy:
            return own(self, *args, **options)
        return timer.run(controller.take_answer(), functools.partial(own, self, *args, **options))

    return model_forward
