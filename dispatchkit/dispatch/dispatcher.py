"""Dispatcher: a table of decisions in front of a policy.

The table has one row for each kind of batch, and a row has one cell for each number of tokens. The
policy decides on first use of a cell. Changes, such as the capture of a graph, empty the cells
whose decisions they could affect. If the cell is filled, ``dispatch`` costs four sign tests, four
list lookups and one comparison. Four techniques avoid further branches on this hot path:

* An empty cell holds ``EMPTY``, whose limit on the number of requests is -1. Empty cells and
  batches with too many requests therefore fail the same comparison.
* If a batch has more requests than the decision in its cell allows, the decision for this batch is
  in a separate dictionary.
* An unused row is an empty tuple. Indexing it, or indexing a list beyond its end, raises
  IndexError.
* While a one-shot decision waits for the next step, its cell is empty. That step therefore uses the
  cold path, which returns the one-shot decision. After the last one-shot decision, the cold path
  restores the cell's steady decision, which serves all other steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from dispatchkit.dispatch.acceptance import Proposal
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
    format_modes,
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
from dispatchkit.errors import (
    ConfigError,
    DescriptorError,
    NoGraphError,
    PolicyError,
    counted,
    describe_exception,
)
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.checks import check_flag, check_instance, whole_number
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import ALLOWED_MODES, RuntimeMode, parse_modes
from dispatchkit.registry import GraphRegistry, RegistryEvent

_ALL_MODES = frozenset({RuntimeMode.PIECEWISE, RuntimeMode.FULL})


class Dispatcher:
    """A cache of a policy's decisions: for each batch, a graph to replay, or eager.

    Args:
        policy: Any object with ``declare`` and ``decide``.
        config: Sizes, limits and modes.
        registry: The registry in which the policy's keys are declared; a new one by default.
        modes: Runtime modes that the executor supports; omit PIECEWISE if the executor cannot split
            steps.
        lazy: Whether keys without a graph may be dispatched, so that the executor captures them on
            first use.
        strict: Whether a fault of the policy raises; otherwise the batch runs eager.
        may_split: Whether the executor can split a mixed batch over several graphs
            (``Decision.split``).
        origin: Source of the policy, for error messages.
        bind: Function with which the executor prepares a step. It is called once for each new
            decision of ``dispatch`` or ``update``, with the decision and its batch, and its result
            becomes ``Decision.plan``. It may also be set as an attribute before the first
            ``dispatch``.
        on_swap: Function called after a swap, without holding a lock. Its arguments are the
            policy's name, the previous policy's name (None for the first policy) and the epoch.
        on_fault: Function called for each fault of the policy. Its arguments are the fault, the
            number of tokens of the batch (None without a batch) and the epoch. It is called before
            the affected call returns or raises, without holding a lock of the dispatcher.

    Raises:
        ConfigError: An argument has the wrong type.
        PolicyError: The policy raises, declares an invalid key, or violates a hard constraint in a
            decision for a trial batch.

    Attributes:
        registry: The keys and their graphs.
        config: The configuration in force.
        graphs: The registry as the policy in force sees it.

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
        self.registry: GraphRegistry = check_instance(
            GraphRegistry() if registry is None else registry,
            GraphRegistry,
            "registry",
            allowed="a GraphRegistry, or None for a new one",
        )
        for name, function in (("bind", bind), ("on_swap", on_swap), ("on_fault", on_fault)):
            if function is not None and not callable(function):
                raise ConfigError(name, function, "a function, or None")
        self._modes = parse_modes(modes)
        self._readiness = Readiness(lazy=check_flag(lazy, "lazy"))
        self.bind, self._on_swap = bind, on_swap
        # Use the registry's lock, because the registry calls listeners under this lock, and a swap
        # changes the registry.
        self._lock = self.registry.lock
        self._revisions = itertools.count(1)
        self._faults = PolicyFaults(strict=check_flag(strict, "strict"), on_fault=on_fault)
        self._may_split = check_flag(may_split, "may_split")
        self._epochs = Epochs(
            self.registry,
            self._modes,
            self._readiness.allows,
            self._revisions,
            may_split=may_split,
        )
        self._activate(self._epochs.install(self.propose(policy, config, origin), 0))
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
            num_tokens: Unpadded number of tokens; an empty batch (0) never uses a graph. A number
                above ``max_num_tokens`` raises if the configuration sets ``max_num_tokens``;
                otherwise the batch runs eager.
            num_reqs: Number of requests in the batch; 0 if unknown.
            uniform: False for a mixed batch, True for a uniform decode batch. In a uniform batch,
                every request is past its prompt and has exactly the configured query length. With
                several query lengths, pass 1 + the index of the length. With ``varlen_decode``, the
                number after the last length stands for requests of varying length. A batch with the
                last chunk of a prompt is mixed, regardless of the length of the chunk. The number
                of tokens need not equal ``num_reqs`` times the query length, because engines pad
                requests and drop rows before the call.
            loras: Number of active adapters; with axes, the result of ``DispatchConfig.variant``.
            ceiling: Highest runtime mode allowed, or the result of ``allowed_modes_code``. For
                example, pass PIECEWISE for a batch with cascade attention.

        Returns:
            The stored decision object, not a copy. If the cell is filled, nothing is allocated.

        Raises:
            DescriptorError: An argument is out of range or contradicts another argument.
            NoGraphError: No graph serves the batch and eager is not allowed.
            PolicyError: In strict mode, the policy raised or its decision violates a hard
                constraint.
        """
        # A negative index would read the table from its end. The bitwise OR of two ints is negative
        # if either is negative. Floats and strings have no bitwise OR and raise TypeError.
        try:
            if num_tokens | num_reqs >= 0 and uniform >= 0 and loras >= 0 and ceiling >= 0:
                decision: Decision = self._rows[ceiling][uniform][loras][num_tokens]
                if num_reqs <= decision.max_num_reqs:
                    return decision
                if decision is not EMPTY:
                    return self._by_reqs[ceiling, uniform, loras, num_tokens][num_reqs]
        except (LookupError, TypeError, ValueError, OverflowError, RuntimeError):
            pass  # no stored decision, or an argument of an invalid type; handled below
        return self._dispatch_cold(num_tokens, num_reqs, uniform, loras, ceiling)

    def redispatch(
        self,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
    ) -> Decision:
        """Empty the cell of a batch, and return a new decision.

        Normally, changes such as the release of a graph empty the affected cells. If an exception
        interrupts a change, some cells may keep outdated decisions. This method replaces such a
        decision.

        Raises:
            DescriptorError, NoGraphError, PolicyError: As for ``dispatch``.
        """
        with self._lock:
            if num_tokens <= self.config.max_num_tokens:
                cell = cell_of_call(self.config, num_tokens, num_reqs, uniform, loras, ceiling)
                self._epoch.table.forget_steady(cell)
        return self.dispatch(num_tokens, num_reqs, uniform, loras, ceiling)

    def row(self, uniform: int = 0, loras: int = 0, ceiling: int = 2) -> Row:
        """Return the table row for a kind of batch, indexed by number of tokens.

        Engines can index the row instead of calling ``dispatch`` for each step. An entry holds for
        batches of up to ``entry.max_num_reqs`` requests. For all other batches, call ``dispatch``,
        which also fills empty cells. ``entry.max_num_reqs`` is -1 if the cell has no decision or a
        one-shot decision is waiting. Do not index with a negative number of tokens. A number above
        the configured ``max_num_tokens`` raises IndexError or, in very large tables, returns an
        entry whose ``max_num_reqs`` is -1.

        The row is kept up to date until a swap, which replaces all rows.

        Args:
            uniform: As for ``dispatch``.
            loras: As for ``dispatch``.
            ceiling: As for ``dispatch``.

        Raises:
            DescriptorError: An argument is out of range.
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
                # Under the lock, limits and table belong to the same epoch.
                table = self._epoch.table
                if not self.config.has_token_limit and self._is_above_table(num_tokens):
                    return self._decide_above_table(num_tokens, num_reqs, uniform, loras, ceiling)
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
        """Return whether a batch is too large for the table."""
        tokens = whole_number(num_tokens)
        return tokens is not None and tokens > self.config.max_num_tokens

    def _decide_above_table(
        self, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
    ) -> Decision:
        """Return an eager decision for a batch that is too large for the table.

        Raises:
            DescriptorError: An argument other than ``num_tokens`` is invalid.
            NoGraphError: Eager is not allowed.
        """
        facts = (num_tokens, num_reqs, uniform, loras, ceiling)
        found = self._above_table.get(facts)
        if found is None:
            batch = self.batch(*facts)
            if not batch.allows(RuntimeMode.NONE):
                raise self._no_graph(batch, Reason.ABOVE_LARGEST)
            found = self._bound(Decision.eager(Reason.ABOVE_LARGEST), batch)
            if len(self._above_table) >= MAX_COLD_CELLS:
                self._above_table.clear()
            self._above_table[facts] = found
        return found

    # -- learning -----------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> None:
        """Pass an outcome to the policy, and apply the updates that the policy returns.

        An outcome is ignored if its decision is from an earlier policy, or its batch is outside the
        limits in force.
        """
        if not self._epoch.proposal.parts.learns:
            return
        try:
            with self._lock:
                if 0 < outcome.decision.revision < self._epoch.first_revision:
                    return
                # A swap may have lowered the limits, and no update applies to a batch outside the
                # limits.
                if self._is_within(outcome.batch):
                    self._learn(outcome)
        finally:
            self._faults.report()

    def _is_within(self, batch: Batch) -> bool:
        """Return whether a batch is within the limits of the configuration in force."""
        try:
            cell_of_batch(self.config, batch)
        except DescriptorError:
            return False
        return True

    def _learn(self, outcome: Outcome) -> None:
        learn = self._epoch.proposal.parts.observe
        if learn is None:  # a swap happened after the check in observe
            return
        axes = outcome.batch.axes
        if self._epoch.proposal.adds_axes:
            outcome = outcome_without_axes(outcome)
        try:
            for update in learn(outcome) or ():
                if not isinstance(update, CellUpdate):
                    raise self._fault("observe", f"returned {update!r}; return only CellUpdates.")
                self.update(
                    update_with_axes(update, axes) if self._epoch.proposal.adds_axes else update
                )
        except PolicyError as error:
            self._record_fault(error)
        except Exception as error:  # noqa: BLE001 - a policy may raise anything
            fault = self._fault("observe", describe_exception(error))
            fault.__cause__ = error
            self._record_fault(fault)

    def update(self, update: CellUpdate) -> None:
        """Apply a policy's update to the table.

        An update does one of the following:

        * It sets the steady decision of a cell.
        * It adds a one-shot decision to a cell. The waiting one-shot decisions of a cell are used
          before its steady decision.
        * It drops the waiting one-shot decisions of a cell.
        * It empties a range of cells, so that the policy decides again.

        A decision whose graph cannot run now, for example because it was evicted, is not a fault,
        but is dropped. If it is a steady decision, the cell is emptied, so that the policy decides
        again.

        Raises:
            DescriptorError: The batch is invalid or outside the configured limits.
            PolicyError: The decision violates a hard constraint; the cell is not changed.
        """
        batch, answer = update.batch, update.decision
        with self._lock:
            table = self._epoch.table
            cell = cell_of_batch(self.config, batch)
            if answer is not None and self._cannot_run_now(answer):
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
                    f"chose eager, but this batch allows only {format_modes(batch.allowed_modes)}. "
                    "Batch.allows() checks modes."
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
        """Install another policy or configuration, and begin a new epoch.

        The new epoch begins with an empty table. Steps that already have a decision keep it.

        Args:
            policy: The new policy; None for the policy in force.
            config: The new configuration; None for the configuration in force.
            origin: Source of the new policy, for error messages.

        Returns:
            The number of the new epoch.

        Raises:
            ConfigError, PolicyError: As for ``propose``. The old policy and configuration stay in
                force.
        """
        with self._lock:
            now = self._epoch.proposal
            origin = now.origin if policy is None else origin
            new_policy = now.policy if policy is None else policy
            new_config = now.config if config is None else config
            proposal = self.propose(new_policy, new_config, origin)
            epoch = self.epoch + 1
            self._activate(self._epochs.install(proposal, epoch))
        if self._on_swap is not None:
            self._on_swap(proposal.parts.name, now.parts.name, epoch)
        return epoch

    def propose(self, policy: Policy, config: DispatchConfig, origin: str = "") -> Proposal:
        """Try a policy and configuration; return a proposal to install.

        The trial calls ``declare`` and ``decide``. The policy in force is not affected if
        ``policy`` is a different object. To propose the policy in force again, hold the registry's
        lock, because other threads may call the policy.

        Raises:
            ConfigError: ``policy`` has neither ``declare`` nor ``decide``, or ``config`` is not a
                ``DispatchConfig``.
            PolicyError: The policy did not pass the trial.
        """
        return self._epochs.propose(policy, config, origin)

    def reserve(self, proposal: Proposal) -> list[GraphKey]:
        """Declare the new keys of a proposal, hide them, and return them.

        The new keys can be captured, but are neither dispatched nor shown to the policy in force.
        """
        with self._lock:
            return self._epochs.reserve(proposal)

    def install(self, proposal: Proposal) -> list[GraphKey]:
        """Install a proposal, and begin a new epoch with an empty table.

        This method does not call ``on_swap``; the caller must do so after releasing its locks.

        Returns:
            Keys that earlier policies declared and the proposal does not. These keys are hidden but
            still in the registry; the caller must forget them.
        """
        with self._lock:
            retired = self._epochs.retire(proposal)
            self._activate(self._epochs.install(proposal, self.epoch + 1))
        return [key for key in retired if key in self.registry]

    def show_all(self) -> None:
        """Show all keys of the registry to the policy in force.

        Call this method after dropping a proposal or forgetting retired keys.
        """
        with self._lock:
            self._epochs.show_all()

    def set_lazy(self, lazy: bool) -> None:
        """Set whether keys without a graph may be dispatched; empty all affected cells."""
        with self._lock:
            self._readiness.lazy = lazy
            self.graphs.num_changes += 1
            for mode in _ALL_MODES:
                self._epoch.table.invalidate(mode, self.config.max_num_tokens)

    def close(self) -> None:
        """Unsubscribe from the registry."""
        self._unsubscribe()

    # -- reading ------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._epoch.proposal.policy

    @property
    def policy_parts(self) -> PolicyParts:
        """The policy in force and its optional parts."""
        return self._epoch.proposal.parts

    @property
    def policy_name(self) -> str:
        """The name of the policy in force."""
        return self._epoch.proposal.parts.name

    @property
    def policy_origin(self) -> str:
        """The distribution and version of the policy in force, if known."""
        return self._epoch.proposal.origin

    @property
    def pace(self) -> int:
        """A divisor for the number of measured steps; 2 halves this number, 1 keeps it.

        Raises:
            PolicyError: In strict mode, the policy's ``pace`` is invalid.
        """
        pace = self.policy_parts.pace
        problem = pace_fault(pace)
        if not problem:
            return int(pace)
        try:
            with self._lock:
                self._record_fault(self._fault("pace", problem, pace))
        finally:
            self._faults.report()
        return 1

    @property
    def num_policy_errors(self) -> int:
        """Number of times that a policy raised an exception or returned an invalid value."""
        return self._faults.count

    @property
    def modes(self) -> frozenset[RuntimeMode]:
        """The runtime modes that the executor supports."""
        return self._modes

    @property
    def lazy(self) -> bool:
        """Whether keys without a graph may be dispatched."""
        return self._readiness.lazy

    @property
    def epoch(self) -> int:
        """Number of the epoch in force; each swap increments it."""
        return self._epoch.table.epoch

    @property
    def num_filled_cells(self) -> int:
        """Number of cells with a decision."""
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
        """Return the batch that the arguments of ``dispatch`` describe.

        Args:
            num_tokens: As for ``dispatch``.
            num_reqs: As for ``dispatch``.
            uniform: As for ``dispatch``.
            loras: As for ``dispatch``.
            ceiling: As for ``dispatch``.
            any_size: Whether the batch may exceed ``max_num_tokens``; ``explain`` sets it to True.

        Raises:
            DescriptorError: An argument is out of range or contradicts another argument.
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
        """Return a new, validated decision of the policy, without using the table.

        Unlike ``dispatch``, this method accepts any number of requests.

        Raises:
            DescriptorError: ``batch`` is not a Batch, or is outside the configured limits.
            PolicyError: In strict mode, the policy raised or its decision violates a hard
                constraint.
        """
        if not isinstance(batch, Batch):
            raise DescriptorError("batch", batch, "a Batch", "Dispatcher.batch(...) returns one.")
        if not self._reason_for_all(batch):
            cell_of_batch(self.config, attrs.evolve(batch, num_reqs=None))
        try:
            with self._lock:
                return self._limited(self._decide(batch), batch)
        finally:
            self._faults.report()

    def preview(self, batch: Batch) -> tuple[Decision, PolicyError | None]:
        """Return the decision that a batch would receive now, and the policy's fault, if any.

        This method has no side effects: no cell is filled, no one-shot decision is used, and no
        fault is counted or warned about.

        Raises:
            DescriptorError: The batch is invalid or outside the configured limits.
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
                # As when filling a cell, decide first without the number of requests, then with the
                # number.
                anyhow = batch_of_cell(self.config, cell, 0)
                decision = self._limited(self._ask(anyhow), anyhow)
                if num_reqs > decision.max_num_reqs:
                    decision = self._limited(self._ask(batch), batch)
            except PolicyError as fault:
                return Decision.eager(Reason.POLICY_ERROR), fault
            return decision, None

    # -- internals ----------------------------------------------------------------------

    def _activate(self, epoch: Epoch) -> None:
        """Make steps use the table of an epoch."""
        self._epoch: Epoch = epoch
        self._above_table: dict[Any, Decision] = {}
        # Attributes of the epoch are also stored here, which saves lookups in each step.
        self.config: DispatchConfig = epoch.proposal.config
        self.graphs: GraphView = epoch.graphs
        self._by_reqs = epoch.table.by_reqs
        # Assigned last, so that a step that reads the new rows also sees the rest of the epoch.
        self._rows = epoch.table.rows

    def _fill(self, table: Table, cell: Cell) -> Decision:
        batch = batch_of_cell(self.config, cell, 0)
        decision = self._bound(self._decide(batch), batch)
        # If eager is not allowed, an eager decision is not stored, so that each call raises.
        if decision.key is not None or batch.allows(RuntimeMode.NONE):
            table.put(cell, decision)
        return decision

    def _decide_by_reqs(self, table: Table, cell: Cell, num_reqs: int) -> Decision:
        """Return and store the decision for a number of requests above the cell's limit."""
        decision = table.get_by_reqs(cell, num_reqs)
        if decision is None:
            batch = batch_of_cell(self.config, cell, num_reqs)
            decision = self._bound(self._decide(batch), batch)
            if decision.key is not None or batch.allows(RuntimeMode.NONE):
                table.put_by_reqs(cell, num_reqs, decision)
        return decision

    def _reason_for_all(self, batch: Batch) -> str:
        """Return why a batch runs eager under any policy; empty if the policy decides."""
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
            self._record_fault(fault, batch.num_tokens)
            return Decision.eager(Reason.POLICY_ERROR)

    def _ask(self, batch: Batch) -> Decision:
        """Return the policy's decision.

        Raises:
            PolicyError: The policy raised, or its decision violates a hard constraint.
        """
        try:
            proposal = self._epoch.proposal
            if proposal.adds_axes:
                view = PlainView(self.graphs, batch.axes)
                answer = proposal.parts.policy.decide(without_axes(batch), view)
                answer = None if answer is None else answer_with_axes(answer, batch.axes)
            else:
                answer = proposal.parts.policy.decide(batch, self.graphs)
        except Exception as error:
            raise self._fault(
                "decide", describe_exception(error, f" on a batch ({batch})")
            ) from error
        if answer is None:
            return Decision.eager(Reason.NO_ANSWER)
        problem = broken_constraint(answer, batch, self.graphs)
        if problem is not None:
            raise self._fault("decide", problem, answer)
        return answer

    def _fault(self, hook: str, problem: str, value: Any = None) -> PolicyError:
        return PolicyError(self.policy_name, hook, problem, origin=self.policy_origin, value=value)

    def _record_fault(self, error: PolicyError, num_tokens: int | None = None) -> None:
        self._faults.add(error, num_tokens, self.epoch)

    def _bound(self, decision: Decision, batch: Batch, *, one_shot: bool = False) -> Decision:
        """Bind a decision to the cell of a batch, and add the executor's plan."""
        # Set one_shot before the plan is created, because the plan of a one-shot decision always
        # measures the step.
        decision = self._limited(decision, batch, next(self._revisions), one_shot=one_shot)
        return decision if self.bind is None else decision.with_plan(self.bind(decision, batch))

    def _limited(
        self, decision: Decision, batch: Batch, revision: int = 0, *, one_shot: bool = False
    ) -> Decision:
        """Return a decision with its number of tokens and request limit set."""
        bound = ANY_NUM_REQS
        if decision.parts:
            bound = _most_reqs(decision.parts)
        elif decision.key is not None and decision.key.descriptor.num_reqs is not None:
            bound = decision.key.descriptor.num_reqs
        # The bound never exceeds num_tokens or max_num_seqs. A number of requests above either
        # therefore takes the cold path, which validates the number.
        bound = min(bound, decision.max_num_reqs, batch.num_tokens, self.config.max_num_seqs)
        policy = decision.policy or self._epoch.proposal.parts.name
        return decision.at(batch.num_tokens, bound, policy, revision, one_shot)

    def _cannot_run_now(self, answer: Any) -> bool:
        """Return whether a graph of a decision is declared but cannot run now."""
        keys = answer.keys if isinstance(answer, Decision) else ()
        return any(key in self.graphs and not self.graphs.is_ready(key) for key in keys)

    def _on_registry_event(self, event: RegistryEvent) -> None:
        """Empty the cells whose batches the key of an event could serve."""
        with self._lock:
            if event.key in self._epochs.hidden:
                return
            reach = event.key.num_tokens
            if self._may_split:  # a graph may serve a part of any larger batch
                reach = self.config.max_num_tokens
            self._epoch.table.invalidate(event.key.mode, reach)

    def _no_graph(self, batch: Batch, reason: str) -> NoGraphError:
        near = [
            str(key)
            for mode in sorted(batch.allowed_modes, reverse=True)
            if mode is not RuntimeMode.NONE
            for key in itertools.islice(self.graphs.covering(batch, mode), 1)
        ]
        size, allowed = counted(batch.num_tokens, "token"), format_modes(batch.allowed_modes)
        hint = "Allow NONE, or change the mode or capture sizes so that a graph covers the batch."
        if batch.num_tokens == 0:
            hint = "Allow NONE for empty batches."
        elif near:
            graph = "this graph" if len(near) == 1 else "one of these graphs"
            hint = f"Nearest: {'; '.join(near)}. Allow NONE, or capture or enable {graph}."
        return NoGraphError(
            f"No graph for {size} ({reason}), and the batch allows only {allowed}. {hint}",
            reason=reason,
            nearest=tuple(near),
        )


def _most_reqs(parts: Iterable[Part]) -> int:
    """Return the largest number of requests for which a split holds.

    A part has at most as many requests as rows. A part therefore sets a limit only if its graph was
    captured for fewer requests than the part has rows.
    """
    limits = (
        part.key.descriptor.num_reqs
        for part in parts
        if part.key.descriptor.num_reqs is not None
        and part.key.descriptor.num_reqs < part.num_tokens
    )
    return min(limits, default=ANY_NUM_REQS)


def _weakly(listener: Callable[[RegistryEvent], None]) -> Callable[[RegistryEvent], None]:
    """Wrap a bound method as a listener that does not keep its owner alive.

    A dispatcher references its registry. If the registry also referenced the dispatcher, graphs
    would outlive their runner until a garbage collection.
    """
    method = weakref.WeakMethod(listener)

    def call(event: RegistryEvent) -> None:
        found = method()
        if found is not None:
            found(event)

    return call
