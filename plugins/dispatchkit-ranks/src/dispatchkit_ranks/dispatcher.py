"""A dispatcher that decides each step from the batches of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from dispatchkit.dispatch import Decision, Dispatcher, policy_name, policy_traits
from dispatchkit.errors import ConfigError, NoGraphError, PolicyError, RankError
from dispatchkit.keys import GraphKey, RuntimeMode, check_count, check_instance
from dispatchkit.registry import KeyState

from dispatchkit_ranks.axis_facts import AxisFacts
from dispatchkit_ranks.facts import ALL_ON, AgreedBatch, Facts
from dispatchkit_ranks.fingerprint import fingerprint
from dispatchkit_ranks.leader import LeaderPolicy
from dispatchkit_ranks.protocol import Phase, Ranks
from dispatchkit_ranks.shared_keys import SharedKeys

_FULL = int(RuntimeMode.FULL)
_LOST_KEYS, _TABLE = 1, 2
_HASH = (1 << 61) - 1


class RankedDispatcher:
    """A dispatcher that chooses the same mode and padded size on all ranks.

    The policy determines how the ranks agree:

    * With a ``stateless`` policy, each rank decides for its own batch. Every rank then decides
      again for the largest number of tokens of any rank, using no mode above the lowest mode that
      any rank chose.
    * With a ``LeaderPolicy``, the ranks decide once, for the largest number of tokens of any
      rank. They use a table that only the leader (rank 0) changes. An epoch starts when the
      changes are distributed to all ranks.

    All ranks must create this object at the same point. They then compare everything that affects
    decisions: configuration, policy, dialect, sizes, versions.

    Args:
        dispatcher: The dispatcher of this rank. It must not be lazy, because a capture during
            a step may fail on one rank only. Its graphs may already be captured;
            otherwise, ``capture`` captures them.
        ranks: The ranks that decide together, such as a ``RankAgreement``.
        same_batches: Whether all ranks always have the same batch, as in tensor parallelism with
            one scheduler. With a stateless policy, steps then need no exchange.
        check_every: With ``same_batches``, the number of steps from one exchange to the next. An
            exchange detects different batches, withholds keys that some rank cannot run, and
            distributes the leader's table. 0 disables exchanges. The default is ``epoch_steps``
            with a LeaderPolicy, and 0 with other policies.
        epoch_steps: With a LeaderPolicy, the minimum number of steps from one epoch to the next.
        switches: Names of on/off choices that change the collectives in a step, as the mode and the
            size do. ``agree`` takes and returns these choices as bits in this order.
        facts: Additional values that must be equal on all ranks, by name.

    Attributes:
        dispatcher: The dispatcher of this rank.
        ranks: The ranks that decide together, such as a ``RankAgreement``.
        step: Number of steps started on this rank.
        epoch: Number of times that the leader's table was distributed.

    Raises:
        ConfigError: The policy learns on every rank, the dispatcher is lazy or may split batches,
            or a setting is invalid.
        RankError: The ranks have different settings, or a rank is missing.

    Thread safety: use it from one thread.
    """

    dispatcher: Dispatcher
    ranks: Ranks
    epoch: int
    step: int

    def __init__(
        self,
        dispatcher: Dispatcher,
        ranks: Ranks,
        *,
        same_batches: bool = False,
        check_every: int | None = None,
        epoch_steps: int = 256,
        switches: Sequence[str] = (),
        facts: Mapping[str, object] | None = None,
    ) -> None:
        check_instance(dispatcher, Dispatcher, "dispatcher", "For a GraphRunner, use RankedRunner.")
        self.dispatcher, self.ranks = dispatcher, ranks
        self.step = self.epoch = 0
        self._last_epoch, self._epoch_steps = 0, epoch_steps
        self._same_batches, self._check_every = same_batches, check_every
        self._switches = tuple(switches)
        self._compared = dict(facts or {})
        # With same_batches, a hash of the batches of all steps without an exchange.
        self._history = 0
        self._keys = SharedKeys(dispatcher)
        self.renew()

    def renew(self) -> None:
        """Continue after a swap; all ranks must swap and call this at the same point.

        The ranks compare their policies and configurations again. Without this call, the next step
        after a swap raises RankError.

        Raises:
            ConfigError: As for the constructor.
            RankError: The policies or configurations differ, or a rank did not call this method.
        """
        dispatcher, ranks = self.dispatcher, self.ranks
        policy = dispatcher.policy
        self._leader = policy if isinstance(policy, LeaderPolicy) else None
        check_every = self._check_every
        if check_every is None:
            check_every = self._epoch_steps if self._leader is not None else 0
        try:
            check_every = check_count(check_every, "check_every", minimum=0)
            self._epoch_steps = check_count(self._epoch_steps, "epoch_steps")
            _check(dispatcher, self._leader, ranks)
            has_axes = bool(dispatcher.config.axes)
            self._facts = (AxisFacts if has_axes else Facts)(dispatcher.config, self._switches)
        except ConfigError as error:
            ranks.fail(error)  # otherwise, the other ranks would wait for this rank
            raise
        # Number of steps per exchange; 0 without exchanges.
        self._every = check_every if self._same_batches else 1
        if ranks.size == 1 and self._leader is None:
            self._every = 0
        # Creates the agreed batch of a step without an exchange.
        self._own: Callable[..., AgreedBatch] = AgreedBatch
        if isinstance(self._facts, AxisFacts):
            self._own = self._facts.own
        own = {
            "same_batches": self._same_batches,
            "check_every": check_every,
            "epoch_steps": self._epoch_steps,
            "switches": self._facts.switches,
        }
        base = None if self._leader is None else self._leader.base
        ranks.compare(fingerprint(dispatcher, {**own, **self._compared}, policy=base))
        # A swap replaces this object, so an identity check detects the swap.
        self._graphs = dispatcher.graphs
        self.sync_keys()

    # -- the step -----------------------------------------------------------------------

    @property
    def needs_agreement(self) -> bool:
        """Whether the ranks exchange their batches, either in every step or every few steps."""
        return self._every != 0 and self.ranks.size > 1

    @property
    def withheld(self) -> dict[GraphKey, dict[int, str]]:
        """Keys that this rank can run but another rank cannot, with the reason by rank index."""
        return dict(self._keys.withheld)

    def agree(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
        switches: int = ALL_ON,
    ) -> AgreedBatch:
        """Return the batch of this step that all ranks agreed on.

        Every rank must call this in every step; an idle rank passes 0 tokens. If ``num_tokens`` of
        the result is not 0, an idle rank must run a dummy batch of that size. Pass the first five
        fields of the result exactly once to ``dispatch`` of the dispatcher or, if the dispatcher
        belongs to a runner, to ``runner.decisions.decide``.

        Args:
            num_tokens: Number of unpadded tokens of this rank.
            num_reqs: Number of requests; 0 if unknown.
            uniform: Query class, see ``Dispatcher.dispatch``.
            loras: Number of active adapters; with axes, the result of ``DispatchConfig.variant``
                for this number and this rank's value of each axis.
            ceiling: The modes that this rank's batch allows, see ``Dispatcher.dispatch``.
            switches: Bits of the switches that are on for this rank; by default, all are on.

        Raises:
            DescriptorError: An argument is outside the configured limits. Nothing has been
                exchanged, so the step can be retried.
            NoGraphError: The ranks allow no common mode; every rank raises this error.
            PolicyError: In strict mode, the policy failed on this rank. The agreement has ended.
            RankError: A rank is late, has left or has raised an error; with ``same_batches``, the
                batches differ; the policy or configuration of this rank was swapped without
                ``renew``; or a graph changed before a step without an exchange. The agreement has
                ended.
        """
        if self.dispatcher.graphs is not self._graphs:
            raise self._swapped()
        every = self._every
        if every != 1 and (not every or (self.step + 1) % every):
            return self._decide_locally(num_tokens, num_reqs, uniform, loras, ceiling, switches)
        while True:
            mode = self._local_mode(num_tokens, num_reqs, uniform, loras, ceiling)
            row = self._facts.row(num_tokens, num_reqs, uniform, loras, ceiling, mode, switches)
            row.append(self._pending_changes())
            merged = self.ranks.exchange(row, mark=self._history, step=self.step + 1)
            if not merged[-1]:
                break
            self._exchange_changes(merged[-1])
        agreed = self._facts.merge(merged)
        self.step += 1
        if self._leader is not None:
            self._leader.is_observing = True
        return agreed

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
    ) -> Decision:
        """Return the decision of this step that all ranks agreed on.

        ``num_tokens`` of the decision is the agreed number, which may exceed this rank's number.

        Raises:
            DescriptorError: See ``agree``.
            NoGraphError: See ``agree``.
            PolicyError: See ``agree``.
            RankError: See ``agree``.
        """
        agreed = self.agree(num_tokens, num_reqs, uniform, loras, ceiling)
        return self.dispatcher.dispatch(*agreed[:5])

    # -- graphs -------------------------------------------------------------------------

    def capture(
        self, capture: Callable[[GraphKey], object], keys: Iterable[GraphKey] | None = None
    ) -> dict[GraphKey, dict[int, str]]:
        """Capture keys on all ranks in the same order, largest first.

        Args:
            capture: Function that captures a key and records the graph in the registry. It is also
                called for keys that this rank has captured, but another rank has not. If it raises
                an error, the capture of the key is recorded as failed.
            keys: The keys to capture, the same on all ranks; by default all declared keys.

        Returns:
            The keys that no rank uses because some rank cannot run them, with the reason by rank
            index.
        """
        registry = self.dispatcher.registry
        self._keys.restore_all()
        order = sorted(registry if keys is None else keys, key=_largest_first)
        for key in order:
            entry = registry.get(key)
            is_missing = entry is None or entry.state is not KeyState.CAPTURED
            merged = self.ranks.exchange(
                (is_missing,),
                Phase.CAPTURE,
                label=f"the capture of {key}",
                mark=zlib.crc32(str(key).encode()),
            )
            if not merged[0]:
                continue
            try:
                capture(key)
            except Exception as error:  # noqa: BLE001 - the registry records any error of a capture
                registry.failed(key, f"{type(error).__name__}: {error}")
        self.ranks.exchange((), Phase.CAPTURE, label="the end of the captures", mark=len(order))
        lost = self.sync_keys()
        return {key: lost[key] for key in order if key in lost}

    def sync_keys(self) -> dict[GraphKey, dict[int, str]]:
        """Exchange the states of all keys, and withhold keys that some rank cannot run.

        All ranks must call this at the same point. Steps with an exchange do this automatically.
        Without exchanges, call this after keys are enabled, disabled or evicted.

        Returns:
            The keys that some rank cannot run, with the reason by rank index.
        """
        lost = self._keys.merge_reports(self.ranks.gather(self._keys.report()))
        if self._leader is not None:
            # A change to a key on one rank has emptied cells of that rank's table, including
            # one-shot decisions. Make all ranks continue with an empty table.
            self.dispatcher.set_lazy(False)
        return lost

    def close(self) -> None:
        """Unsubscribe from the registry; the caller must close the agreement separately."""
        self._keys.close()

    # -- internals ----------------------------------------------------------------------

    def _pending_changes(self) -> int:
        """Return the code of the changes that this rank must exchange before the step."""
        leader = self._leader
        if leader is not None and leader.has_updates and self._is_epoch_due():
            return _TABLE
        return _LOST_KEYS if self._keys.has_changes else 0

    def _is_epoch_due(self) -> bool:
        return self.step - self._last_epoch >= self._epoch_steps

    def _exchange_changes(self, pending: int) -> None:
        """Exchange the pending changes: first the keys, then the table that refers to them."""
        self.sync_keys()
        if pending == _TABLE and self._leader is not None:
            is_leader = self.ranks.rank == 0
            text = self.ranks.share(self._leader.take_updates() if is_leader else "")
            self._leader.apply_updates(text, self.dispatcher)
            self._last_epoch = self.step
            self.epoch += 1

    def _local_mode(
        self, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
    ) -> int:
        """Return the mode in which this rank would run its own batch, or FULL to set no limit."""
        if self._leader is not None:
            # Only validate: a dispatch would consume one-shot decisions on this rank alone.
            self.dispatcher.batch(num_tokens, num_reqs, uniform, loras, ceiling)
            return _FULL
        try:
            return self.dispatcher.dispatch(num_tokens, num_reqs, uniform, loras, ceiling).mode
        except NoGraphError:
            # Do not raise yet, because other ranks wait for this rank's row. The row contains the
            # modes that this batch allows, so every rank raises the error after the exchange.
            return _FULL
        except PolicyError as error:
            self.ranks.fail(error)  # a retry would raise again, so stop the other ranks
            raise

    def _swapped(self) -> RankError:
        error = RankError(
            "The policy or configuration of this rank was swapped, but renew() was not called, so "
            "the agreement has ended. Create a new agreement on all ranks. For later swaps, swap "
            "at the same point on all ranks, and then call renew() on all of them.",
            step=self.step,
            reason="differs",
        )
        self.ranks.fail(error)
        return error

    def _decide_locally(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform: int,
        loras: int,
        ceiling: int,
        switches: int,
    ) -> AgreedBatch:
        """Return this rank's batch as the agreed batch, in a step without an exchange."""
        if self._keys.has_changes and self.ranks.size > 1:
            error = RankError(
                "A graph of this rank changed, but this step has no exchange, so the ranks could "
                "use different graphs. The agreement has ended. Create a new agreement on all "
                "ranks. Then call sync_keys() on all ranks after each such change, or set "
                "check_every=1 to exchange in every step.",
                step=self.step,
                reason="differs",
            )
            self.ranks.fail(error)
            raise error
        agreed = self._own(
            num_tokens, num_reqs, uniform, loras, ceiling, switches & self._facts.all_on
        )
        if self._every:
            self._history = hash((self._history, agreed)) & _HASH
        self.step += 1
        return agreed


def _check(dispatcher: Dispatcher, leader: LeaderPolicy | None, ranks: Ranks) -> None:
    if dispatcher.config.axes and leader is not None:
        names = [axis.name for axis in dispatcher.config.axes]
        hint = "With axes, use a policy with the trait 'stateless' instead."
        raise ConfigError("axes", names, "empty with a LeaderPolicy", hint)
    graphs = dispatcher.graphs
    for key, entry in dispatcher.registry.entries.items():
        if entry.state is KeyState.DECLARED and graphs.is_ready(key):
            raise ConfigError(
                "lazy",
                True,
                "False for a dispatcher or runner that is used with ranks",
                "A capture during a step could fail on one rank only.",
            )
    if graphs.may_split:
        raise ConfigError(
            "may_split",
            True,
            "False",
            "Ranks agree on one graph per step. For a GraphRunner, omit rows_independent=True, "
            "which enables splits.",
        )
    if ranks.size == 1:
        return
    if leader is None:
        if "stateless" not in policy_traits(dispatcher.policy):
            raise ConfigError(
                "policy",
                dispatcher.policy_name,
                "a LeaderPolicy or a policy with the trait 'stateless'",
                "A policy that learns would decide differently on each rank. Pass "
                "LeaderPolicy(base, learner=...) on rank 0 and LeaderPolicy(base) on the other "
                "ranks, with a stateless base policy.",
            )
    elif leader.learner is not None and ranks.rank != 0:
        raise ConfigError(
            "learner",
            policy_name(leader.learner),
            f"None on rank {ranks.rank}",
            "Pass the learner on rank 0 of the agreement only.",
        )


def _largest_first(key: GraphKey) -> tuple[int, int, int, str]:
    own = key.descriptor
    return (-own.num_tokens, -int(key.mode), -own.num_active_loras, str(key))
