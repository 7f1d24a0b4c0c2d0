"""The policy ``composite``: order, faults, nesting, live changes, outcomes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from dispatchkit import (
    Batch,
    BatchDescriptor,
    CellUpdate,
    Decision,
    DispatchConfig,
    Dispatcher,
    GraphKey,
    GraphView,
    Outcome,
    RuntimeMode,
    explain,
    load_plugins,
)
from dispatchkit.dispatch import PolicyParts
from dispatchkit.errors import ConfigError, PolicyError, UnknownNameError
from dispatchkit.testing import PolicyTests, batches, configs, graph_view, registries

from dispatchkit_composite import CompositePolicy, Member, members_from_pyproject

PLUGINS = load_plugins()
CONFIG = DispatchConfig(mode="PIECEWISE", sizes=(8, 16, 32))


def piecewise(size: int) -> GraphKey:
    return GraphKey(RuntimeMode.PIECEWISE, BatchDescriptor(size))


@attrs.define(eq=False)
class Scripted:
    """Returns a fixed bucket up to a number of tokens, or runs a script."""

    name: str = "scripted"
    bucket: int = 32
    up_to: int = 32
    raises: Exception | None = None
    answer: Any = None
    updates: list[Any] = attrs.field(factory=list)
    seen: list[Outcome] = attrs.field(factory=list)

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        return [piecewise(self.bucket)]

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        if self.raises is not None:
            raise self.raises
        if self.answer is not None:
            return self.answer
        if batch.num_tokens > self.up_to or not batch.allows(RuntimeMode.PIECEWISE):
            return None
        return Decision.replay(piecewise(self.bucket))

    def observe(self, outcome: Outcome) -> list[Any]:
        self.seen.append(outcome)
        return self.updates


@pytest.mark.slow
class TestOfOne(PolicyTests):
    max_examples = 20

    def make_policy(self) -> CompositePolicy:
        return CompositePolicy("vllm", plugins=PLUGINS)


class TestOfThree(PolicyTests):
    max_examples = 20

    def make_policy(self) -> CompositePolicy:
        inner = CompositePolicy(
            [Member("few", "threshold", options={"max_tokens": 8})], plugins=PLUGINS
        )
        return CompositePolicy(
            [Member("inner", inner, 5), Member("vllm"), Member("threshold")], plugins=PLUGINS
        )


def serve(policy: CompositePolicy, **options: Any) -> Dispatcher:
    return Dispatcher(policy, CONFIG, lazy=True, strict=True, **options)


def test_highest_priority_that_answers_decides() -> None:
    low = Member("low", Scripted(bucket=32))
    high = Member("high", Scripted(bucket=8, up_to=8), priority=1)
    table = serve(CompositePolicy([low, high]))
    assert [(table.dispatch(n).policy, table.dispatch(n).padded_num_tokens) for n in (8, 9)] == [
        ("high", 8),
        ("low", 32),
    ]


def test_equal_priorities_are_asked_in_the_order_of_addition() -> None:
    policy = CompositePolicy([Member("b", Scripted(bucket=16, up_to=16)), Member("a", Scripted())])
    policy.add("c", Scripted(bucket=8, up_to=8), priority=0)
    assert [one.name for one in policy.members] == ["b", "a", "c"]
    assert serve(policy).dispatch(4).policy == "b"


def test_nobody_answers() -> None:
    table = serve(CompositePolicy([Member("small", Scripted(up_to=4))]))
    assert table.dispatch(5).reason == "no_policy_answered"


@hypothesis.given(st.data())
def test_composite_of_one_is_that_one(data: st.DataObject) -> None:
    """Keys and decisions are equal, for nested composites and any states of graphs."""
    config = data.draw(configs())
    alone = PLUGINS.create_policy("vllm")
    nested = CompositePolicy([Member("outer", CompositePolicy([Member("only", alone)]))])
    try:
        keys = list(alone.declare(config))
    except ConfigError:
        hypothesis.reject()
    assert list(nested.declare(config)) == keys
    view = graph_view(data.draw(registries(keys)), config)
    for batch in data.draw(st.lists(batches(config), min_size=1, max_size=5)):
        expected = alone.decide(batch, view)
        answer = nested.decide(batch, view)
        assert answer is not None
        assert answer.policy == "outer/only"
        assert attrs.evolve(answer, policy="") == expected
    assert nested.members[0].faults == 0


# -- faults -----------------------------------------------------------------------------------


def test_a_member_that_raises_is_named_counted_and_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = Scripted(name="bad", raises=LookupError("no such thing"))
    policy = CompositePolicy([Member("bad", bad, 9), Member("good", Scripted())], max_faults=10**6)
    with caplog.at_level(logging.WARNING, "dispatchkit.composite"):
        table = serve(policy)
        before = policy.members[0].faults
        assert table.dispatch(3).policy == "good"
        assert table.dispatch(3).policy == "good"  # from the table, without asking the policy
    assert policy.members[0].faults == before + 1
    assert policy.members[0].last_fault == "decide: LookupError: no such thing"
    assert len(caplog.messages) == 1
    assert "'bad'" in caplog.messages[0]
    assert table.num_policy_errors == 0


@pytest.mark.parametrize(
    "answer",
    [
        "replay",
        Decision.replay(piecewise(4)),  # not declared
        Decision(RuntimeMode.FULL, piecewise(32), "hit"),
    ],
)
def test_an_answer_against_the_constraints_is_the_members_fault(answer: Any) -> None:
    policy = CompositePolicy(
        [Member("bad", Scripted(answer=answer), 9), Member("good", Scripted())]
    )
    assert serve(policy).dispatch(20).policy == "good"
    assert policy.members[0].faults == 3
    assert policy.members[0].suspended


def test_repeated_faults_suspend_and_resuming_asks_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = Scripted(raises=ValueError("It is broken."))
    policy = CompositePolicy([Member("bad", bad, 9), Member("good", Scripted())], max_faults=2)
    with caplog.at_level(logging.WARNING, "dispatchkit.composite"):
        table = serve(policy)
    assert caplog.messages[-1].endswith(
        "ValueError: It is broken. The member is suspended until you call resume('bad')."
    )
    assert [(one.name, one.suspended, one.faults) for one in policy.members] == [
        ("bad", True, 2),
        ("good", False, 0),
    ]
    bad.raises = None
    assert table.dispatch(7).policy == "good"
    policy.resume("bad")
    table.swap()
    assert table.dispatch(7).policy == "bad"


def test_single_faults_between_good_answers_do_not_suspend() -> None:
    shaky = Scripted()
    policy = CompositePolicy([Member("shaky", shaky), Member("good", Scripted())], max_faults=2)
    table = serve(policy)
    for num_tokens in range(1, 9):
        shaky.raises = ValueError("now and then") if num_tokens % 2 else None
        table.dispatch(num_tokens)
    assert (policy.members[0].faults, policy.members[0].suspended) == (4, False)


def test_eager_where_it_is_not_allowed_gives_way_to_a_graph() -> None:
    eager = Scripted(answer=Decision.eager("rather not"))
    policy = CompositePolicy([Member("eager", eager, 1), Member("graph", Scripted())])
    table = serve(policy)
    only_piecewise = 3
    assert table.dispatch(5).reason == "rather not"
    assert table.dispatch(5, ceiling=only_piecewise).policy == "graph"
    assert policy.members[0].faults == 0


def test_a_fault_in_observe_or_declare_is_contained() -> None:
    class Wild(Scripted):
        def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
            return ["not a key"]  # type: ignore[list-item]

    wild = Wild(updates=["not an update"], up_to=0)
    policy = CompositePolicy([Member("wild", wild, 1), Member("good", Scripted())], max_faults=9)
    table = serve(policy)
    decision = table.dispatch(5)
    table.observe(Outcome(table.batch(5), decision, 100.0))
    assert policy.members[0].faults == 2
    assert table.num_policy_errors == 0


# -- outcomes ---------------------------------------------------------------------------------


def test_members_see_their_own_outcomes_and_others_marked() -> None:
    first, second = Scripted(name="one", up_to=8), Scripted(name="two")
    inner = CompositePolicy([Member("b", second)])
    table = serve(CompositePolicy([Member("a", first, 1), Member("inner", inner)]))
    for num_tokens in (8, 9):
        table.observe(Outcome(table.batch(num_tokens), table.dispatch(num_tokens), 50.0))
    assert [(one.won, one.batch.num_tokens) for one in first.seen] == [(True, 8), (False, 9)]
    assert [(one.won, one.batch.num_tokens) for one in second.seen] == [(False, 8), (True, 9)]
    assert second.seen[1].decision.policy == "two"


def test_it_learns_if_a_member_does_and_a_composite_of_composites_alike() -> None:
    plain = CompositePolicy([Member("inner", CompositePolicy("vllm"))])
    learning = CompositePolicy([Member("inner", CompositePolicy("vllm,adaptive"))])
    assert (PolicyParts.of(plain).learns, PolicyParts.of(learning).learns) == (False, True)
    plain.add("adaptive")
    assert PolicyParts.of(plain).learns


def test_a_member_changes_only_cells_that_are_its_own() -> None:
    batch = Batch(9)
    answer = Decision.eager("learnt")
    updates = [CellUpdate(batch, answer), CellUpdate(Batch(5), answer)]
    learner = Scripted(name="learner", updates=updates)
    policy = CompositePolicy([Member("small", Scripted(up_to=8), 1), Member("learner", learner)])
    table = serve(policy)
    assert [table.dispatch(n).policy for n in (5, 9)] == ["small", "learner"]
    table.observe(Outcome(table.batch(9), table.dispatch(9), 50.0))
    assert [(table.dispatch(n).policy, table.dispatch(n).reason) for n in (5, 9)] == [
        ("small", "hit"),
        ("learner", "learnt"),
    ]


# -- changes while serving --------------------------------------------------------------------


def test_members_come_and_go_while_serving() -> None:
    policy = CompositePolicy([Member("big", Scripted(bucket=32))])
    table = serve(policy)
    assert table.dispatch(8).padded_num_tokens == 32
    policy.add("exact", Scripted(bucket=8, up_to=8), priority=1)
    table.swap()
    assert table.dispatch(8).padded_num_tokens == 8
    policy.remove("exact")
    table.swap()
    assert table.dispatch(8).padded_num_tokens == 32


# -- specifications of members --------------------------------------------------------------


def test_text_gives_names_policies_and_priorities() -> None:
    policy = load_plugins().create_policy("composite", members="small=threshold:10, vllm")
    assert [(one.name, one.policy, one.priority) for one in policy.members] == [
        ("small", "threshold", 10),
        ("vllm", "vllm", 0),
    ]


@pytest.mark.parametrize("members", ["", " , ", 5])
def test_members_of_no_known_form_are_refused(members: Any) -> None:
    with pytest.raises(ConfigError, match="members must be"):
        CompositePolicy(members)


def test_explain_names_the_member_that_decided() -> None:
    table = serve(CompositePolicy([Member("small", Scripted(up_to=4)), Member("rest", Scripted())]))
    assert explain(table, 3).policy == "composite, member small"
    assert "   policy composite, member rest; padding" in str(explain(table, 5))


def test_file_gives_members_with_options(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(
        "[[tool.dispatchkit.composite.members]]\n"
        'name = "small"\npolicy = "threshold"\npriority = 10\noptions = { max_tokens = 8 }\n'
        '[[tool.dispatchkit.composite.members]]\npolicy = "vllm"\n'
    )
    policy = load_plugins().create_policy("composite", pyproject=str(file))
    table = serve(policy)
    assert [table.dispatch(n).policy for n in (8, 9)] == ["small", "small"]
    assert [one.name for one in policy.members] == ["small", "vllm"]
    assert table.dispatch(9).reason == "above_max_tokens"


@pytest.mark.parametrize(
    "text", ["", "[tool.dispatchkit]\n", "[[tool.dispatchkit.composite.members]]\nrank = 1\n", "["]
)
def test_a_file_without_members_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        members_from_pyproject(file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pyproject": 3}, "pyproject must be the path of a file"),
        ({"pyproject": "absent.toml"}, r"Cannot read absent.toml: No such file"),
        (
            {"plugins": 3},
            r"plugins must be a PluginSet, got 3. Pass the result of load_plugins\(\)",
        ),
        (
            {"members": [{"name": "a", "policy": 3}]},
            "policy of member 'a' must be a policy object or",
        ),
        ({"members": [{"name": "a", "policy": CompositePolicy}]}, "instance: CompositePolicy"),
        ({"members": [{"name": "vllm", "options": 3}]}, "options of member 'vllm' must be a dict"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompositePolicy(**settings)


@pytest.mark.parametrize("members", ["a:b", "vllm,vllm", "a/b=vllm", [{"nam": "vllm"}], [3], ":4"])
def test_members_that_cannot_be_read_are_refused(members: Any) -> None:
    with pytest.raises(ConfigError):
        CompositePolicy(members)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="treshold"):
        CompositePolicy("treshold")
    with pytest.raises(UnknownNameError, match="member"):
        CompositePolicy().remove("nobody")


def test_a_composite_is_no_member_of_itself() -> None:
    policy = CompositePolicy()
    with pytest.raises(ConfigError, match="is the composite itself"):
        policy.add("me", policy)


def test_a_member_that_fails_to_be_made_is_an_error_that_names_it() -> None:
    plugins = load_plugins()
    plugins.register_policy("odd", lambda: (_ for _ in ()).throw(OSError("no disk")))
    with pytest.raises(PolicyError, match="odd"):
        CompositePolicy("odd", plugins=plugins)
