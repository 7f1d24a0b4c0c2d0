"""RankedDispatcher: decide a step from the facts of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from dispatchkit.dispatch import Decision, Dispatcher, policy_name, policy_traits
from dispatchkit.errors import ConfigError, NoGraphError, PolicyError, RankError
from dispatchkit.keys import GraphKey, RuntimeMode, check_count
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
    """Decide together with the other ranks: the same mode and padded size on all of them.

    The policy determines how the ranks agree:

    * A policy with the trait ``stateless``: each rank decides for its own batch. The most
      tokens and the most restrictive mode of any rank are the outcome, and every rank decides
      again for these.
    * A ``LeaderPolicy``: the ranks decide once, for the most tokens of any rank, from a table
      that only the leader changes. Its changes are distributed at epochs.

    Every rank creates one at the same point; creation compares everything that affects
    decisions (configuration, policy, dialect, sizes, versions).

    Args:
        dispatcher: Decides on this rank. It must not be lazy, because a graph captured in the
            middle of a step may fail on one rank only. Its graphs may be captured already, or
            later with ``capture``.
        ranks: The agreement.
        same_batches: Every rank gets the same batches, as in tensor parallelism with one
            scheduler. With a stateless policy nothing can differ, so steps exchange nothing.
        check_every: With ``same_batches``, exchange in every step whose number is a multiple
            of this. The exchange finds batches that differ, merges lost keys and distributes
            the leader's table. 0: never. By default 0; with a LeaderPolicy, ``epoch_steps``.
        epoch_steps: With a LeaderPolicy, the minimum number of steps between two epochs.
        switches: Names of further yes-or-no choices that change the collectives inside a
            step; ``agree`` takes and returns them as bits in this order.
        facts: Further facts that must be equal on all ranks.

    Attributes:
        dispatcher: The dispatcher.
        ranks: The agreement.
        step: Number of steps begun on this rank.
        epoch: How often the leader's table was distributed.

    Raises:
        ConfigError: The policy learns on every rank, or the dispatcher is lazy.
        RankError: The ranks are set up differently, or one is missing.

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
        self.dispatcher, self.ranks = dispatcher, ranks
        self.step = self.epoch = 0
        self._last_epoch, self._epoch_steps = 0, epoch_steps
        self._same_batches, self._check_every = same_batches, check_every
        self._switches = tuple(switches)
        self._compared = dict(facts or {})
        # Checksum of the batches since the last exchange, if all ranks must have the same ones.
        self._history = 0
        self._keys = SharedKeys(dispatcher)
        self.renew()

    def renew(self) -> None:
        """Continue after a swap; all ranks swap and call it at the same point.

        Policy and configuration are compared as at creation. Until then a rank that was
        swapped raises in its next step.

        Raises:
            ConfigError: The policy learns on every rank, or the dispatcher is lazy.
            RankError: Policy or configuration differ between ranks, or a rank does not arrive.
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
            ranks.fail(error)  # otherwise the other ranks would wait for this one
            raise
        # Steps between exchanges; 0 if steps exchange nothing.
        self._every = check_every if self._same_batches else 1
        if ranks.size == 1 and self._leader is None:
            self._every = 0
        # What this rank runs in a step without an exchange.
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
        # A swap replaces the object, so a new one was not part of the last comparison.
        self._graphs = dispatcher.graphs
        self.sync_keys()

    # -- the step -----------------------------------------------------------------------

    @property
    def needs_agreement(self) -> bool:
        """Whether steps exchange anything at all."""
        return self._every != 0 and self.ranks.size > 1

    @property
    def withheld(self) -> dict[GraphKey, dict[int, str]]:
        """Keys not used here because other ranks (by index) cannot run them, and why."""
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
        """Return the facts that all ranks run this step under.

        Every rank calls it in every step, an idle rank with 0 tokens; if the result has
        tokens, an idle rank runs a dummy batch of that size. Pass the first five fields to
        ``dispatch`` of the dispatcher, or of the runner that owns it, exactly once.

        Args:
            num_tokens: Unpadded tokens of this rank.
            num_reqs: Requests; 0 if unknown.
            uniform: Query class, as for ``Dispatcher.dispatch``.
            loras: Active adapters; with axes, ``DispatchConfig.variant`` of the adapters and
                this rank's value of each axis.
            ceiling: Code of the modes that this rank's batch allows.
            switches: Bits of the switches that are on for this rank; all by default.

        Raises:
            DescriptorError: A fact is outside the configured limits. Nothing has been
                exchanged, so the step can be retried.
            NoGraphError: The ranks allow no common mode; every rank raises it.
            PolicyError: In strict mode, the policy failed on this rank. The agreement has ended.
            RankError: A rank is late, gone or has raised, or this one was swapped without
                ``renew``; the agreement has ended.
        """
        if self.dispatcher.graphs is not self._graphs:
            raise self._swapped()
        every = self._every
        if every != 1 and (not every or (self.step + 1) % every):
            return self._alone(num_tokens, num_reqs, uniform, loras, ceiling, switches)
        while True:
            mode = self._own_mode(num_tokens, num_reqs, uniform, loras, ceiling)
            row = self._facts.row(num_tokens, num_reqs, uniform, loras, ceiling, mode, switches)
            row.append(self._news())
            merged = self.ranks.exchange(row, mark=self._history, step=self.step + 1)
            if not merged[-1]:
                break
            self._apply_news(merged[-1])
        agreed = self._facts.merge(merged)
        self.step += 1
        if self._leader is not None:
            self._leader.is_listening = True
        return agreed

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
    ) -> Decision:
        """Return the decision that all ranks run this step under.

        ``num_tokens`` of the decision is the agreed number, at least this rank's own.

        Raises:
            DescriptorError: As for ``agree``.
            NoGraphError: As for ``agree``.
            RankError: As for ``agree``.
        """
        agreed = self.agree(num_tokens, num_reqs, uniform, loras, ceiling)
        return self.dispatcher.dispatch(*agreed[:5])

    # -- graphs -------------------------------------------------------------------------

    def capture(
        self, capture: Callable[[GraphKey], object], keys: Iterable[GraphKey] | None = None
    ) -> dict[GraphKey, dict[int, str]]:
        """Capture keys on all ranks in the same order, largest first, with a barrier after each.

        Args:
            capture: Captures one key and records it in the registry. It is also called for a
                key that is captured here but not on another rank. If it raises, the key fails.
            keys: The keys to capture, equal on all ranks; by default all declared keys.

        Returns:
            The keys that are not used because some rank could not capture them, with those
            ranks (by index) and their reasons.
        """
        registry = self.dispatcher.registry
        self._keys.give_all_back()
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
            except Exception as error:  # noqa: BLE001 - whatever a step raises stays in its key
                registry.failed(key, f"{type(error).__name__}: {error}")
        self.ranks.exchange((), Phase.CAPTURE, label="the end of the captures", mark=len(order))
        lost = self.sync_keys()
        return {key: lost[key] for key in order if key in lost}

    def sync_keys(self) -> dict[GraphKey, dict[int, str]]:
        """Exchange which graphs each rank has, and withhold those that a rank lacks.

        All ranks call it at the same point. Steps with an exchange do this automatically; if
        steps exchange nothing, call it after you enable or disable keys.

        Returns:
            The keys that some rank cannot run, with the ranks (by index) and their reasons.
        """
        lost = self._keys.merge_reports(self.ranks.gather(self._keys.report()))
        if self._leader is not None:
            # A key that changed on one rank alone emptied cells there, and dropped one-shot
            # decisions with them; now all ranks start again from an empty table.
            self.dispatcher.set_lazy(False)
        return lost

    def close(self) -> None:
        """Stop listening to the registry; the caller still has to close the agreement."""
        self._keys.close()

    # -- inside -------------------------------------------------------------------------

    def _news(self) -> int:
        """Return what this rank must exchange before the step, as bits."""
        leader = self._leader
        if leader is not None and leader.has_news and self._is_epoch_due():
            return _TABLE
        return _LOST_KEYS if self._keys.has_news else 0

    def _is_epoch_due(self) -> bool:
        return self.step - self._last_epoch >= self._epoch_steps

    def _apply_news(self, news: int) -> None:
        """Exchange the news of all ranks: keys first, then the table, which refers to them."""
        self.sync_keys()
        if news == _TABLE and self._leader is not None:
            is_leader = self.ranks.rank == 0
            text = self.ranks.share(self._leader.take_news() if is_leader else "")
            self._leader.put_news(text, self.dispatcher)
            self._last_epoch = self.step
            self.epoch += 1

    def _own_mode(
        self, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
    ) -> int:
        """Return the mode that this rank would run in on its own."""
        if self._leader is not None:
            # Dispatching from the table here would consume one-shot decisions on this rank only.
            self.dispatcher.batch(num_tokens, num_reqs, uniform, loras, ceiling)
            return _FULL
        try:
            return self.dispatcher.dispatch(num_tokens, num_reqs, uniform, loras, ceiling).mode
        except NoGraphError:
            # The other ranks wait: the row holds what this batch allows, so all of them see it.
            return _FULL
        except PolicyError as error:
            self.ranks.fail(error)  # the same batch would raise again, so report why
            raise

    def _swapped(self) -> RankError:
        error = RankError(
            "Policy or configuration of this rank were swapped since the ranks compared what "
            "decides. Swap on all ranks at the same point, and call renew() there.",
            step=self.step,
            reason="differs",
        )
        self.ranks.fail(error)
        return error

    def _alone(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform: int,
        loras: int,
        ceiling: int,
        switches: int,
    ) -> AgreedBatch:
        """Return this rank's own facts, in a step where nothing can differ."""
        if self._keys.has_news and self.ranks.size > 1:
            error = RankError(
                "A graph of this rank changed, and ranks exchange nothing in this step, so the "
                "others would still use it. After such a change, call sync_keys() on all "
                "ranks, or set check_every.",
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
        raise ConfigError("axes", names, "none with a LeaderPolicy")
    graphs = dispatcher.graphs
    for key, entry in dispatcher.registry.entries.items():
        if entry.state is KeyState.DECLARED and graphs.is_ready(key):
            raise ConfigError(
                "dispatcher",
                "lazy",
                "one that captures before it serves",
                "A graph captured in the middle of a step may fail on only one rank.",
            )
    if graphs.may_split:
        raise ConfigError(
            "dispatcher",
            "may_split",
            "one whose batches are not split",
            "Ranks agree on one graph per step: do not set rows_independent.",
        )
    if ranks.size == 1:
        return
    if leader is None:
        if "stateless" not in policy_traits(dispatcher.policy):
            raise ConfigError(
                "policy",
                dispatcher.policy_name,
                "one with the trait 'stateless', or a LeaderPolicy",
                "Other ranks do not know what it learns on one rank: wrap it in a LeaderPolicy.",
            )
    elif leader.learner is not None and ranks.rank != 0:
        raise ConfigError(
            "learner",
            policy_name(leader.learner),
            f"None on rank {ranks.rank}",
            "Only rank 0 of the agreement learns.",
        )


def _largest_first(key: GraphKey) -> tuple[int, int, int, str]:
    own = key.descriptor
    return (-own.num_tokens, -int(key.mode), -own.num_active_loras, str(key))
