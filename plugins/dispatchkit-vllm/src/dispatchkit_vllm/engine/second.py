"""Policies for vLLM's second model runner and its ``ModelCudaGraphManager``.

vLLM itself still captures and replays graphs, and decides for microbatches and speculators.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dispatchkit import Batch, BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm.engine.controller import StepController, as_dummy_run, settings_of
from dispatchkit_vllm.engine.core import Answer
from dispatchkit_vllm.facade import _config

__all__ = ["MANAGER", "MODULE", "attach", "detach", "manager_class", "unsupported_reason"]

MODULE = "vllm.v1.worker.gpu.model_runner"
MANAGER = "ModelCudaGraphManager"
RUNNER = "vLLM's second model runner"

_STEP = "dispatch_cg_and_sync_dp"
_NEEDED = {"num_reqs", "num_tokens", "uniform_token_count"}
#: Arguments that only some releases have. The set changed in 0.24 and in 0.27.
_LATER = {"num_active_loras", "max_query_len", "num_ubatches"}


def unsupported_reason(module: ModuleType) -> str:
    """Return why a module's manager is not supported, or ""."""
    original = getattr(module, MANAGER, None)
    original = getattr(original, "replaces", original)
    if original is None or not callable(getattr(original, "dispatch", None)):
        return "its graph manager has no dispatch, as in releases before 0.20"
    takes = set(inspect.signature(original.dispatch).parameters) - {"self"}
    if not _NEEDED <= takes or takes - _NEEDED - _LATER:
        shown = ", ".join(sorted(takes))
        return f"its {MANAGER}.dispatch has an unsupported combination of arguments ({shown})"
    if not hasattr(module, _STEP):
        return f"its module has no {_STEP}"
    return ""


def attach(module: ModuleType) -> None:
    """Make a module's runner create dispatchkit's manager if the settings request it."""
    if unsupported_reason(module):
        return
    current = getattr(module, MANAGER)
    original = getattr(current, "replaces", current)

    @functools.wraps(original, updated=())
    def build(vllm_config: Any, *args: Any, **options: Any) -> Any:
        if settings_of(vllm_config).is_empty:
            return original(vllm_config, *args, **options)
        _patch_runner(module)
        return manager_class(original)(vllm_config, *args, **options)

    build.replaces = original  # type: ignore[attr-defined]
    setattr(module, MANAGER, build)


def detach(module: ModuleType) -> None:
    """Restore vLLM's own manager for new runners."""
    current = getattr(module, MANAGER, None)
    if current is not None:
        setattr(module, MANAGER, getattr(current, "replaces", current))


@functools.cache
def manager_class(original: type[Any]) -> type[Any]:
    """Return a subclass of vLLM's manager that asks a policy first."""
    takes = inspect.signature(original.dispatch).parameters
    later = [
        name for name in ("num_active_loras", "max_query_len", "num_ubatches") if name in takes
    ]

    class PolicyManager(original):  # type: ignore[misc]
        """vLLM's graph manager, extended to ask a dispatchkit policy first."""

        def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
            super().__init__(vllm_config, *args, **options)
            self.controller = StepController(settings_of(vllm_config), vllm_config, RUNNER)
            self.controller.on_activate = self._apply_policy
            self._model: Any = None
            self._hooks: list[Any] = []
            _install(self, original, later)

        def capture(self, model: Any, *args: Any, **options: Any) -> Any:
            """Capture graphs as vLLM does, then apply the policy to the steps that follow."""
            found = super().capture(model, *args, **options)
            self._model = model
            self._apply_policy()
            return found

        def _apply_policy(self) -> None:
            """Cache the active policy's answers, and measure eager steps if the policy learns."""
            controller, timer = self.controller, self.controller.timer
            # With varying query lengths, `uniform_token_count` does not identify a row.
            if controller.core is not None and not self._varies:
                row = controller.core.dispatcher.row
                controller.rows = {
                    count: {uniform: row(kind, case) for uniform, kind in self._kinds.items()}
                    for count, case in self._cases.items()
                }
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            if timer is not None and hasattr(self._model, "register_forward_hook"):
                self._hooks = [
                    self._model.register_forward_pre_hook(
                        lambda *_: (
                            None if controller.is_dummy else timer.begin(controller.take_answer())
                        )
                    ),
                    self._model.register_forward_hook(lambda *_: timer.end()),
                ]

        def dispatch(
            self,
            num_reqs: int,
            num_tokens: int,
            uniform_token_count: int | None,
            num_active_loras: int = 0,
            max_query_len: int | None = None,
            num_ubatches: int = 1,
        ) -> Any:
            """Return the policy's descriptor, or the descriptor chosen by vLLM's own code."""
            controller = self.controller
            # Minimize memory reads: the model has run since the last call, so the CPU caches are
            # cold.
            if controller.is_open and num_ubatches == 1 and self._graphs_captured:
                answer: Answer | None = None
                if num_tokens <= controller.largest:
                    kinds = controller.rows.get(num_active_loras)
                    if kinds is not None:
                        decision = kinds.get(uniform_token_count, kinds[None])[num_tokens]
                        if num_reqs <= decision.max_num_reqs:
                            answer = decision.plan
                    if answer is not None:
                        controller.is_open = False
                        controller.answer = answer
                    elif num_tokens > 0:
                        kind = self._kind(uniform_token_count, max_query_len)
                        case = self._case(num_active_loras)
                        answer = controller.ask(num_tokens, num_reqs, kind, case, 2)
                    if answer is not None:
                        meant = answer.num_reqs
                        if meant is None or meant == num_reqs:
                            return answer.result
                        return self._eager(num_tokens, num_reqs, answer.batch.num_active_loras)
                elif not num_active_loras:
                    # vLLM would return the same result after a search.
                    return self._eager(num_tokens, num_reqs, 0)
            facts = (num_active_loras, max_query_len, num_ubatches)
            return self._dispatch_own(num_reqs, num_tokens, uniform_token_count, *facts)

        def _dispatch_own(
            self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *facts: Any
        ) -> Any:
            return original.dispatch(
                self, num_reqs, num_tokens, uniform_token_count, *facts[: len(later)]
            )

        def _kind(self, uniform_token_count: int | None, max_query_len: int | None) -> int:
            kinds: dict[int | None, int] = self._kinds
            if not self._varies:
                return kinds.get(uniform_token_count, 0)
            fits = max_query_len is not None and max_query_len <= self.decode_query_len
            return kinds[None] if fits else 0

        def run_fullgraph(self, desc: Any) -> Any:
            """Replay the graph as vLLM does, and measure the step if the policy learns."""
            timer = self.controller.timer
            if timer is None or self.controller.is_dummy:
                return super().run_fullgraph(desc)
            replay = functools.partial(super().run_fullgraph, desc)
            return timer.run(self.controller.take_answer(), replay)

        if hasattr(original, "run_pw_graph"):

            def run_pw_graph(self, *args: Any, **options: Any) -> Any:
                """Run piecewise graphs as vLLM does, and measure the step if the policy learns."""
                timer = self.controller.timer
                if timer is None or self.controller.is_dummy:
                    return super().run_pw_graph(*args, **options)
                replay = functools.partial(super().run_pw_graph, *args, **options)
                # The model's hook may end the measurement; it is then not ended again.
                return timer.run(self.controller.take_answer(), replay)

    PolicyManager.__name__ = PolicyManager.__qualname__ = "PolicyManager"
    return PolicyManager


def _descriptor_type(original: type[Any]) -> Any:
    return sys.modules[original.__module__].BatchExecutionDescriptor


def _install(manager: Any, original: type[Any], later: list[str]) -> None:
    config, mode = manager.vllm_config, CUDAGraphMode.parse(manager.cudagraph_mode)
    make = _descriptor_type(original)
    modes = sys.modules[original.__module__].CUDAGraphMode
    graphs = {
        _key(descriptor): descriptor
        for descriptors in manager._capture_descs.values()  # noqa: SLF001 - vLLM's name
        for descriptor in descriptors
        if getattr(descriptor, "num_ubatches", 1) == 1
    }
    lens = sorted({key.descriptor.query_len for key in graphs if key.descriptor.uniform})
    varies = any(key.descriptor.max_query_len is not None for key in graphs)
    lens = lens or [manager.decode_query_len]
    sizes = {key.num_tokens for key in graphs}
    largest = max(sizes, default=0)
    none, resolve = modes.NONE, getattr(manager, "_resolve_effective_loras", None)

    eager = manager._eager = _make_eager_factory(make, none)  # noqa: SLF001
    manager._varies = varies  # noqa: SLF001
    manager._kinds = {count: 1 + at for at, count in enumerate(lens)}  # noqa: SLF001
    manager._kinds[None] = 1 + len(lens) if varies else 0  # noqa: SLF001
    cases = {key.descriptor.num_active_loras for key in graphs}
    case_of = manager._case = resolve or (lambda count: count)  # noqa: SLF001
    manager._cases = {  # noqa: SLF001
        count: case_of(count)
        for count in range(max(cases, default=0) + 1)
        if case_of(count) in cases
    }
    manager.controller.largest = largest

    def ask(batch: Batch) -> GraphKey | None:
        uniform = batch.query_len if batch.uniform else None
        facts = (batch.num_active_loras, batch.max_query_len, 1)[: len(later)]
        captured, manager._graphs_captured = manager._graphs_captured, True  # noqa: SLF001
        try:
            found = original.dispatch(
                manager, batch.num_reqs or 1, batch.num_tokens, uniform, *facts
            )
        finally:
            manager._graphs_captured = captured  # noqa: SLF001
        key = None if found.cg_mode == none else _key(found)
        return key if key is None or batch.allows(key.mode) else None

    manager.controller.install(
        mode,
        graphs,
        facts=lambda: {
            "sizes": tuple(sorted(set(_config.capture_sizes(config)))),
            "max_num_tokens": max(largest, *_config.capture_sizes(config)),
            "max_num_seqs": _config.max_num_seqs(config),
            "query_lens": tuple(lens),
            "varlen_decode": varies,
            "max_loras": max(cases, default=0),
            "specialize_active_loras": len(cases) > 2,
        },
        ask=ask,
        eager=lambda batch, num_reqs: eager(batch.num_tokens, num_reqs, batch.num_active_loras),
    )


def _make_eager_factory(make: Any, none: Any) -> Callable[[int, int, int], Any]:
    """Return a function that makes an eager descriptor from three numbers.

    The arguments are the numbers of tokens, requests and adapters.
    """

    def eager(num_tokens: int, num_reqs: int, case: int) -> Any:
        if not case:
            return make(none, num_tokens, num_reqs)
        return make(none, num_tokens, num_reqs, num_active_loras=case)

    # Writing only the fields without defaults takes a quarter of the time of a frozen dataclass's
    # __init__.
    written, facts = {"cg_mode", "num_tokens", "num_reqs"}, getattr(eager(0, 0, 0), "__dict__", {})
    if not written <= facts.keys() or not all(hasattr(make, one) for one in facts.keys() - written):
        return eager
    new = object.__new__

    def quick_eager(num_tokens: int, num_reqs: int, case: int) -> Any:
        made = new(make)
        facts = made.__dict__
        facts["cg_mode"], facts["num_tokens"], facts["num_reqs"] = none, num_tokens, num_reqs
        if case:
            facts["num_active_loras"] = case
        return made

    return quick_eager


def _key(descriptor: Any) -> GraphKey:
    uniform = descriptor.uniform_token_count
    return GraphKey(
        RuntimeMode[descriptor.cg_mode.name],
        BatchDescriptor(
            descriptor.num_tokens,
            num_reqs=descriptor.num_reqs,
            uniform=uniform is not None,
            num_active_loras=getattr(descriptor, "num_active_loras", 0),
            query_len=uniform or 0,
            max_query_len=getattr(descriptor, "max_query_len", None),
        ),
    )


# -- the runner's steps -----------------------------------------------------------------


def _patch_runner(module: ModuleType) -> None:
    """Patch the runner's module to open and close steps, and to mark dummy runs."""
    runner = module.GPUModelRunner
    if hasattr(runner, "dispatchkit_patched"):
        return
    runner.dispatchkit_patched = True
    setattr(module, _STEP, _in_step(getattr(module, _STEP)))
    runner._dummy_run = as_dummy_run(runner._dummy_run, _controller_of)  # noqa: SLF001 - vLLM's name


def _controller_of(runner: Any) -> StepController | None:
    return getattr(runner.cudagraph_manager, "controller", None)


def _in_step(own: Any) -> Any:
    @functools.wraps(own)
    def dispatch_step(
        cudagraph_manager: Any,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        *args: Any,
        **options: Any,
    ) -> Any:
        controller = getattr(cudagraph_manager, "controller", None)
        if controller is None or controller.is_dummy:
            return own(
                cudagraph_manager, num_reqs, num_tokens, uniform_token_count, *args, **options
            )
        controller.open()
        try:
            found = own(
                cudagraph_manager, num_reqs, num_tokens, uniform_token_count, *args, **options
            )
        finally:
            controller.is_open = False
        if controller.log is not None:
            controller.log.add(
                num_tokens,
                num_reqs,
                uniform_token_count == cudagraph_manager.decode_query_len,
                options.get("num_active_loras", 0),
            )
        if controller.counts is not None:
            chosen = found[0]
            reason = controller.reason_of(chosen)
            controller.counts.add(chosen.cg_mode.name, reason, num_tokens, chosen.num_tokens)
        return found

    return dispatch_step
