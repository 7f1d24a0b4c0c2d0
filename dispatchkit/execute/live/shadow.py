"""A shadow of a serving runner: tried without effect, then promoted or discarded."""

from __future__ import annotations

import threading
from typing import Any

from dispatchkit.dispatch import CostModel
from dispatchkit.errors import ConfigError, RegistryError
from dispatchkit.execute.executor import Executor
from dispatchkit.execute.live.swap import Swapper, SwapReport
from dispatchkit.execute.live.taps import StepTaps
from dispatchkit.keys.checks import check_count
from dispatchkit.observe.recorder import DEFAULT_CAPACITY, StepRecorder
from dispatchkit.observe.shadow import Shadow, ShadowReport


class RunnerShadow:
    """A candidate beside what a runner has in force; made by ``start_shadow``.

    Args:
        executor: Whose steps are followed.
        taps: Through which they are.
        swapper: Makes the candidate real.
        lock: Held by each step.
        shadow: The comparison.
        change: The arguments of the swap that makes the candidate real.
        sample_every: One step in so many is timed.
        capacity: Steps kept between two polls.
    """

    def __init__(
        self,
        executor: Executor,
        taps: StepTaps,
        swapper: Swapper,
        lock: threading.RLock,
        shadow: Shadow,
        change: dict[str, Any],
        sample_every: int,
        capacity: int,
    ) -> None:
        self._executor, self._taps, self._swapper, self._lock = executor, taps, swapper, lock
        self._shadow, self._change = shadow, change
        self._recorder = StepRecorder(executor.dispatcher.config, capacity)
        self._read = 0
        self._is_on = True
        self._dispatch = self._recorder.listening_to(shadow.sampling(sample_every))
        self._stop_listening = executor.timings.listen(shadow.observe)
        taps.shadow(self._dispatch)

    def poll(self) -> int:
        """Follow the steps that were run since the last time; return how many.

        To be called now and then by whoever has time. Steps wait only while their numbers are
        copied.

        Raises:
            RegistryError: The shadow was promoted or discarded.
        """
        if not self._is_on:
            raise RegistryError(
                "The shadow follows no more: it was promoted or discarded. report() has what it "
                "saw; start another."
            )
        self._executor.timings.drain()
        with self._lock:  # for a moment
            steps, lost = self._recorder.read_from(self._read)
            self._read = self._recorder.num_steps
        return self._shadow.follow(steps, lost)

    def report(self) -> ShadowReport:
        """Return where the two differ in the steps followed, and what a switch would bring."""
        return self._shadow.report()

    def promote(self, **options: Any) -> SwapReport:
        """Make the candidate real by a swap, and end the shadow. If that fails, both stay.

        Args:
            options: Further arguments of ``swap``, such as ``max_graphs``.

        Raises:
            SwapError: As in ``swap``.
        """
        # A swap to other query classes is refused while steps are followed.
        if self._is_on:
            self._taps.shadow(None)
        try:
            report = self._swapper.swap(**self._change, **options)
        except BaseException:
            if self._is_on:
                self._taps.shadow(self._dispatch)
            raise
        self.discard()
        return report

    def discard(self) -> None:
        """End the shadow; steps are as they were before it."""
        if self._is_on:
            self._is_on = False
            self._stop_listening()
            self._taps.shadow(None)


def start_shadow(
    executor: Executor,
    taps: StepTaps,
    swapper: Swapper,
    lock: threading.RLock,
    *,
    times: CostModel | None = None,
    sample_every: int = 32,
    capacity: int = DEFAULT_CAPACITY,
    **change: Any,
) -> RunnerShadow:
    """Let a candidate decide beside what is in force; see ``GraphRunner.start_shadow``.

    Raises:
        ConfigError: It cannot be used, or another shadow follows already.
        UnknownNameError: No policy goes by that name.
        PolicyError: The candidate is refused.
    """
    sample_every = check_count(sample_every, "sample_every")
    if taps.is_shadowed:
        hint = "Discard or promote the other first."
        raise ConfigError("start_shadow", "a second shadow", "the only shadow", hint)
    proposal = swapper.proposed(**change)
    shadow = Shadow(
        executor.dispatcher, proposal.policy, proposal.config, origin=proposal.origin, times=times
    )
    return RunnerShadow(executor, taps, swapper, lock, shadow, change, sample_every, capacity)
