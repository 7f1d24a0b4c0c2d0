"""Batches split over several graphs: rules of a split, and its use of the table."""

from __future__ import annotations

import pytest

from dispatchkit import DispatchConfig, Dispatcher
from dispatchkit.dispatch import (
    Decision,
    GraphView,
    Part,
    StepCost,
    broken_constraint,
    greedy_parts,
)
from dispatchkit.errors import DescriptorError
from dispatchkit.keys import Batch, BatchDescriptor, CaptureSizeWarning, GraphKey, RuntimeMode
from dispatchkit.registry import GraphRegistry

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE


def key(size: int, mode: RuntimeMode = FULL, **facts: object) -> GraphKey:
    return GraphKey(mode, BatchDescriptor(size, **facts))  # type: ignore[arg-type]


KEYS = (
    *(key(8), key(32), key(32, num_active_loras=2), key(8, axes=(4,)), key(8, PIECEWISE)),
    *(key(16, uniform=True, num_reqs=16), key(64, num_reqs=4)),
)


def view(*, may_split: bool = True, captured: tuple[GraphKey, ...] = KEYS) -> GraphView:
    registry = GraphRegistry()
    registry.declare(KEYS)
    for one in captured:
        registry.captured(one, object())
    return GraphView(
        registry,
        DispatchConfig(sizes=(8, 16, 32, 64)),
        modes=frozenset((FULL, PIECEWISE)),
        dispatchable=lambda entry: entry.graph is not None,
        may_split=may_split,
    )


@pytest.mark.parametrize(
    ("parts", "facts", "problem"),
    [
        ([(key(32), 32), (key(8), 8)], {}, None),
        ([(key(32), 30), (key(8), 8), (key(8), 2)], {}, None),
        ([(key(32), 32), (key(8), 9)], {"num_tokens": 41}, "a graph must be at least as large"),
        ([(key(32), 32), (key(8), 7)], {}, "these parts have only 39 rows"),
        ([(key(64, num_reqs=4), 40)], {}, "a split needs at least two parts"),
        ([(key(8), 8), (key(32), 32)], {}, "put larger graphs first"),
        ([(key(32), 32), (key(8, PIECEWISE), 8)], {}, "all parts must have mode FULL"),
        ([(key(32), 32), (key(9), 8)], {}, "not in the registry"),
        ([(key(32), 32), (key(8, axes=(4,)), 8)], {}, "cannot serve"),
        ([(key(32), 32), (key(8), 8)], {"num_active_loras": 1}, "cannot serve"),
        ([(key(32), 32), (key(8), 8)], {"allowed": 1}, "allows only"),
        ([(key(32), 32), (key(8), 8)], {"uniform": True, "query_len": 1}, "only mixed"),
        ([(key(32), 32), (key(8), 8)], {"max_query_len": 2}, "only mixed"),
        ([(key(64, num_reqs=4), 36), (key(8), 4)], {"num_reqs": 4}, None),
        ([(key(64, num_reqs=4), 36), (key(8), 4)], {"num_reqs": 5}, "cannot serve"),
    ],
)
def test_hard_constraints_hold_for_each_part(
    parts: list[tuple[GraphKey, int]], facts: dict[str, int], problem: str | None
) -> None:
    """Each part obeys them as a batch does; the parts add up to the batch, largest first."""
    batch = Batch(**{"num_tokens": 40, **facts})  # type: ignore[arg-type]
    found = broken_constraint(Decision.split(parts), batch, view())
    assert found is None if problem is None else found is not None and problem in found


def test_a_part_that_cannot_run_and_rows_that_are_not_independent_are_refused() -> None:
    decision, batch = Decision.split([(key(32), 32), (key(8), 8)]), Batch(40)
    found = broken_constraint(decision, batch, view(captured=(key(32),)))
    assert found is not None
    assert "not_captured" in found
    found = broken_constraint(decision, batch, view(may_split=False))
    assert found is not None
    assert "rows_independent=True" in found


@pytest.mark.parametrize("parts", [3, [], [(key(8), 0)], [("key", 4)], [key(8)], [4]])
def test_what_is_no_part_is_refused_where_it_is_made(parts: object) -> None:
    with pytest.raises(DescriptorError):
        Decision.split(parts)  # type: ignore[arg-type]


class Greedy:
    """Uses the largest graph repeatedly, and one graph for the rest."""

    name = "greedy"

    def declare(self, config: DispatchConfig) -> list[GraphKey]:
        return [key(size, num_reqs=4 if size == 32 else None) for size in config.sizes]

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        parts = greedy_parts(batch, graphs, FULL)
        return Decision.split(parts) if parts else None


def dispatcher() -> Dispatcher:
    with pytest.warns(CaptureSizeWarning):
        config = DispatchConfig(mode="FULL", sizes=(8, 32), max_num_tokens=100)
    made = Dispatcher(Greedy(), config, strict=True, may_split=True)
    for one in made.registry:
        made.registry.captured(one, object())
    return made


def test_a_split_is_one_cell_that_any_change_of_a_part_empties() -> None:
    made = dispatcher()
    first = made.dispatch(70)
    assert made.dispatch(70) is first
    assert [part.num_tokens for part in first.parts] == [32, 32, 6]
    assert (first.padded_num_tokens, first.padding, len(first.keys)) == (72, 2, 3)
    assert str(first).startswith("split into 32 rows on FULL tokens=32")
    made.registry.evicted(key(8))
    assert [part.key.num_tokens for part in made.dispatch(70).parts] == [32, 32, 32]
    made.registry.evicted(key(32, num_reqs=4))
    assert made.dispatch(70).reason == "no_policy_answered"


def test_a_split_holds_for_as_many_requests_as_its_parts_may_have() -> None:
    made = dispatcher()
    assert made.dispatch(70).max_num_reqs == 4  # parts of 32 rows may contain all four
    assert made.dispatch(70, 5).reason == "no_policy_answered"
    assert made.dispatch(16).max_num_reqs == 16


def test_a_split_step_costs_what_its_parts_cost() -> None:
    class PerGraph:
        name = "per graph"

        def step_us(
            self, num_tokens: int, captured: int | None, *, piecewise: bool = False
        ) -> float:
            return 10.0 + (captured or 10 * num_tokens)

        def covers(self, num_tokens: int) -> bool:
            return num_tokens <= 32

    cost = StepCost.of(PerGraph(), dispatcher().dispatch(70), 70)
    assert (cost.step_us, cost.eager_us, cost.lost_us) == (102.0, 710.0, 22.0)
    assert cost.measured


def test_parts_are_pairs_or_records() -> None:
    assert Decision.split([Part(key(8), 8), (key(8), 1)]).parts[1] == Part(key(8), 1)
