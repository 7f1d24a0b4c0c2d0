"""Decide how the steps of a model runner run, and record, count and measure them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from dispatchkit import Batch, DispatchConfig, GraphKey, load_plugins
from dispatchkit.dispatch import Row, policy_name
from dispatchkit.errors import ConfigError, UnknownNameError, counted
from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm.engine.core import Answer, PolicyCore, make_policy, refuse_learning
from dispatchkit_vllm.engine.counts import StepCounts
from dispatchkit_vllm.engine.settings import EngineSettings
from dispatchkit_vllm.engine.steplog import StepLog, path_of_rank
from dispatchkit_vllm.engine.timing import Clock, DeviceClock, HostClock, StepTimer
from dispatchkit_vllm.runner_rule import RunnerRule

__all__ = ["StepController", "as_dummy_run", "settings_of"]

#: Reason of a step that vLLM's own dispatcher decided, because the policy was not asked or gave no
#: usable answer.
DECIDED_BY_VLLM = "vllm"
#: Reason of a step that the policy decided, but that vLLM's dispatcher decided again after several
#: ranks agreed on its shape.
AGREED_BY_RANKS = "agreed_by_ranks"

_logs: dict[str, StepLog] = {}
_logs_lock = threading.Lock()


def settings_of(vllm_config: Any) -> EngineSettings:
    """Return dispatchkit's settings for an engine in this process."""
    return EngineSettings.read(os.environ, getattr(vllm_config, "additional_config", None))


@attrs.frozen
class Ranks:
    """The rank of this process, and the number of processes that run the model."""

    rank: int
    size: int

    @classmethod
    def of(cls, vllm_config: Any) -> Ranks:
        """Read rank and size from a vLLM configuration; rank 0 of 1 by default."""
        parallel = getattr(vllm_config, "parallel_config", None)
        world = int(getattr(parallel, "world_size", 1) or 1)
        replicas = int(getattr(parallel, "data_parallel_size", 1) or 1)
        replica = int(getattr(parallel, "data_parallel_rank", 0) or 0)
        return cls(replica * world + int(getattr(parallel, "rank", 0) or 0), world * replicas)


class StepController:
    """Controller that decides, records, counts and measures the steps of a model runner.

    A runner opens each step and asks for the policy's decision. Outside of steps (in dummy runs,
    profiling and captures), vLLM's own class decides.

    Args:
        settings: dispatchkit's settings for this process.
        vllm_config: vLLM's configuration, which determines ranks and device.
        runner: Name of the runner in messages.

    Attributes:
        core: The active policy; None while vLLM's own dispatcher decides.
        timer: Timer that reports step times to the active policy; None if the policy does not
            learn.
        is_dummy: Whether a dummy run is in progress.
        is_open: Whether the policy decides the current step and has not been asked yet.
        answer: The policy's answer for the current step; None if vLLM decides, or after
            ``take_answer``.
        rows: For a runner that looks up answers itself: decisions by number of active adapters,
            then by uniform query length, then by number of tokens. The ``plan`` of a decision is
            its answer.
        largest: Largest number of tokens with a graph, for a runner that looks up answers itself.
        on_activate: Function to call after a change of policy, to fill ``rows``.
        summary: Description of the policy that ``install`` activated, for the log. Empty if it
            activated none, and after a later call of ``activate``.
        inactive_reason: Why the configured policy cannot act; empty if it can.
    """

    def __init__(self, settings: EngineSettings, vllm_config: Any, runner: str) -> None:
        self.settings = settings
        self.runner = runner
        self.ranks = Ranks.of(vllm_config)
        self.core: PolicyCore | None = None
        self.timer: StepTimer | None = None
        self.is_dummy: bool = False
        self.summary: str = ""
        self.inactive_reason: str = (
            "the runner has not created its graphs" if settings.policy else ""
        )
        self._device = str(getattr(getattr(vllm_config, "device_config", None), "device_type", ""))
        self.rows: Mapping[int, Mapping[Any, Row]] = {}
        self.largest: int = 0
        self.on_activate: Callable[[], None] | None = None
        self.answer: Answer | None = None
        self._make: Callable[[EngineSettings], PolicyCore] | None = None
        self._timers: dict[PolicyCore, StepTimer] = {}
        self.is_open: bool = False
        self.log: StepLog | None = self._open_log() if settings.trace else None
        self.counts: StepCounts | None = None
        if settings.metrics:
            self.counts = StepCounts(runner=runner)
            _export(self.counts, settings.metrics, self.ranks)

    def _open_log(self) -> StepLog:
        path = path_of_rank(self.settings.trace, self.ranks.rank, self.ranks.size)
        with _logs_lock:  # one file per process, even with several dispatchers
            known = _logs.get(str(path))
            if known is None or not known.is_open:
                known = _logs[str(path)] = StepLog(path)
            return known

    # -- setup --------------------------------------------------------------------------

    def install(
        self,
        mode: CUDAGraphMode,
        graphs: Mapping[GraphKey, Any],
        *,
        facts: Callable[[], dict[str, Any]],
        ask: Callable[[Batch], GraphKey | None],
        eager: Callable[[Batch, int], Any],
    ) -> None:
        """Create and activate the configured policy for a runner's graphs.

        Args:
            mode: The runner's cudagraph mode.
            graphs: Graphs that the runner captures, each with the value that the runner's
                ``dispatch`` returns for it.
            facts: Function that returns sizes and limits as options of ``DispatchConfig``.
            ask: Function that returns the key that the runner's own code chooses for a batch; None
                for eager.
            eager: Function that takes a batch and its number of requests, and returns what the
                runner's ``dispatch`` returns if the batch runs eager.

        Raises:
            ConfigError: An option is invalid, the policy declares graphs that the runner does not
                capture, or a policy that learns would run on several ranks or on a device other
                than CUDA and CPU.
            PolicyError: The policy is invalid.
        """

        def make(settings: EngineSettings) -> PolicyCore:
            policy = make_policy(settings, RunnerRule(graphs, ask))
            refuse_learning(policy, self.ranks.size)
            config = DispatchConfig(mode=mode, **facts())
            return PolicyCore(policy, config, graphs, eager=eager, runner=self.runner)

        self._make = make
        self.activate(None)
        if not self.settings.policy:
            return
        if not graphs:
            self.inactive_reason = f"vLLM captures no graphs (cudagraph mode {mode.name})"
            return
        core = make(self.settings)
        cells, idle = core.fill(), core.never_replayed()
        self.activate(core)
        self.inactive_reason = ""
        self.summary = (
            f"Policy {policy_name(core.policy)!r} decides in {self.runner}: "
            f"{counted(len(graphs), 'graph')} ({len(idle)} never chosen for batches of exactly "
            f"their size), {counted(cells, 'table cell')} filled."
        )

    def make(self, policy: str, **options: Any) -> PolicyCore:
        """Create another policy for this runner's graphs, to pass to ``activate``.

        Raises:
            ConfigError: The runner has no graphs yet, no policy has this name, an option is
                invalid, the policy declares graphs that the runner does not capture, or the
                policy learns and there are several ranks.
            PolicyError: The policy is invalid.
        """
        if self._make is None:
            raise ConfigError(
                "policy",
                policy,
                "created after the runner has created its graphs",
                "Call make() after the engine has started.",
                message=f"Policy {policy!r} cannot be created before the runner has created its "
                "graphs.",
            )
        core = self._make(attrs.evolve(self.settings, policy=policy, policy_options=options))
        core.fill()
        return core

    def activate(self, core: PolicyCore | None) -> None:
        """Make a policy decide from the next step on; None selects vLLM's own class.

        Call this method between steps. A policy keeps its learned state and may be activated again.

        Raises:
            ConfigError: The policy learns, but the device is neither CUDA nor CPU.
        """
        self.core, self.timer, self.summary = core, None, ""
        if self.counts is not None:
            self.counts.policy = "" if core is None else policy_name(core.policy)
        self.rows = {}
        if core is not None and core.learns:
            if core not in self._timers:
                self._timers[core] = StepTimer(core.dispatcher, self._clock(core.policy))
            self.timer = self._timers[core]
        if self.on_activate is not None:
            self.on_activate()

    def _clock(self, policy: Any) -> Clock:
        if self._device == "cuda":
            return DeviceClock()
        if self._device == "cpu":
            return HostClock()
        raise ConfigError(
            "policy",
            policy_name(policy),
            "a policy that does not learn",
            "Step times can be measured only on CUDA and CPU devices, not on "
            f"{self._device or 'an unknown device'}.",
        )

    # -- a step -------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a step: the policy answers the next call of ``ask``."""
        self.is_open = self.core is not None
        self.answer = None

    def ask(
        self, num_tokens: int, num_reqs: int, kind: int, loras: int, ceiling: int
    ) -> Answer | None:
        """Return the policy's answer; None if the runner's own class must decide.

        Only the first call in a step returns an answer. A second call follows if ranks have agreed
        on a shape, to which every rank must pad.
        """
        if not self.is_open:
            return None
        self.is_open = False
        if self.core is not None:
            self.answer = self.core.ask(num_tokens, num_reqs, kind, loras, ceiling)
        return self.answer

    def take_answer(self) -> Answer | None:
        """Return and clear the policy's answer for the next forward pass; None if vLLM decided."""
        answer, self.answer = self.answer, None
        return answer

    def reason_of(self, result: Any) -> str:
        """Return the reason to count for a step, given the last result of ``dispatch``."""
        answer = self.answer
        if answer is None:
            return DECIDED_BY_VLLM
        return answer.decision.reason if answer.result == result else AGREED_BY_RANKS


def as_dummy_run(own: Any, controller_of: Callable[[Any], StepController | None]) -> Any:
    """Wrap a runner's method as a dummy run.

    During its calls, no policy decides, and steps are not recorded, counted or measured.
    """

    @functools.wraps(own)
    def dummy_run(self: Any, *args: Any, **options: Any) -> Any:
        controller = controller_of(self)
        if controller is None:
            return own(self, *args, **options)
        before, controller.is_dummy = controller.is_dummy, True
        try:
            return own(self, *args, **options)
        finally:
            controller.is_dummy = before

    return dummy_run


def _export(counts: StepCounts, where: str, ranks: Ranks) -> None:
    plugins = load_plugins()
    try:
        plugins.create_observer(
            "prometheus-engine", counts=counts, where=where, rank=ranks.rank, world_size=ranks.size
        )
    except UnknownNameError as error:
        raise ConfigError(
            "metrics",
            where,
            "omitted without dispatchkit-prometheus",
            "Run: pip install dispatchkit-prometheus.",
        ) from error
