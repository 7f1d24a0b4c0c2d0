"""DispatcherMachine, a state machine that compares a dispatcher with a naive model.

The dispatcher's table is a cache. After any sequence of events (captures, failures, evictions,
disabled modes, swaps, changes that a learning policy requests), the dispatcher must serve the
policy's current decisions.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dispatchkit.dispatch import CellUpdate, Decision, Dispatcher, Policy
from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.errors import DescriptorError, NoGraphError, PolicyError
from dispatchkit.keys import ALLOWED_MODES, Batch, DispatchConfig, GraphKey, RuntimeMode
from dispatchkit.registry import GraphRegistry
from dispatchkit.testing.strategies import apply_change, batches, changes, configs, graph_keys

# Cell of the model: (tokens, query class, adapters, allowed modes).
_Cell = tuple[int, int, int, int]


class DispatcherMachine(RuleBasedStateMachine):
    """A hypothesis state machine that compares a dispatcher with a naive model.

    Subclass it, define ``make_policy`` and run its ``TestCase``. The model stores learned changes
    and one-shot decisions per cell. For all other cells, the model calls the policy. Decisions of
    the policy must depend only on the batch and the graphs; ``observe`` is never called.
    """

    def make_policy(self) -> Policy:
        """Return a fresh policy."""
        raise NotImplementedError(f"{type(self).__name__} must define make_policy().")

    def make_configs(self) -> st.SearchStrategy[DispatchConfig]:
        """Return a hypothesis strategy for the configurations to test."""
        return configs()

    @initialize(data=st.data(), lazy=st.booleans())
    def start(self, data: st.DataObject, lazy: bool) -> None:
        """Build a dispatcher on an empty registry."""
        self.lazy = lazy
        self.registry: GraphRegistry = GraphRegistry()
        self.policy: Policy = self.make_policy()
        self.config: DispatchConfig = data.draw(self.make_configs())
        self.dispatcher: Dispatcher = Dispatcher(
            self.policy, self.config, registry=self.registry, lazy=lazy, strict=True
        )
        self.learnt: dict[_Cell, Decision] = {}
        self.once: dict[_Cell, list[Decision]] = {}
        self.served: dict[tuple[_Cell, int], Decision] = {}
        self.keys: list[GraphKey] = list(self.registry)

    # -- changes of graphs ----------------------------------------------------------------

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def change_a_graph(self, data: st.DataObject) -> None:
        """Change the state of a graph; drop learned changes of cells that the graph could serve."""
        change = data.draw(changes(self.keys))
        if not apply_change(self.registry, change):
            return
        affected = [change.key]
        if change.kind.startswith("mode_"):
            affected = [key for key in self.registry if key.mode is change.key.mode]
        for key in affected:
            self._void(key.mode, key.num_tokens)

    @rule(data=st.data())
    def declare_another_key(self, data: st.DataObject) -> None:
        """Declare a key, as another policy on the same registry might."""
        key = data.draw(graph_keys(self.config))
        if key in self.registry:
            return
        self.registry.declare([key])
        self.keys.append(key)
        self._void(key.mode, key.num_tokens)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def forget_a_key(self, data: st.DataObject) -> None:
        """Remove a key from the registry."""
        key = data.draw(st.sampled_from(self.keys))
        self.registry.forget(key)
        self.keys.remove(key)
        self._void(key.mode, key.num_tokens)

    # -- learned changes --------------------------------------------------------------------

    @rule(data=st.data(), one_shot=st.booleans(), eager=st.booleans())
    def learn(self, data: st.DataObject, one_shot: bool, eager: bool) -> None:
        """Change the decision of a cell, permanently or for one step."""
        batch = data.draw(batches(self.config))
        answer = Decision.eager("learnt")
        if not eager:
            fitting = [
                key
                for key in self.keys
                if broken_constraint(Decision.replay(key), batch, self.dispatcher.graphs) is None
            ]
            assume(fitting)
            answer = Decision.replay(data.draw(st.sampled_from(fitting)), "learnt")
        update = CellUpdate(batch, answer, one_shot)
        if eager and not batch.allows(RuntimeMode.NONE):
            with pytest.raises(PolicyError, match="chose eager"):
                self.dispatcher.update(update)
            return
        self.dispatcher.update(update)
        cell = self._cell(batch)
        if one_shot:
            self.once.setdefault(cell, []).append(answer)
        else:
            self.learnt[cell] = answer

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """Drop the learned change of a cell, so that the policy is called again."""
        batch = data.draw(batches(self.config))
        self.dispatcher.update(CellUpdate(batch, None))
        self.learnt.pop(self._cell(batch), None)

    @rule(data=st.data())
    def learn_what_is_impossible(self, data: st.DataObject) -> None:
        """Check that a change that violates a constraint is rejected without effect."""
        batch = data.draw(batches(self.config))
        key = data.draw(graph_keys(self.config))
        assume(key not in self.registry)
        with pytest.raises(PolicyError, match="not in the registry"):
            self.dispatcher.update(CellUpdate(batch, Decision.replay(key)))

    @rule(data=st.data(), new_config=st.booleans())
    def swap(self, data: st.DataObject, new_config: bool) -> None:
        """Swap to another policy object, possibly with another configuration."""
        before = self.dispatcher.epoch
        self.config = data.draw(self.make_configs()) if new_config else self.config
        self.policy = self.make_policy()
        assert self.dispatcher.swap(self.policy, self.config) == before + 1
        assert self.dispatcher.num_filled_cells == 0
        self.learnt.clear()
        self.once.clear()
        self.served.clear()
        self.keys = list(self.registry)

    # -- served decisions ---------------------------------------------------------------------

    @rule(data=st.data(), repeat=st.integers(1, 3))
    def dispatch(self, data: st.DataObject, repeat: int) -> None:
        """Check that the table returns the decision of the model."""
        batch = data.draw(batches(self.config))
        for _ in range(repeat):
            self._dispatch(batch)

    def _dispatch(self, batch: Batch) -> None:
        cell = self._cell(batch)
        num_tokens, uniform, loras, allowed = cell
        num_reqs = batch.num_reqs or 0
        expected, one_shot = self._expected(batch, cell)
        if expected.key is None and not batch.allows(RuntimeMode.NONE):
            with pytest.raises(NoGraphError) as caught:
                self.dispatcher.dispatch(num_tokens, num_reqs, uniform, loras, allowed)
            assert caught.value.reason == expected.reason
            return
        served = self.dispatcher.dispatch(num_tokens, num_reqs, uniform, loras, allowed)
        assert (served.mode, served.key, served.reason) == (
            expected.mode,
            expected.key,
            expected.reason,
        ), f"the dispatcher served {served}, but the model returns {expected} for {batch!r}"
        assert served.one_shot is one_shot
        assert served.num_tokens == num_tokens
        assert num_reqs <= served.max_num_reqs
        assert served.padded_num_tokens >= num_tokens
        if not one_shot:
            # Without a change, the same object is served. A changed decision has a larger revision.
            before = self.served.get((cell, num_reqs))
            if before is not None and before is not served:
                assert served.revision > before.revision
            self.served[cell, num_reqs] = served

    def _expected(self, batch: Batch, cell: _Cell) -> tuple[Decision, bool]:
        num_reqs = batch.num_reqs or 0
        waiting = self.once.get(cell)
        if waiting and self._holds(waiting[0], num_reqs):
            decision = waiting.pop(0)
            if not waiting:
                del self.once[cell]
            return decision, True
        learnt = self.learnt.get(cell)
        if learnt is not None and self._holds(learnt, num_reqs):
            return learnt, False
        # The table first calls the policy without a number of requests. If the batch has more
        # requests than the decision allows, the table calls the policy again with the number.
        known = attrs.evolve(batch, num_reqs=None)
        anew = self.dispatcher.decide(known)
        if learnt is not None or not self._holds(anew, num_reqs):
            anew = self.dispatcher.decide(batch)
        return anew, False

    @rule(data=st.data())
    def dispatch_what_is_impossible(self, data: st.DataObject) -> None:
        """Check that the error for an invalid argument has the name and value of the argument."""
        config = self.config
        name, value = data.draw(
            st.sampled_from(
                [
                    ("num_tokens", -1),
                    ("num_tokens", -config.max_num_tokens - 1),
                    ("num_tokens", config.max_num_tokens + 1),
                    ("num_tokens", 1.0),
                    ("num_tokens", None),
                    ("num_reqs", -1),
                    ("num_reqs", 2),
                    ("num_reqs", 0.5),
                    ("uniform", -1),
                    ("uniform", config.num_query_classes),
                    ("loras", -1),
                    ("loras", config.max_loras + 1),
                    ("ceiling", -1),
                    ("ceiling", len(ALLOWED_MODES)),
                    ("ceiling", "FULL"),
                ]
            )
        )
        facts: dict[str, Any] = {"num_tokens": 1, "num_reqs": 1, "uniform": 0, "loras": 0}
        with pytest.raises(DescriptorError) as caught:
            self.dispatcher.dispatch(**{**facts, "ceiling": 2, name: value})
        assert caught.value.field == name
        assert caught.value.value == value

    @invariant()
    def no_fault_of_the_policy(self) -> None:
        """Check that the dispatcher counted no policy faults."""
        if hasattr(self, "dispatcher"):
            assert self.dispatcher.num_policy_errors == 0

    # -- internals --------------------------------------------------------------------------

    def _cell(self, batch: Batch) -> _Cell:
        config = self.config
        uniform = 0
        if batch.uniform:
            uniform = 1 + config.query_lens.index(batch.query_len)
        elif batch.max_query_len is not None:
            uniform = config.num_query_classes - 1
        return (batch.num_tokens, uniform, batch.num_active_loras, batch.allowed)

    @staticmethod
    def _holds(decision: Decision, num_reqs: int) -> bool:
        key = decision.key
        limit = decision.max_num_reqs
        if key is not None and key.descriptor.num_reqs is not None:
            limit = min(limit, key.descriptor.num_reqs)
        return num_reqs <= limit

    def _void(self, mode: RuntimeMode, num_tokens: int) -> None:
        for learnt in (self.learnt, self.once):
            for cell in [
                cell for cell in learnt if cell[0] <= num_tokens and mode in ALLOWED_MODES[cell[3]]
            ]:
                del learnt[cell]

    def teardown(self) -> None:
        """Close the dispatcher."""
        if hasattr(self, "dispatcher"):
            self.dispatcher.close()
