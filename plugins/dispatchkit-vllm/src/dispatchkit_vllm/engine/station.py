"""What both model runners share: one engine's policy, recorder, counters and timer."""

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

#: Reason of a step that the policy was not asked about: vLLM's own dispatcher answered.
OWN = "vllm"
#: Reason of a step whose shape several ranks agreed on, so that vLLM's dispatcher answered last.
AGREED = "agreed_by_ranks"

_logs: dict[str, StepLog] = {}
_logs_lock = threading.Lock()


def settings_of(vllm_config: Any) -> EngineSettings:
    """Return what is asked for in this process, for an engine."""
    return EngineSettings.read(os.environ, getattr(vllm_config, "additional_config", None))


@attrs.frozen
class Ranks:
    """Where a process stands among those that run one model."""

    rank: int
    size: int

    @classmethod
    def of(cls, vllm_config: Any) -> Ranks:
        """Read it from a vLLM configuration; 0 of 1 where it does not say."""
        parallel = getattr(vllm_config, "parallel_config", None)
        world = int(getattr(parallel, "world_size", 1) or 1)
        replicas = int(getattr(parallel, "data_parallel_size", 1) or 1)
        replica = int(getattr(parallel, "data_parallel_rank", 0) or 0)
        return cls(replica * world + int(getattr(parallel, "rank", 0) or 0), world * replicas)


class Station:
    """The part of one model runner that decides, records, counts and measures its steps.

    A runner opens a step, asks once, and closes it with what really runs. Outside of a step,
    in dummy runs, profiling and captures, nothing here acts and vLLM's own class answers.

    Args:
        settings: What is asked for.
        vllm_config: vLLM's configuration.
        runner: What to call the runner in messages.

    Attributes:
        core: The policy; None while vLLM's own dispatcher decides.
        timer: Reports device times to a policy that learns; None otherwise.
        is_dummy: A dummy run is going on.
        is_open: A step is being decided by the policy, and nothing was asked in it yet.
        answer: What the policy answered in the step that was decided last, until its forward
            pass begins.
        rows: For a runner that looks answers up itself: by active adapters, then by what else
            its ``dispatch`` is asked with, the decisions by number of tokens. The ``plan`` of
            each is its answer.
        largest: For such a runner: most tokens that have a graph.
        on_put: Called after another policy was put in front, to fill ``rows``.
        summary: What the policy does here, in words; empty while none acts.
        why_not: Why the policy asked for cannot act, in words; empty if it does.
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
        with _logs_lock:  # a process may build a dispatcher twice; it has one file
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
        """Put the policy asked for in front of a runner's graphs.

        Args:
            mode: Its cudagraph mode.
            graphs: Every graph that it captures, as what its ``dispatch`` returns.
            facts: Returns sizes and limits, as options of ``DispatchConfig``.
            ask: Returns the key that the runner's own code chooses; None for eager.
            eager: Returns what its ``dispatch`` returns for an eager batch, by its number of
                requests.

        Raises:
            ConfigError: An option is wrong, the policy's graphs are not those of the runner,
                or a policy that learns would run on several ranks.
            PolicyError: The policy is refused.
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
        """Return another policy for this runner's graphs, its table filled; see ``put``.

        Raises:
            ConfigError: The runner has no graphs yet, or as in ``install``.
            PolicyError: The policy is refused.
        """
        if self._make is None:
            raise ConfigError("policy", policy, "made once the runner knows its graphs")
        core = self._make(attrs.evolve(self.settings, policy=policy, policy_options=options))
        core.fill()
        return core

    def put(self, core: PolicyCore | None) -> None:
        """Let a policy decide from the next step on; None: vLLM's own class.

        A policy keeps what it learnt, and may be put back later. Call it between steps.
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
        """Begin a step: the next ``ask`` is answered by the policy."""
        self.is_open = self.core is not None
        self.answer = None

    def ask(
        self, num_tokens: int, num_reqs: int, kind: int, loras: int, ceiling: int
    ) -> Answer | None:
        """Return the policy's answer; None: the runner's own class answers.

        Only the first call in a step is answered. A second one comes after ranks agreed on a
        shape, and all of them must pad alike then.
        """
        if not self.is_open:
            return None
        self.is_open = False
        if self.core is not None:
            self.answer = self.core.ask(num_tokens, num_reqs, kind, loras, ceiling)
        return self.answer

    def take_answer(self) -> Answer | None:
        """Return what decides the next forward pass, once; None where no policy did."""
        answer, self.answer = self.answer, None
        return answer

    def reason_of(self, result: Any) -> str:
        """Return the reason to count a step under, of which ``dispatch`` returned this last."""
        answer = self.answer
        if answer is None:
            return OWN
        return answer.decision.reason if answer.result == result else AGREED


def as_dummy(own: Any, station_of: Callable[[Any], Station | None]) -> Any:
    """Return a method of a runner in which nothing is decided, recorded or measured."""

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
            "left out without dispatchkit-prometheus",
            "Install it: pip install dispatchkit-prometheus.",
        ) from error
