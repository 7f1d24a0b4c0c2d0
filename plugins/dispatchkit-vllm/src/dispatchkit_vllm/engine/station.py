"""The parts that both model runners share: an engine's policy, recorder, counters and timer."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from dispatchkit import Batch, DispatchConfig, GraphKey, load_plugins
from dispatchkit.dispatch import Row, policy_name
from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm.engine.core import Answer, PolicyCore, make_policy, refuse_learning
from dispatchkit_vllm.engine.counts import StepCounts
from dispatchkit_vllm.engine.settings import EngineSettings
from dispatchkit_vllm.engine.steplog import StepLog, path_of_rank
from dispatchkit_vllm.engine.timing import Clock, DeviceClock, HostClock, StepTimer
from dispatchkit_vllm.runner_rule import RunnerRule

__all__ = ["Station", "as_dummy", "settings_of"]

#: Reason of a step for which the policy was not asked: vLLM's own dispatcher answered.
OWN = "vllm"
#: Reason of a step whose shape several ranks agreed on, for which vLLM's dispatcher answered last.
AGREED = "agreed_by_ranks"

_logs: dict[str, StepLog] = {}
_logs_lock = threading.Lock()


def settings_of(vllm_config: Any) -> EngineSettings:
    """Return the settings of this process for an engine."""
    return EngineSettings.read(os.environ, getattr(vllm_config, "additional_config", None))


@attrs.frozen
class Ranks:
    """The position of a process among those that run one model."""

    rank: int
    size: int

    @classmethod
    def of(cls, vllm_config: Any) -> Ranks:
        """Read it from a vLLM configuration; rank 0 of 1 if the configuration has none."""
        parallel = getattr(vllm_config, "parallel_config", None)
        world = int(getattr(parallel, "world_size", 1) or 1)
        replicas = int(getattr(parallel, "data_parallel_size", 1) or 1)
        replica = int(getattr(parallel, "data_parallel_rank", 0) or 0)
        return cls(replica * world + int(getattr(parallel, "rank", 0) or 0), world * replicas)


class Station:
    """The part of a model runner that decides, records, counts and measures its steps.

    A runner opens a step, asks once, and closes it with what really runs. Outside of steps, in
    dummy runs, profiling and captures, nothing here acts and vLLM's own class answers.

    Args:
        settings: The settings of this process.
        vllm_config: vLLM's configuration.
        runner: Name of the runner in messages.

    Attributes:
        core: The policy; None while vLLM's own dispatcher decides.
        timer: Reports device times to a policy that learns; None otherwise.
        is_dummy: A dummy run is in progress.
        is_open: A step is being decided by the policy, which has not been asked yet.
        answer: The policy's answer in the latest step, until its forward pass begins.
        rows: For a runner that looks up answers itself: decisions by active adapters, then by
            the remaining arguments of its ``dispatch``, then by number of tokens. The ``plan``
            of each decision is its answer.
        largest: For such a runner: the most tokens that have a graph.
        on_put: Called after a change of policy, to fill ``rows``.
        summary: What the policy does here, in words; empty while none acts.
        why_not: Why the configured policy cannot act, in words; empty if it acts.
    """

    def __init__(self, settings: EngineSettings, vllm_config: Any, runner: str) -> None:
        self.settings = settings
        self.runner = runner
        self.ranks = Ranks.of(vllm_config)
        self.core: PolicyCore | None = None
        self.timer: StepTimer | None = None
        self.is_dummy: bool = False
        self.summary: str = ""
        self.why_not: str = "it was given no graphs" if settings.policy else ""
        self._device = str(getattr(getattr(vllm_config, "device_config", None), "device_type", ""))
        self.rows: Mapping[int, Mapping[Any, Row]] = {}
        self.largest: int = 0
        self.on_put: Callable[[], None] | None = None
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
        with _logs_lock:  # a process may create a dispatcher twice, but has one file
            known = _logs.get(str(path))
            if known is None or not known.is_open:
                known = _logs[str(path)] = StepLog(path)
            return known

    # -- set-up -------------------------------------------------------------------------

    def install(
        self,
        mode: CUDAGraphMode,
        graphs: Mapping[GraphKey, Any],
        *,
        facts: Callable[[], dict[str, Any]],
        ask: Callable[[Batch], GraphKey | None],
        eager: Callable[[Batch, int], Any],
    ) -> None:
        """Put the configured policy in front of a runner's graphs.

        Args:
            mode: Its cudagraph mode.
            graphs: Every graph that it captures, with what its ``dispatch`` returns.
            facts: Returns sizes and limits, as options of ``DispatchConfig``.
            ask: Returns the key that the runner's own code chooses; None for eager.
            eager: Returns what its ``dispatch`` returns for an eager batch, by its number of
                requests.

        Raises:
            ConfigError: An option is wrong, the runner lacks graphs that the policy declares,
                or a policy that learns would run on several ranks.
            PolicyError: The policy is rejected.
        """

        def make(settings: EngineSettings) -> PolicyCore:
            policy = make_policy(settings, RunnerRule(graphs, ask))
            refuse_learning(policy, self.ranks.size)
            config = DispatchConfig(mode=mode, **facts())
            return PolicyCore(policy, config, graphs, eager=eager, runner=self.runner)

        self._make = make
        self.put(None)
        if not self.settings.policy:
            return
        if not graphs:
            self.why_not = f"vLLM captures no graphs here (cudagraph mode {mode.name})"
            return
        core = make(self.settings)
        cells, idle = core.fill(), core.never_replayed()
        self.put(core)
        self.why_not = ""
        self.summary = (
            f"Policy {policy_name(core.policy)!r} decides in {self.runner}: {len(graphs)} graphs, "
            f"{len(idle)} of them never replayed for a batch of their own size; {cells} cells "
            f"of its table are filled."
        )

    def make(self, policy: str, **options: Any) -> PolicyCore:
        """Return another policy for this runner's graphs, with its table filled; see ``put``.

        Raises:
            ConfigError: The runner has no graphs yet, or as in ``install``.
            PolicyError: The policy is rejected.
        """
        if self._make is None:
            raise ConfigError("policy", policy, "made once the runner knows its graphs")
        core = self._make(attrs.evolve(self.settings, policy=policy, policy_options=options))
        core.fill()
        return core

    def put(self, core: PolicyCore | None) -> None:
        """Let a policy decide from the next step on; None: vLLM's own class.

        A policy keeps what it learned, and may be put back later. Call it between steps.
        """
        self.core, self.timer, self.summary = core, None, ""
        if self.counts is not None:
            self.counts.policy = "" if core is None else policy_name(core.policy)
        self.rows = {}
        if core is not None and core.learns:
            if core not in self._timers:
                self._timers[core] = StepTimer(core.dispatcher, self._clock(core.policy))
            self.timer = self._timers[core]
        if self.on_put is not None:
            self.on_put()

    def _clock(self, policy: Any) -> Clock:
        if self._device == "cuda":
            return DeviceClock()
        if self._device == "cpu":
            return HostClock()
        raise ConfigError(
            "policy",
            policy_name(policy),
            f"a policy that does not learn, on {self._device or 'an unknown device'}",
            "Device times are taken with CUDA events.",
        )

    # -- a step -------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a step: the policy answers the next ``ask``."""
        self.is_open = self.core is not None
        self.answer = None

    def ask(
        self, num_tokens: int, num_reqs: int, kind: int, loras: int, ceiling: int
    ) -> Answer | None:
        """Return the policy's answer; None: the runner's own class must answer.

        Only the first call in a step is answered. A second call follows an agreement of ranks
        on a shape, and then all of them must pad alike.
        """
        if not self.is_open:
            return None
        self.is_open = False
        if self.core is not None:
            self.answer = self.core.ask(num_tokens, num_reqs, kind, loras, ceiling)
        return self.answer

    def take_answer(self) -> Answer | None:
        """Return the answer that decides the next forward pass, once; None if no policy did."""
        answer, self.answer = self.answer, None
        return answer

    def reason_of(self, result: Any) -> str:
        """Return the reason to count a step under, given the last result of ``dispatch``."""
        answer = self.answer
        if answer is None:
            return OWN
        return answer.decision.reason if answer.result == result else AGREED


def as_dummy(own: Any, station_of: Callable[[Any], Station | None]) -> Any:
    """Wrap a runner's method so that it decides, records and measures nothing."""

    @functools.wraps(own)
    def dummy_run(self: Any, *args: Any, **options: Any) -> Any:
        station = station_of(self)
        if station is None:
            return own(self, *args, **options)
        before, station.is_dummy = station.is_dummy, True
        try:
            return own(self, *args, **options)
        finally:
            station.is_dummy = before

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
            "Install it: pip install dispatchkit-prometheus.",
        ) from error
