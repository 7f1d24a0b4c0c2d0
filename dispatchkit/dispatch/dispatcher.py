"""The dispatcher: a table of ready decisions in front of a policy.

A step costs four sign tests, four list indexings and one comparison. The policy is asked on first
use of a cell; any change that could affect an answer empties exactly the cells it could affect.
Four techniques keep branches off that path:

* an empty cell holds ``EMPTY``, whose bound no number of requests meets, so that "not
  filled" and "too many requests" leave through the same comparison;
* if a batch has more requests than its cell's decision holds for, a separate dictionary has the
  decision for that number;
* a row that was never used is an empty tuple, and a batch above the table exceeds the end of its
  row, so both raise IndexError;
* a one-shot decision waits beside an emptied cell. The next step finds the cell empty,
  puts the steady decision back and takes the one-shot one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from dispatchkit.dispatch.acceptance import Proposal, raised
from dispatchkit.dispatch.axes import (
    PlainView,
    answer_with_axes,
    is_outside,
    outcome_without_axes,
    update_with_axes,
    without_axes,
)
from dispatchkit.dispatch.cells import (
    Cell,
    batch_of_cell,
    cell_of_batch,
    cell_of_call,
    names_of,
)
from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.dispatch.decision import (
    ANY_NUM_REQS,
    CellUpdate,
    Decision,
    Outcome,
    Part,
    Reason,
)
from dispatchkit.dispatch.epochs import Epoch, Epochs
from dispatchkit.dispatch.faults import PolicyFaults
from dispatchkit.dispatch.policy import GraphView, Policy, PolicyParts, Readiness, pace_fault
from dispatchkit.dispatch.table import EMPTY, MAX_COLD_CELLS, Row, Table
from dispatchkit.errors import DescriptorError, NoGraphError, PolicyError, counted
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.checks import whole_number
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import ALLOWED_MODES, RuntimeMode
from dispatchkit.registry import GraphRegistry, RegistryEvent

_ALL_MODES = frozenset({RuntimeMode.PIECEWISE, RuntimeMode.FULL})


class Dispatcher:
    """Choose by a policy, for every batch, the graph to replay or eager.

    Args:
        policy: Any object with ``declare`` and ``decide``.
        config: Sizes, limits and modes.
        registry: Holds the keys and their graphs, and gets the policy's keys; a new one by default.
        modes: Runtime modes the executor supports (without PIECEWISE if it cannot split).
        lazy: Declared keys may be dispatched, too; the executor captures them on first use.
        strict: Raise on an invalid answer of the policy, rather than running eager.
        may_split: The executor can split a mixed batch over several graphs (``Decision.split``).
        origin: Where the policy comes from, for error messages.
        bind: Called once for each decision put into the table; its result becomes
            ``Decision.plan``. This is where the executor prepares a step. It may be set later as an
            attribute, before the first ``dispatch``.
        on_swap: Called after a policy or configuration took effect, with the policy's name, the
            previous policy's name (None for the first) and the epoch. No lock is held.
        on_fault: Called with a fault of the policy, the tokens of the batch (None if there is no
            batch) and the epoch, before the call that encountered it returns or raises. The step
            waits; no lock of the dispatcher is held.

    Raises:
        PolicyError: The policy raises, declares something other than keys, or answers a trial batch
            with a decision that breaks a hard constraint.

    Attributes:
        registry: The keys and their graphs.
        config: The configuration in force.
        graphs: The view of the registry that the policy in force has.

    Thread safety: ``dispatch`` may be called from any thread.
    """

    def __init__(
        self,
        policy: Policy,
        config: DispatchConfig,
        *,
        registry: GraphRegistry | None = None,
        modes: Iterable[RuntimeMode] = _ALL_MODES,
        lazy: bool = False,
        strict: bool = False,
        may_split: bool = False,
        origin: str = "",
        bind: Callable[[Decision, Batch], Any] | None = None,
        on_swap: Callable[[str, str | None, int], None] | None = None,
        on_fault: Callable[[PolicyError, int | None, int], None] | None = None,
    ) -> None:
        self.registry: GraphRegistry = GraphRegistry() if registry is None else registry
        self._modes = frozenset(modes)
        self._readiness = Readiness(lazy=lazy)
        self.bind, self._on_swap = bind, on_swap
        # Shared with the registry: its listeners are called here under the lock, and a swap changes
        # the registry.
        self._lock = self.registry.lock
        self._revisions = itertools.count(1)
        self._faults = PolicyFaults(strict=strict, on_fault=on_fault)
        self._may_split = may_split
        self._epochs = Epochs(
            self.registry,
            self._modes,
            self._readiness.allows,
            self._revisions,
            may_split=may_split,
        )
        self._serve(self._epochs.install(self.propose(policy, config, origin), 0))
        self._unsubscribe = self.registry.subscribe(_weakly(self._on_registry_event))
        if on_swap is not None:
            on_swap(self.policy_name, None, 0)

    # -- the step -----------------------------------------------------------------------

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
    ) -> Decision:
        """Return the decision for a batch.

        Args:
            num_tokens: Unpadded tokens, 0 to ``max_num_tokens``; 0 is always eager.
            num_reqs: Requests in the batch; 0 if unknown.
            uniform: False for a mixed batch, True for a uniform decode batch: every request is past
                its prompt and has exactly the configured query length; with several query lengths,
                1 + its index. A batch with the last chunk of a prompt is mixed, whatever the
                chunk's length. Whether ``num_reqs`` times the query length equals the tokens is not
                checked, since engines pad requests and drop rows before they call.
            loras: Active adapters; with axes, ``DispatchConfig.variant`` of the adapters and the
                value of each axis.
            ceiling: Highest runtime mode allowed, or a code of ``allowed_modes_code``.
                Cascade attention allows at most PIECEWISE.

        Returns:
            A ready, shared decision; nothing is allocated.

        Raises:
            DescriptorError: A fact is negative, above its limit or contradicts another.
            NoGraphError: No graph serves the batch and eager is not allowed.
        """
        # A negative index would silently read the table from its end. The bitwise or of two ints is
        # negative if either is; for other types it raises TypeError.
        try:
            if num_tokens | num_reqs >= 0 and uniform >= 0 and loras >= 0 and ceiling >= 0:
                decision: Decision = self._rows[ceiling][uniform][loras][num_tokens]
                if num_reqs <= decision.max_num_reqs:
                    return decision
                if decision is not EMPTY:
                    return self._by_reqs[ceiling, uniform, loras, num_tokens][num_reqs]
        except (LookupError, TypeError, ValueError, OverflowError, RuntimeError):
            pass  # an unused row, a batch above the table, or a wrong type: handled below
        return self._dispatch_cold(num_tokens, num_reqs, uniform, loras, ceiling)

    def dispatch_anew(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
    ) -> Decision:
        """Return the decision for a batch whose table cell turned out to be outdated.

        Changes empty the cells they affect; an interrupt in the middle may leave one filled.

        Raises:
            DescriptorError: As ``dispatch``.
            NoGraphError: As ``dispatch``.
        """
        with self._lock:
            if num_tokens <= self.config.max_num_tokens:
                cell = cell_of_call(self.config, num_tokens, num_reqs, uniform, loras, ceiling)
                self._epoch.table.forget_steady(cell)
        return self.dispatch(num_tokens, num_reqs, uniform, loras, ceiling)

    def row(self, uniform: int = 0, loras: int = 0, ceiling: int = 2) -> Row:
        """Return the table row for one kind of batch, indexed by number of tokens.

        For engines that cannot afford a call. An entry is what ``dispatch`` returns for a batch of
        up to ``max_num_reqs`` requests. For other batches ``dispatch`` must be called, which fills
        the row. The bound is -1 if nothing is decided yet or a one-shot decision waits. Never index
        with a negative number of tokens; a number above ``max_num_tokens`` raises IndexError.

        The row follows every change until ``swap``, which replaces the rows.

        Args:
            uniform: As for ``dispatch``.
            loras: As for ``dispatch``.
            ceiling: As for ``dispatch``.

        Raises:
            DescriptorError: A number is negative or above its limit.
        """
        with self._lock:
            cell = cell_of_call(self.config, 0, 0, uniform, loras, ceiling)
            row: Row = self._epoch.table.row(*cell[:3])
            return row

    def _dispatch_cold(
        self, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
    ) -> Decision:
        try:
            with self._lock:
                # Under the lock, so that limits and table belong to the same epoch.
                table = self._epoch.table
                if not self.config.has_token_limit and self._is_above_table(num_tokens):
                    return self._decide_beyond(num_tokens, num_reqs, uniform, loras, ceiling)
                cell = cell_of_call(self.config, num_tokens, num_reqs, uniform, loras, ceiling)
                decision = table.take_one_shot(cell, num_reqs)
                if decision is None:
                    decision = table.get(cell)
                    if decision is EMPTY:
                        decision = self._fill(table, cell)
                    if num_reqs > decision.max_num_reqs:
                        decision = self._decide_by_reqs(table, cell, int(num_reqs))
                if decision.key is None and RuntimeMode.NONE not in ALLOWED_MODES[cell[0]]:
                    batch = batch_of_cell(self.config, cell, num_reqs)
                    raise self._no_graph(batch, decision.reason)
                return decision
        finally:
            self._faults.report()

    def _is_above_table(self, num_tokens: Any) -> bool:
        """Return whether a batch has more tokens than the table."""
        tokens = whole_number(num_tokens)
        return tokens is not None and tokens > self.config.max_num_tokens

    def _decide_beyond(
        self, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
    ) -> Decision:
        """Return an eager decision for a batch above every size, without asking a policy.

        Raises:
            DescriptorError: Another number is invalid.
            NoGraphError: Eager is not allowed.
        """
        facts = (num_tokens, num_reqs, uniform, loras, ceiling)
        found = self._beyond.get(facts)
        if found is None:
            batch = self.batch(*facts)
            if not batch.allows(RuntimeMode.NONE):
                raise self._no_graph(batch, Reason.ABOVE_LARGEST)
            found = self._bound(Decision.eager(Reason.ABOVE_LARGEST), batch)
            if len(self._beyond) >= MAX_COLD_CELLS:
                self._beyond.clear()
            self._beyond[facts] = found
        return found

    # -- learning -----------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> None:
        """Pass an outcome to the policy and apply the updates it returns to the table.

        Outcomes of an earlier policy's decisions are ignored, as are those of batches outside the
        configuration in force.
        """
        if not self._epoch.proposal.parts.learns:
            return
        try:
            with self._lock:
                if 0 < outcome.decision.revision < self._epoch.first_revision:
                    return
                try:
                    cell_of_batch(self.config, outcome.batch)
                except DescriptorError:
                    return  # outside the limits since a swap; no answer could be used
                self._learn(outcome)
        finally:
            self._faults.report()

    def _learn(self, outcome: Outcome) -> None:
        learn = self._epoch.proposal.parts.observe
        if learn is None:  # a swap happened meanwhile
            return
        axes = outcome.batch.axes
        if self._epoch.proposal.adds_axes:
            outcome = outcome_without_axes(outcome)
        try:
            for update in learn(outcome) or ():
                if not isinstance(update, CellUpdate):
                    raise self._fault(
                        "observe", f"returned {update!r}; only CellUpdates are allowed."
                    )
                self.update(
                    update_with_axes(update, axes) if self._epoch.proposal.adds_axes else update
                )
        except PolicyError as error:
            self._blame(error)
        except Exception as error:  # noqa: BLE001 - a policy may raise anything; it is named
            fault = self._fault("observe", raised(error))
            fault.__cause__ = error
            self._blame(fault)

    def update(self, update: CellUpdate) -> None:
        """Change one cell: set a steady or one-shot decision, or ask again.

        Asking again may cover a range of sizes.

        A steady decision is served after the one-shot decisions that wait. A choice that can no
        longer run (for example, because its graph was evicted since the step it was learned from)
        is not a fault: for a steady decision the policy is asked again, a one-shot decision is
        dropped.

        Raises:
            DescriptorError: The batch is impossible or outside the configured limits.
            PolicyError: The decision breaks a hard constraint; the cell stays as it was.
        """
        batch, answer = update.batch, update.decision
        with self._lock:
            table = self._epoch.table
            cell = cell_of_batch(self.config, batch)
            if answer is not None and self._is_lost(answer):
                answer = None
            if answer is None:
                if not update.one_shot:
                    table.forget_steady(cell, update.up_to)
                elif update.decision is None:
                    table.drop_one_shots(cell)
                return
            problem = broken_constraint(answer, batch, self.graphs)
            if problem is None and answer.key is None and not batch.allows(RuntimeMode.NONE):
                problem = (
                    f"chose eager, but this batch allows only {names_of(batch.allowed_modes)}."
                )
            if problem is not None:
                raise self._fault("observe", problem, answer)
            decision = self._bound(answer, batch, one_shot=update.one_shot)
            if update.one_shot:
                table.put_one_shot(cell, decision)
            else:
                table.forget_steady(cell)
                table.put(cell, decision)

    # -- changes ------------------------------------------------------------------------

    def swap(
        self, policy: Policy | None = None, config: DispatchConfig | None = None, origin: str = ""
    ) -> int:
        """Install another policy or configuration with an empty table: a new epoch.

        Steps that already have their decision finish under it. If the new policy is refused, the
        old one stays in force.

        Returns:
            The number of the new epoch.
        """
        with self._lock:
            now = self._epoch.proposal
            origin = now.origin if policy is None else origin
            new_policy = now.policy if policy is None else policy
            new_config = now.config if config is None else config
            proposal = self.propose(new_policy, new_config, origin)
            epoch = self.epoch + 1
            self._serve(self._epochs.install(proposal, epoch))
        if self._on_swap is not None:
            self._on_swap(proposal.parts.name, now.parts.name, epoch)
        return epoch

    def propose(self, policy: Policy, config: DispatchConfig, origin: str = "") -> Proposal:
        """Try a policy and configuration; return a proposal that may be installed.

        Nothing changes here. The policy declares and decides in the trial, so it must not be the
        object in force.

        Raises:
            PolicyError: The policy is refused.
        """
        return self._epochs.propose(policy, config, origin)

    def reserve(self, proposal: Proposal) -> list[GraphKey]:
        """Declare a proposal's keys, hidden from the policy in force; return the new ones.

        They can be captured from now on, but are neither chosen nor shown to the policy.
        """
        with self._lock:
            return self._epochs.reserve(proposal)

    def install(self, proposal: Proposal) -> list[GraphKey]:
        """Install a proposal with an empty table, as a new epoch.

        ``on_swap`` is not called here; the caller calls it once it holds no lock.

        Returns:
            The keys that earlier policies declared and this one does not. They are still in the
            registry, hidden; the caller must forget them.
        """
        with self._lock:
            retired = self._epochs.retire(proposal)
            self._serve(self._epochs.install(proposal, self.epoch + 1))
        return [key for key in retired if key in self.registry]

    def show_all(self) -> None:
        """Stop hiding keys, after a proposal was dropped or retired keys were forgotten."""
        with self._lock:
            self._epochs.show_all()

    def set_lazy(self, lazy: bool) -> None:
        """Set whether keys without a graph may be dispatched; all cells are decided again."""
        with self._lock:
            self._readiness.lazy = lazy
            self.graphs.num_changes += 1
            for mode in _ALL_MODES:
                self._epoch.table.invalidate(mode, self.config.max_num_tokens)

    def close(self) -> None:
        """Stop listening to the registry."""
        self._unsubscribe()

    # -- reading ------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._epoch.proposal.policy

    @property
    def policy_parts(self) -> PolicyParts:
        """The policy in force, with its optional parts."""
        return self._epoch.proposal.parts

    @property
    def policy_name(self) -> str:
        """The name of the policy in force."""
        return self._epoch.proposal.parts.name

    @property
    def policy_origin(self) -> str:
        """The distribution and version the policy comes from, if known."""
        return self._epoch.proposal.origin

    @property
    def pace(self) -> int:
        """Factor, at least 1, by which fewer steps than usual are measured for the policy.

        Raises:
            PolicyError: In strict mode, the policy's ``pace`` is not such a number.
        """
        pace = self.policy_parts.pace
        problem = pace_fault(pace)
        if not problem:
            return int(pace)
        try:
            with self._lock:
                self._blame(self._fault("pace", problem, pace))
        finally:
            self._faults.report()
        return 1

    @property
    def num_policy_errors(self) -> int:
        """How many faults there were: invalid answers and exceptions of policies."""
        return self._faults.count

    @property
    def modes(self) -> frozenset[RuntimeMode]:
        """Runtime modes the executor supports."""
        return self._modes

    @property
    def lazy(self) -> bool:
        """Whether declared keys may be dispatched, to be captured on first use."""
        return self._readiness.lazy

    @property
    def epoch(self) -> int:
        """Number of the table in force; grows with every swap."""
        return self._epoch.table.epoch

    @property
    def num_filled_cells(self) -> int:
        """Number of cells decided in this epoch."""
        return self._epoch.table.num_filled

    def batch(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
        *,
        any_size: bool = False,
    ) -> Batch:
        """Return the Batch that a policy sees for the arguments of ``dispatch``.

        Args:
            num_tokens: As for ``dispatch``, like the next four.
            num_reqs: Requests in the batch.
            uniform: Kind of batch.
            loras: Active adapters.
            ceiling: Highest runtime mode allowed.
            any_size: Allow more tokens than ``max_num_tokens``, to explain such a batch.

        Raises:
            DescriptorError: A fact is negative, above its limit or contradicts another.
        """
        config = self.config
        any_size = any_size or not config.has_token_limit
        if not (any_size and self._is_above_table(num_tokens)):
            cell = cell_of_call(config, num_tokens, num_reqs, uniform, loras, ceiling)
            return batch_of_cell(config, cell, num_reqs)
        most = config.max_num_tokens
        reqs = whole_number(num_reqs)
        if reqs is not None and most < reqs <= num_tokens:
            num_reqs = reqs if config.has_request_limit else most
        cell = cell_of_call(config, most, num_reqs, uniform, loras, ceiling)
        batch = batch_of_cell(config, cell, 0)
        return attrs.evolve(batch, num_tokens=int(num_tokens), num_reqs=reqs or None)

    def decide(self, batch: Batch) -> Decision:
        """Ask the policy anew for a batch, within the constraints, without the table.

        Raises:
            DescriptorError: It is not a Batch, or outside the configured limits.
        """
        if not isinstance(batch, Batch):
            raise DescriptorError("batch", batch, "a Batch", "Dispatcher.batch(...) returns one.")
        if not self._reason_for_all(batch):
            cell_of_batch(self.config, batch)
        try:
            with self._lock:
                return self._limited(self._decide(batch), batch)
        finally:
            self._faults.report()

    def foresee(self, batch: Batch) -> tuple[Decision, PolicyError | None]:
        """Return the decision that a batch's next step would get, and the policy's fault if any.

        Nothing changes: no cell is filled, no one-shot decision is taken, and no fault is counted
        or warned about.

        Raises:
            DescriptorError: The batch is impossible or outside the configured limits.
        """
        num_reqs = batch.num_reqs or 0
        with self._lock:
            if reason := self._reason_for_all(batch):
                return Decision.eager(reason), None
            cell = cell_of_batch(self.config, batch)
            known = self._epoch.table.peek(cell, num_reqs)
            if known is not None:
                return known, None
            try:
                # As when a cell is filled: without requests first, then with them.
                anyhow = batch_of_cell(self.config, cell, 0)
                decision = self._limited(self._ask(anyhow), anyhow)
                if num_reqs > decision.max_num_reqs:
                    decision = self._limited(self._ask(batch), batch)
            except PolicyError as fault:
                return Decision.eager(Reason.POLICY_ERROR), fault
            return decision, None

    # -- inside -------------------------------------------------------------------------

    def _serve(self, epoch: Epoch) -> None:
        """Make steps read the table of an epoch."""
        self._epoch: Epoch = epoch
        self._beyond: dict[Any, Decision] = {}
        # Stored outside the epoch too: it saves steps and refills an attribute lookup.
        self.config: DispatchConfig = epoch.proposal.config
        self.graphs: GraphView = epoch.graphs
        self._by_reqs = epoch.table.by_reqs
        self._rows = epoch.table.rows  # last, and atomic: readers see either epoch

    def _fill(self, table: Table, cell: Cell) -> Decision:
        batch = batch_of_cell(self.config, cell, 0)
        decision = self._bound(self._decide(batch), batch)
        # If eager is not allowed, a miss is not stored: it raises each time.
        if decision.key is not None or batch.allows(RuntimeMode.NONE):
            table.put(cell, decision)
        return decision

    def _decide_by_reqs(self, table: Table, cell: Cell, num_reqs: int) -> Decision:
        """Decide for more requests than the cell's decision holds for; stored up to a bound."""
        decision = table.get_by_reqs(cell, num_reqs)
        if decision is None:
            batch = batch_of_cell(self.config, cell, num_reqs)
            decision = self._bound(self._decide(batch), batch)
            if decision.key is not None or batch.allows(RuntimeMode.NONE):
                table.put_by_reqs(cell, num_reqs, decision)
        return decision

    def _reason_for_all(self, batch: Batch) -> str:
        """Return why a batch runs eager under any policy, which is not asked; empty if it is."""
        if batch.num_tokens == 0:
            return Reason.EMPTY_BATCH
        if not self.config.has_token_limit and self._is_above_table(batch.num_tokens):
            return Reason.ABOVE_LARGEST
        return Reason.OUTSIDE_AXIS if is_outside(batch) else ""

    def _decide(self, batch: Batch) -> Decision:
        if reason := self._reason_for_all(batch):
            return Decision.eager(reason)
        try:
            return self._ask(batch)
        except PolicyError as fault:
            self._blame(fault, batch.num_tokens)
            return Decision.eager(Reason.POLICY_ERROR)

    def _ask(self, batch: Batch) -> Decision:
        """Return the policy's answer if it is valid; raise PolicyError if not."""
        try:
            proposal = self._epoch.proposal
            if proposal.adds_axes:
                view = PlainView(self.graphs, batch.axes)
                answer = proposal.parts.policy.decide(without_axes(batch), view)
                answer = None if answer is None else answer_with_axes(answer, batch.axes)
            else:
                answer = proposal.parts.policy.decide(batch, self.graphs)
        except Exception as error:
            raise self._fault("decide", raised(error, batch)) from error
        if answer is None:
            return Decision.eager(Reason.NOT_MINE)
        problem = broken_constraint(answer, batch, self.graphs)
        if problem is not None:
            raise self._fault("decide", problem, answer)
        return answer

    def _fault(self, hook: str, problem: str, value: Any = None) -> PolicyError:
        return PolicyError(self.policy_name, hook, problem, origin=self.policy_origin, value=value)

    def _blame(self, error: PolicyError, num_tokens: int | None = None) -> None:
        self._faults.add(error, num_tokens, self.epoch)

    def _bound(self, decision: Decision, batch: Batch, *, one_shot: bool = False) -> Decision:
        """Bind an answer to the cell of a batch; the executor prepares its plan."""
        # One-shot before the plan is made, which then measures every step.
        decision = self._limited(decision, batch, next(self._revisions), one_shot=one_shot)
        return decision if self.bind is None else decision.with_plan(self.bind(decision, batch))

    def _limited(
        self, decision: Decision, batch: Batch, revision: int = 0, *, one_shot: bool = False
    ) -> Decision:
        """Return an answer with its cell's tokens and the number of requests it holds for."""
        bound = ANY_NUM_REQS
        if decision.parts:
            bound = _most_reqs(decision.parts)
        elif decision.key is not None and decision.key.descriptor.num_reqs is not None:
            bound = decision.key.descriptor.num_reqs
        # Numbers above the limit fail the same comparison and are then validated.
        bound = min(bound, decision.max_num_reqs, batch.num_tokens, self.config.max_num_seqs)
        policy = decision.policy or self._epoch.proposal.parts.name
        return decision.at(batch.num_tokens, bound, policy, revision, one_shot)

    def _is_lost(self, answer: Any) -> bool:
        """Distinguish a choice that was possible before from one that never was."""
        keys = answer.keys if isinstance(answer, Decision) else ()
        return any(key in self.graphs and not self.graphs.is_ready(key) for key in keys)

    def _on_registry_event(self, event: RegistryEvent) -> None:
        """Empty the cells that name the key or could choose it."""
        with self._lock:
            if event.key in self._epochs.hidden:
                return
            reach = event.key.num_tokens
            if self._may_split:  # it may serve a part of any batch
                reach = self.config.max_num_tokens
            self._epoch.table.invalidate(event.key.mode, reach)

    def _no_graph(self, batch: Batch, reason: str) -> NoGraphError:
        near = [
            str(key)
            for mode in sorted(batch.allowed_modes, reverse=True)
            if mode is not RuntimeMode.NONE
            for key in itertools.islice(self.graphs.covering(batch, mode), 1)
        ]
        size, allowed = counted(batch.num_tokens, "token"), names_of(batch.allowed_modes)
        return NoGraphError(
            f"No graph for {size} ({reason}), and only {allowed} may run. "
            f"Nearest: {'; '.join(near) or 'none'}. Allow NONE, or capture a graph for it.",
            reason=reason,
            nearest=tuple(near),
        )


def _most_reqs(parts: Iterable[Part]) -> int:
    """Return for how many requests a split holds: a part has at most one per row."""
    limits = (
        part.key.descriptor.num_reqs
        for part in parts
        if part.key.descriptor.num_reqs is not None
        and part.key.descriptor.num_reqs < part.num_tokens
    )
    return min(limits, default=ANY_NUM_REQS)


def _weakly(listener: Callable[[RegistryEvent], None]) -> Callable[[RegistryEvent], None]:
    """Return a listener that does not keep the owner of a method alive.

    A dispatcher references its registry. If the registry referenced it in turn, graphs would
    outlive their runner until a garbage collection.
    """
    method = weakref.WeakMethod(listener)

    def call(event: RegistryEvent) -> None:
        found = method()
        if found is not None:
            found(event)

    return call
