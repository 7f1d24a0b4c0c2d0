"""The dispatcher: a table of ready decisions in front of a policy.

A step costs four sign tests, four list indexings and one comparison. The policy is asked
on first use of a cell; everything that can change an answer empties just the cells it
could change. Four devices keep branches off that path:

* an empty cell holds ``EMPTY``, whose bound no number of requests meets, so that "not
  filled" and "too many requests" leave through the same comparison;
* where a batch has more requests than its cell's decision holds for, another dictionary has
  what was decided for that number;
* a row that was never used is an empty tuple, and a batch above the table runs off the end
  of its row: both leave as IndexError;
* a one-shot decision waits beside an emptied cell. The next step finds the cell empty,
  puts the steady decision back and takes the one-shot one.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.dispatch.decision import (
    ANY_NUM_REQS,
    CellUpdate,
    Decision,
    Outcome,
    Reason,
)
from dispatchkit.dispatch.policy import GraphView, Policy, policy_name
from dispatchkit.dispatch.table import EMPTY, Cell, Table
from dispatchkit.errors import DescriptorError, NoGraphError, PolicyError
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import ALLOWED_MODES, RuntimeMode
from dispatchkit.registry import GraphEntry, GraphRegistry, KeyState, RegistryEvent

_ALL_MODES = frozenset({RuntimeMode.PIECEWISE, RuntimeMode.FULL})


class Dispatcher:
    """Choose, for every batch, the graph to replay or eager, by a policy.

    Args:
        policy: The rule. Anything with ``declare`` and ``decide``.
        config: Sizes, limits and modes.
        registry: Where the keys and their graphs are; a new one by default. The policy's
            keys are declared in it.
        modes: Runtime modes the executor can do (without PIECEWISE where it cannot split).
        lazy: Declared keys may be dispatched too; the executor captures them on first use.
        strict: An impossible answer of the policy raises, rather than running eager.
        origin: Where the policy comes from, for error messages.
        bind: Called once for each decision put into the table; its result becomes
            ``Decision.plan``. The executor prepares there what a step needs.
        on_swap: Told when a policy or configuration is in force: its name, the name of the
            policy before (None for the first) and the epoch. No lock is held.
        on_fault: Told of a fault of the policy before it is raised or warned of, with the
            tokens of the batch (None where there is none) and the epoch. A step waits.

    Raises:
        PolicyError: The policy raises, declares what are not keys, or answers a probe
            with a decision that breaks a hard constraint.

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
        origin: str = "",
        bind: Callable[[Decision, Batch], Any] | None = None,
        on_swap: Callable[[str, str | None, int], None] | None = None,
        on_fault: Callable[[PolicyError, int | None, int], None] | None = None,
    ) -> None:
        self.registry = GraphRegistry() if registry is None else registry
        self._modes = frozenset(modes)
        self._lazy = lazy
        self._strict = strict
        self._bind = bind
        self._on_swap, self._on_fault = on_swap, on_fault
        # One lock with the registry: its listeners come here under it, and a swap goes there.
        self._lock = self.registry.lock
        self._revisions = itertools.count(1)
        self._warned: set[tuple[str, str]] = set()
        self.num_policy_errors = 0
        keys = self._accept(policy, config, origin)
        self._install(policy, config, origin, keys, epoch=0)
        self._unsubscribe = self.registry.subscribe(self._on_registry_event)
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
            num_reqs: Requests in the batch; 0 where they are not known.
            uniform: False for a mixed batch, True for a uniform decode batch of the
                configured query length; with several query lengths, 1 + its index.
            loras: Active adapters.
            ceiling: Highest runtime mode allowed, or a code of ``allowed_modes_code``.
                Cascade attention allows at most PIECEWISE.

        Returns:
            A ready, shared decision; nothing is built on the way.

        Raises:
            DescriptorError: A fact is negative, above its limit or contradicts another.
            NoGraphError: No graph serves the batch and eager is not allowed.
        """
        # A negative index would quietly read the table from its end. The union of two whole
        # numbers is negative as soon as one is; of anything else it is a TypeError.
        try:
            if num_tokens | num_reqs >= 0 and uniform >= 0 and loras >= 0 and ceiling >= 0:
                decision: Decision = self._rows[ceiling][uniform][loras][num_tokens]
                if num_reqs <= decision.max_num_reqs:
                    return decision
                if decision is not EMPTY:
                    return self._by_reqs[ceiling, uniform, loras, num_tokens][num_reqs]
        except (LookupError, TypeError, ValueError, OverflowError):
            pass  # an unused row, a batch above the table, or a wrong type: told apart below
        return self._dispatch_cold(num_tokens, num_reqs, uniform, loras, ceiling)

    def _dispatch_cold(
        self, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
    ) -> Decision:
        with self._lock:
            # Under the lock, so that limits and table are of one epoch.
            self._check_facts(num_tokens, num_reqs, uniform, loras, ceiling)
            cell = (int(ceiling), int(uniform), int(loras), int(num_tokens))
            table = self._table
            decision = table.take_one_shot(cell, num_reqs)
            if decision is None:
                decision = table.get(cell)
                if decision is EMPTY:
                    decision = self._fill(table, cell)
                if num_reqs > decision.max_num_reqs:
                    decision = self._decide_by_reqs(table, cell, int(num_reqs))
            if decision.key is None and RuntimeMode.NONE not in ALLOWED_MODES[cell[0]]:
                raise self._no_graph(cell, num_reqs, decision.reason)
            return decision

    # -- learning -----------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> None:
        """Give an outcome to the policy and put the changes it answers into the table."""
        learn = getattr(self._policy, "observe", None)
        if learn is None:
            return
        with self._lock:
            try:
                for update in learn(outcome) or ():
                    self.update(update)
            except PolicyError as error:
                self._blame(error)
            except Exception as error:  # noqa: BLE001 - a policy may raise anything; it is named
                self._blame(self._fault("observe", f"{type(error).__name__}: {error}"), error)

    def update(self, update: CellUpdate) -> None:
        """Change one cell: a new steady decision, a one-shot one, or ask again.

        A steady change leaves one-shot decisions that wait in front of it. A choice that
        cannot run any more (its graph was evicted, say, since the step it was learnt from)
        is no fault: the steady one is asked for again, a one-shot one is dropped.

        Raises:
            DescriptorError: The batch is impossible or outside the configured limits.
            PolicyError: The decision breaks a hard constraint; the cell stays as it was.
        """
        batch, answer = update.batch, update.decision
        with self._lock:
            table = self._table
            cell = self._cell_of(batch)
            if answer is not None and self._is_lost(answer):
                answer = None
            if answer is None:
                if not update.one_shot:
                    table.forget_steady(cell)
                return
            problem = broken_constraint(answer, batch, self.graphs)
            if problem is None and answer.key is None and not batch.allows(RuntimeMode.NONE):
                problem = f"chose eager, but this batch allows only {_names(batch)}."
            if problem is not None:
                raise self._fault("observe", problem, answer)
            decision = self._bound(answer, batch)
            if update.one_shot:
                table.put_one_shot(cell, attrs.evolve(decision, one_shot=True))
            else:
                table.forget_steady(cell)
                table.put(cell, decision)

    # -- changes ------------------------------------------------------------------------

    def swap(
        self, policy: Policy | None = None, config: DispatchConfig | None = None, origin: str = ""
    ) -> int:
        """Install another policy or configuration with an empty table: a new epoch.

        Steps that already have their decision finish under it. If the new policy is
        refused, the old one stays as it was.

        Returns:
            The number of the new epoch.
        """
        with self._lock:
            origin = self._origin if policy is None else origin
            new_policy = self._policy if policy is None else policy
            new_config = self.config if config is None else config
            keys = self._accept(new_policy, new_config, origin)
            previous, epoch = self.policy_name, self._table.epoch + 1
            self._install(new_policy, new_config, origin, keys, epoch=epoch)
        if self._on_swap is not None:
            self._on_swap(policy_name(new_policy), previous, epoch)
        return epoch

    def set_lazy(self, lazy: bool) -> None:
        """Let keys without a graph be dispatched, or no longer; cells are decided anew."""
        with self._lock:
            self._lazy = lazy
            for mode in _ALL_MODES:
                self._table.invalidate(mode, self.config.max_num_tokens)

    def close(self) -> None:
        """Stop listening to the registry."""
        self._unsubscribe()

    # -- reading ------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def policy_name(self) -> str:
        """The name of the policy in force."""
        return policy_name(self._policy)

    @property
    def policy_origin(self) -> str:
        """The distribution and version the policy comes from, if known."""
        return self._origin

    @property
    def epoch(self) -> int:
        """Number of the table in force; grows with every swap."""
        return self._table.epoch

    @property
    def num_filled_cells(self) -> int:
        """How many cells have been decided in this epoch."""
        return self._table.num_filled

    def batch(
        self, num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Batch:
        """Return the Batch that a policy sees for the arguments of ``dispatch``."""
        self._check_facts(num_tokens, num_reqs, uniform, loras, ceiling)
        return self._batch((int(ceiling), int(uniform), int(loras), int(num_tokens)), num_reqs)

    def decide(self, batch: Batch) -> Decision:
        """Ask the policy anew for a batch, within the constraints, without the table."""
        with self._lock:
            return self._decide(batch)

    # -- inside -------------------------------------------------------------------------

    def _install(
        self,
        policy: Policy,
        config: DispatchConfig,
        origin: str,
        keys: list[GraphKey],
        epoch: int,
    ) -> None:
        self.registry.declare(keys)
        table = Table(config, epoch)
        self._policy, self._origin, self.config = policy, origin, config
        self.graphs = self._view(self.registry, config, self._is_dispatchable)
        self._table = table
        self._by_reqs = table.by_reqs
        self._rows = table.rows  # last, and at once: readers see the old epoch or the new

    def _view(
        self,
        registry: GraphRegistry,
        config: DispatchConfig,
        dispatchable: Callable[[GraphEntry], bool],
    ) -> GraphView:
        return GraphView(registry, config, modes=self._modes, dispatchable=dispatchable)

    def _is_dispatchable(self, entry: GraphEntry) -> bool:
        return entry.state is KeyState.CAPTURED or (
            self._lazy and entry.state in (KeyState.DECLARED, KeyState.EVICTED)
        )

    def _accept(self, policy: Policy, config: DispatchConfig, origin: str) -> list[GraphKey]:
        """Return a policy's keys after trying it on batches around each of its sizes."""
        name = policy_name(policy)
        for method in ("declare", "decide"):
            if not callable(getattr(policy, method, None)):
                raise PolicyError(
                    name, method, "is missing; a policy has declare and decide.", origin=origin
                )
        try:
            keys = list(policy.declare(config))
        except PolicyError:
            raise
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
            raise PolicyError(name, "declare", problem, origin=origin) from error
        for key in keys:
            if not isinstance(key, GraphKey):
                raise PolicyError(
                    name, "declare", f"returned {key!r}; only GraphKeys.", origin=origin, value=key
                )
        trial = GraphRegistry()
        trial.declare(keys)
        view = self._view(trial, config, lambda entry: True)
        for batch in self._probes(keys, config):
            try:
                answer = policy.decide(batch, view)
            except Exception as error:
                problem = f"raised {type(error).__name__} on {batch}: {error}"
                raise PolicyError(name, "decide", problem, origin=origin) from error
            fault = None if answer is None else broken_constraint(answer, batch, view)
            if fault is not None:
                raise PolicyError(name, "decide", fault, origin=origin, value=answer)
        return keys

    def _probes(self, keys: list[GraphKey], config: DispatchConfig) -> Iterable[Batch]:
        sizes = sorted({key.num_tokens for key in keys})
        step = max(1, len(sizes) // 16)
        picked = {*sizes[::step], *sizes[-1:], 1, config.max_num_tokens}
        around = sorted({size + off for size in picked for off in (-1, 0, 1)})
        for num_tokens in around:
            if not 1 <= num_tokens <= config.max_num_tokens:
                continue
            for uniform in range(config.num_query_classes):
                for loras in sorted({0, min(1, config.max_loras), config.max_loras}):
                    for ceiling in (1, 2):
                        yield _batch_of(config, (ceiling, uniform, loras, num_tokens), 0)

    def _fill(self, table: Table, cell: Cell) -> Decision:
        batch = self._batch(cell, 0)
        decision = self._bound(self._decide(batch), batch)
        # Where eager is not allowed, a miss is no decision to serve: it raises each time.
        if decision.key is not None or batch.allows(RuntimeMode.NONE):
            table.put(cell, decision)
        return decision

    def _decide_by_reqs(self, table: Table, cell: Cell, num_reqs: int) -> Decision:
        """Answer for more requests than the cell's decision holds for; kept, up to a bound."""
        decision = table.get_by_reqs(cell, num_reqs)
        if decision is None:
            batch = self._batch(cell, num_reqs)
            decision = self._bound(self._decide(batch), batch)
            if decision.key is not None or batch.allows(RuntimeMode.NONE):
                table.put_by_reqs(cell, num_reqs, decision)
        return decision

    def _decide(self, batch: Batch) -> Decision:
        if batch.num_tokens == 0:
            return Decision.eager(Reason.EMPTY_BATCH)
        try:
            answer = self._policy.decide(batch, self.graphs)
        except Exception as error:  # noqa: BLE001 - a policy may raise anything; it is named
            problem = f"raised {type(error).__name__} on {batch}: {error}"
            self._blame(self._fault("decide", problem), error, batch.num_tokens)
            return Decision.eager(Reason.POLICY_ERROR)
        if answer is None:
            return Decision.eager(Reason.NOT_MINE)
        problem_found = broken_constraint(answer, batch, self.graphs)
        if problem_found is not None:
            self._blame(self._fault("decide", problem_found, answer), None, batch.num_tokens)
            return Decision.eager(Reason.POLICY_ERROR)
        return answer

    def _fault(self, hook: str, problem: str, value: Any = None) -> PolicyError:
        return PolicyError(self.policy_name, hook, problem, origin=self._origin, value=value)

    def _blame(
        self, error: PolicyError, cause: Exception | None = None, num_tokens: int | None = None
    ) -> None:
        """Count and tell a policy's fault; raise it in strict mode, else warn once per method."""
        self.num_policy_errors += 1
        if self._on_fault is not None:
            self._on_fault(error, num_tokens, self._table.epoch)
        if self._strict:
            raise error from cause
        if (error.policy, error.hook) not in self._warned:
            self._warned.add((error.policy, error.hook))
            message = f"{error} Steps concerned run eager with reason policy_error."
            if error.hook == "observe":
                message = f"{error} The table keeps what it had learnt before."
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _bound(self, decision: Decision, batch: Batch) -> Decision:
        """Bind an answer to the cell of a batch; the executor prepares its plan."""
        bound = ANY_NUM_REQS
        if decision.key is not None and decision.key.descriptor.num_reqs is not None:
            bound = decision.key.descriptor.num_reqs
        decision = attrs.evolve(
            decision,
            num_tokens=batch.num_tokens,
            # A number that no batch may have leaves by the same comparison, for the checks.
            max_num_reqs=min(
                bound, decision.max_num_reqs, batch.num_tokens, self.config.max_num_seqs
            ),
            policy=decision.policy or self.policy_name,
            revision=next(self._revisions),
        )
        if self._bind is None:
            return decision
        return attrs.evolve(decision, plan=self._bind(decision, batch))

    def _is_lost(self, answer: Any) -> bool:
        """Tell a choice that was possible once from one that never was."""
        key = answer.key if isinstance(answer, Decision) else None
        return key is not None and key in self.graphs and not self.graphs.is_ready(key)

    def _on_registry_event(self, event: RegistryEvent) -> None:
        """Empty the cells that name the key or could choose it."""
        with self._lock:
            self._table.invalidate(event.key.mode, event.key.num_tokens)

    def _batch(self, cell: Cell, num_reqs: int) -> Batch:
        return _batch_of(self.config, cell, num_reqs)

    def _cell_of(self, batch: Batch) -> Cell:
        config = self.config
        uniform = 0
        if batch.uniform:
            if batch.query_len not in config.query_lens:
                allowed = "one of query_lens " + ", ".join(map(str, config.query_lens))
                raise DescriptorError("query_len", batch.query_len, allowed)
            uniform = 1 + config.query_lens.index(batch.query_len)
        elif (
            config.varlen_decode
            and batch.max_query_len is not None
            and batch.max_query_len <= config.query_len
        ):
            uniform = config.num_query_classes - 1
        cell = (batch.allowed, uniform, batch.num_active_loras, batch.num_tokens)
        if batch.num_tokens == 0:
            raise DescriptorError("num_tokens", 0, "at least 1", "An empty batch is always eager.")
        self._check_facts(batch.num_tokens, batch.num_reqs or 0, uniform, cell[2], cell[0])
        return cell

    def _check_facts(
        self, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
    ) -> None:
        config = self.config
        _check_range("num_tokens", num_tokens, config.max_num_tokens, "max_num_tokens")
        _check_range("loras", loras, config.max_loras, "max_loras")
        classes = config.num_query_classes - 1
        _check_range("uniform", uniform, classes, "the number of query lengths")
        _check_range("ceiling", ceiling, len(ALLOWED_MODES) - 1, "the codes of allowed modes")
        most = min(config.max_num_seqs, num_tokens)
        which = "max_num_seqs" if most < num_tokens else "the batch has no more tokens"
        _check_range("num_reqs", num_reqs, most, which)

    def _no_graph(self, cell: Cell, num_reqs: int, reason: str) -> NoGraphError:
        batch = self._batch(cell, num_reqs)
        near = [
            str(key)
            for mode in sorted(batch.allowed_modes, reverse=True)
            if mode is not RuntimeMode.NONE
            for key in itertools.islice(self.graphs.covering(batch, mode), 1)
        ]
        return NoGraphError(
            f"No graph for {batch.num_tokens} tokens ({reason}), and only {_names(batch)} may run. "
            f"Nearest: {'; '.join(near) or 'none'}. Allow NONE, or capture a graph for it.",
            reason=reason,
            nearest=tuple(near),
        )


def _batch_of(config: DispatchConfig, cell: Cell, num_reqs: int) -> Batch:
    ceiling, uniform, loras, num_tokens = cell
    is_uniform, query_len, max_query_len = config.query_class(uniform)
    return Batch(
        num_tokens=num_tokens,
        num_reqs=int(num_reqs) or None,
        uniform=is_uniform,
        query_len=query_len,
        max_query_len=max_query_len,
        num_active_loras=loras,
        allowed=ceiling,
    )


def _names(batch: Batch) -> str:
    return ", ".join(sorted(mode.name for mode in batch.allowed_modes))


def _check_range(field: str, value: Any, limit: int, limit_name: str) -> None:
    try:
        inside = 0 <= value <= limit and value == int(value) and not isinstance(value, float)
    except (TypeError, ValueError):
        inside = False
    if not inside:
        raise DescriptorError(field, value, f"a whole number from 0 to {limit} ({limit_name})")
