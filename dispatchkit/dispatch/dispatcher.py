"""The dispatcher: a table of ready decisions in front of a policy.

A step costs one sign test, four list indexings and one comparison. The policy is asked
on first use of a cell; everything that can change an answer empties just the cells it
could change. Three devices keep branches off that path:

* an empty cell holds ``_EMPTY``, whose bound no number of requests meets, so that "not
  filled" and "too many requests" leave through the same comparison;
* a row that was never used is an empty tuple, and a batch above the table runs off the end
  of its row: both leave as IndexError;
* a one-shot decision waits beside an emptied cell. The next step finds the cell empty,
  puts the steady decision back and takes the one-shot one.

Rows are lists indexed by the number of tokens, or, above a million cells, bounded dicts.
"""

from __future__ import annotations

import threading
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
from dispatchkit.errors import DescriptorError, NoGraphError, PolicyError
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import ALLOWED_MODES, RuntimeMode
from dispatchkit.registry import GraphEntry, GraphRegistry, KeyState, RegistryEvent

MAX_LIST_CELLS = 1_000_000
MAX_COLD_CELLS = 65_536
_ALL_MODES = frozenset({RuntimeMode.PIECEWISE, RuntimeMode.FULL})
_EMPTY = Decision(RuntimeMode.NONE, None, "", max_num_reqs=-1)

# (code of allowed modes, query class, adapters, tokens)
Cell = tuple[int, int, int, int]


class _DictRow(dict[int, Decision]):
    """A row for very large tables: bounded, and empty cells answer as in a list."""

    def __missing__(self, num_tokens: int) -> Decision:
        return _EMPTY


class _Table:
    """One epoch: decisions by allowed modes, query class, adapters and tokens."""

    def __init__(self, config: DispatchConfig, epoch: int) -> None:
        self.epoch = epoch
        self.config = config
        num_rows = len(ALLOWED_MODES) * config.num_query_classes * (config.max_loras + 1)
        self._as_dict = num_rows * (config.max_num_tokens + 1) > MAX_LIST_CELLS
        self.rows: list[list[list[Any]]] = [
            [[() for _ in range(config.max_loras + 1)] for _ in range(config.num_query_classes)]
            for _ in ALLOWED_MODES
        ]
        self.filled: set[Cell] = set()
        self.steady: dict[Cell, Decision] = {}  # of cells with a one-shot decision waiting
        self.one_shot: dict[Cell, list[Decision]] = {}
        self.by_reqs: dict[tuple[Cell, int], Decision] = {}
        self.revision: dict[Cell, int] = {}

    def get(self, cell: Cell) -> Decision:
        allowed, uniform, loras, num_tokens = cell
        row = self.rows[allowed][uniform][loras]
        decision: Decision = row[num_tokens] if row != () else _EMPTY
        return decision

    def put(self, cell: Cell, decision: Decision) -> None:
        allowed, uniform, loras, num_tokens = cell
        row = self.rows[allowed][uniform][loras]
        if row == ():
            size = self.config.max_num_tokens + 1
            row = _DictRow() if self._as_dict else [_EMPTY] * size
            self.rows[allowed][uniform][loras] = row
        if decision is _EMPTY:
            self.filled.discard(cell)
            if self._as_dict:
                row.pop(num_tokens, None)
                return
        else:
            if self._as_dict and len(row) >= MAX_COLD_CELLS:
                row.clear()
                self.filled = {each for each in self.filled if each[:3] != cell[:3]}
            self.filled.add(cell)
        row[num_tokens] = decision


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
    ) -> None:
        self.registry = GraphRegistry() if registry is None else registry
        self._modes = frozenset(modes)
        self._lazy = lazy
        self._strict = strict
        self._bind = bind
        self._lock = threading.RLock()
        self._warned: set[tuple[str, str]] = set()
        self.num_policy_errors = 0
        keys = self._accept(policy, config, origin)
        self._install(policy, config, origin, keys, epoch=0)
        self._unsubscribe = self.registry.subscribe(self._on_registry_event)

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
        # A union of numbers is negative as soon as one of them is; a negative index would
        # quietly read the table from its end.
        try:
            if (num_tokens | num_reqs | uniform | loras | ceiling) >= 0:
                decision: Decision = self._rows[ceiling][uniform][loras][num_tokens]
                if num_reqs <= decision.max_num_reqs:
                    return decision
        except (IndexError, TypeError):
            pass  # an unused row, a batch above the table, or a wrong type: told apart below
        return self._dispatch_cold(num_tokens, num_reqs, uniform, loras, ceiling)

    def _dispatch_cold(
        self, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
    ) -> Decision:
        self._check_facts(num_tokens, num_reqs, uniform, loras, ceiling)
        cell = (int(ceiling), int(uniform), int(loras), int(num_tokens))
        with self._lock:
            table = self._table
            waiting = table.one_shot.get(cell)
            if waiting:
                decision = waiting.pop(0)
                if not waiting:
                    del table.one_shot[cell]
                    table.put(cell, table.steady.pop(cell))
            else:
                decision = table.get(cell)
                if decision is _EMPTY:
                    decision = self._fill(table, cell)
            if num_reqs > decision.max_num_reqs:
                decision = self._decide_by_reqs(table, cell, num_reqs)
            if decision.key is None and RuntimeMode.NONE not in ALLOWED_MODES[ceiling]:
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
            except Exception as error:
                self._blame("observe", f"{type(error).__name__}: {error}", error)

    def update(self, update: CellUpdate) -> None:
        """Change one cell: a new steady decision, a one-shot one, or ask again.

        Raises:
            PolicyError: The decision breaks a hard constraint; the cell stays as it was.
        """
        batch, answer = update.batch, update.decision
        with self._lock:
            table = self._table
            cell = self._cell_of(batch)
            if answer is None:
                self._empty(table, cell)
                return
            problem = broken_constraint(answer, batch, self.graphs)
            if problem is not None:
                raise PolicyError(self.policy_name, "observe", problem, origin=self._origin)
            if not update.one_shot:
                self._empty(table, cell)
                table.put(cell, self._bound(table, cell, answer, batch))
                return
            if cell not in table.one_shot:
                steady = table.get(cell)
                table.steady[cell] = self._fill(table, cell) if steady is _EMPTY else steady
                table.put(cell, _EMPTY)
            shot = attrs.evolve(self._bound(table, cell, answer, batch), one_shot=True)
            table.one_shot.setdefault(cell, []).append(shot)

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
            self._install(new_policy, new_config, origin, keys, epoch=self._table.epoch + 1)
            return self._table.epoch

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
        return len(self._table.filled)

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
        table = _Table(config, epoch)
        self._policy, self._origin, self.config = policy, origin, config
        self.graphs = self._view(self.registry, config, self._is_dispatchable)
        self._table = table
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

    def _fill(self, table: _Table, cell: Cell) -> Decision:
        batch = self._batch(cell, 0)
        decision = self._bound(table, cell, self._decide(batch), batch)
        if decision.key is not None or batch.allows(RuntimeMode.NONE):
            table.put(cell, decision)
        return decision

    def _decide_by_reqs(self, table: _Table, cell: Cell, num_reqs: int) -> Decision:
        """Answer for more requests than the cell's decision holds for; kept, up to a bound."""
        known = table.by_reqs.get((cell, num_reqs))
        if known is not None:
            return known
        batch = self._batch(cell, num_reqs)
        decision = self._bound(table, cell, self._decide(batch), batch)
        if len(table.by_reqs) >= MAX_COLD_CELLS:
            table.by_reqs.clear()
        table.by_reqs[cell, num_reqs] = decision
        return decision

    def _decide(self, batch: Batch) -> Decision:
        if batch.num_tokens == 0:
            return Decision.eager(Reason.EMPTY_BATCH)
        try:
            answer = self._policy.decide(batch, self.graphs)
        except Exception as error:
            self._blame("decide", f"raised {type(error).__name__} on {batch}: {error}", error)
            return Decision.eager(Reason.POLICY_ERROR)
        if answer is None:
            return Decision.eager(Reason.NOT_MINE)
        problem = broken_constraint(answer, batch, self.graphs)
        if problem is not None:
            self._blame("decide", problem, None, answer)
            return Decision.eager(Reason.POLICY_ERROR)
        return answer

    def _blame(
        self, hook: str, problem: str, cause: Exception | None, value: Any = None
    ) -> None:
        error = PolicyError(self.policy_name, hook, problem, origin=self._origin, value=value)
        self.num_policy_errors += 1
        if self._strict:
            raise error from cause
        if (self.policy_name, hook) not in self._warned:
            self._warned.add((self.policy_name, hook))
            message = f"{error} Steps concerned run eager with reason policy_error."
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _bound(self, table: _Table, cell: Cell, decision: Decision, batch: Batch) -> Decision:
        """Bind an answer to its cell; the executor prepares its plan."""
        bound = ANY_NUM_REQS
        if decision.key is not None and decision.key.descriptor.num_reqs is not None:
            bound = decision.key.descriptor.num_reqs
        revision = table.revision.get(cell, 0) + 1
        table.revision[cell] = revision
        decision = attrs.evolve(
            decision,
            num_tokens=batch.num_tokens,
            # A number that no batch may have leaves by the same comparison, for the checks.
            max_num_reqs=min(
                bound, decision.max_num_reqs, batch.num_tokens, self.config.max_num_seqs
            ),
            policy=decision.policy or self.policy_name,
            revision=revision,
        )
        if self._bind is None:
            return decision
        return attrs.evolve(decision, plan=self._bind(decision, batch))

    def _empty(self, table: _Table, cell: Cell) -> None:
        table.one_shot.pop(cell, None)
        table.steady.pop(cell, None)
        table.put(cell, _EMPTY)

    def _on_registry_event(self, event: RegistryEvent) -> None:
        """Empty the cells that name the key or could choose it."""
        with self._lock:
            table = self._table
            if not (table.filled or table.by_reqs or table.one_shot):
                return
            size = event.key.num_tokens
            for cell in [*table.filled, *table.one_shot]:
                if cell[3] <= size and event.key.mode in ALLOWED_MODES[cell[0]]:
                    self._empty(table, cell)
            table.by_reqs.clear()

    def _batch(self, cell: Cell, num_reqs: int) -> Batch:
        return _batch_of(self.config, cell, num_reqs)

    def _cell_of(self, batch: Batch) -> Cell:
        config = self.config
        if batch.uniform:
            uniform = 1 + config.query_lens.index(batch.query_len)
        else:
            uniform = 0 if batch.max_query_len is None else config.num_query_classes - 1
        return (batch.allowed, uniform, batch.num_active_loras, batch.num_tokens)

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
            for key in list(self.graphs.covering(batch, mode))[:1]
        ]
        names = ", ".join(sorted(mode.name for mode in batch.allowed_modes))
        return NoGraphError(
            f"No graph for {batch.num_tokens} tokens ({reason}), and only {names} may run. "
            f"Nearest: {'; '.join(near) or 'none'}. Allow NONE, or capture a graph for it.",
            reason=reason,
            nearest=tuple(near),
        )


def _batch_of(config: DispatchConfig, cell: Cell, num_reqs: int) -> Batch:
    ceiling, uniform, loras, num_tokens = cell
    is_uniform, query_len, max_query_len = config.query_class(uniform)
    return Batch(
        num_tokens=num_tokens,
        num_reqs=num_reqs or None,
        uniform=is_uniform,
        query_len=query_len,
        max_query_len=max_query_len,
        num_active_loras=loras,
        allowed=ceiling,
    )


def _check_range(field: str, value: Any, limit: int, limit_name: str) -> None:
    try:
        inside = 0 <= value <= limit and value == int(value) and not isinstance(value, float)
    except (TypeError, ValueError):
        inside = False
    if not inside:
        raise DescriptorError(field, value, f"a whole number from 0 to {limit} ({limit_name})")
