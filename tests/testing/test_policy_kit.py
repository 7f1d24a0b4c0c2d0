"""The kit rejects every planted fault by name; correct policies pass."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import unittest

import pytest
from faulty_policies import PLANTED
from sample_policies import CORRECT, CountingPolicy, PiecewiseOnlyPolicy

from dispatchkit.dispatch import TRAITS, Decision, Dispatcher
from dispatchkit.errors import ConfigError
from dispatchkit.keys import CUDAGraphMode, DispatchConfig
from dispatchkit.testing import (
    OneBucketPolicy,
    PolicyTests,
    SmallestPolicy,
    Verdict,
    configs,
    run_policy_conformance,
)
from dispatchkit.testing.conformance import _find


class TestSmallest(PolicyTests):
    """The three lines that a plugin's tests need."""

    def make_policy(self):
        return SmallestPolicy()


@pytest.mark.slow
class TestOneBucket(PolicyTests):
    """Uses modes whose FULL graphs may serve any batch."""

    max_examples = 10

    def make_policy(self):
        return OneBucketPolicy()

    def configs(self):
        return configs(modes=(CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE))


def test_a_larger_bucket_stands_in_for_the_smallest_or_none_does():
    config = DispatchConfig(mode="FULL", sizes=(4, 8))
    answers = []
    for policy in (SmallestPolicy(), OneBucketPolicy()):
        dispatcher = Dispatcher(policy, config)
        small, large = dispatcher.registry
        dispatcher.registry.captured(large, object())
        dispatcher.registry.failed(small, "no memory")
        decision = dispatcher.dispatch(3)
        answers.append((decision.padded_num_tokens, decision.reason))
    assert answers == [(8, "hit"), (3, "capture_failed")]


@pytest.mark.slow
class TestCounting(PolicyTests):
    max_examples = 20

    def make_policy(self):
        return CountingPolicy()


# Policies that claim to be stateless run in two more processes each.
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(
            policy,
            id=policy.name,
            marks=() if policy is CountingPolicy else pytest.mark.slow,
        )
        for policy in CORRECT
    ],
)
def test_correct_policy_passes(policy):
    verdict = run_policy_conformance(policy, max_examples=5)
    assert verdict.passed, str(verdict)
    assert verdict.policy == policy.name
    assert set(verdict.claimed) == set(policy.traits)
    assert set(verdict.not_claimed) == TRAITS - set(policy.traits)


@pytest.mark.slow
@pytest.mark.parametrize("policy", CORRECT, ids=lambda policy: policy.name)
def test_correct_policy_passes_whatever_the_seed(policy, is_nightly):
    for seed in range(1, 11 if is_nightly else 2):
        run_policy_conformance(policy, seed=seed).raise_if_failed()


def find(policy, finding):
    """Run the property that must find a fault, as the verdict does."""

    class Tests(PolicyTests):
        max_examples = 120  # some faults need more configurations than a short profile draws

        def make_policy(self):
            return policy()

    name = "test_" + finding.replace(" ", "_")
    return _find(Tests(), name)


@pytest.mark.parametrize(
    ("policy", "finding", "message"), PLANTED, ids=[policy.__name__ for policy, _, _ in PLANTED]
)
def test_planted_fault_is_rejected_by_name(policy, finding, message):
    """Each is a typical mistake, and the message must lead to it."""
    found = find(policy, finding)
    assert found.holds is False, f"not found: {policy.__doc__}"
    assert re.search(message, found.message), found.message
    assert found.why


def test_no_two_planted_faults_are_one():
    assert len({policy for policy, _, _ in PLANTED}) == len(PLANTED) >= 30
    assert len({message for _, _, message in PLANTED}) == len(PLANTED)


def test_every_property_has_a_planted_fault():
    """A property that no fault breaks may test nothing."""
    names = {name for name in vars(PolicyTests) if name.startswith("test_")}
    broken = {"test_" + finding.replace(" ", "_") for _, finding, _ in PLANTED}
    assert names == broken


def test_message_has_what_is_needed_to_try_it_again():
    policy, finding, _ = PLANTED[0]
    message = find(policy, finding).message
    assert "batch:  num_tokens=" in message
    assert "config: DispatchConfig(" in message


def test_same_seed_gives_the_same_verdict():
    faulty = next(policy for policy, *_ in PLANTED if not policy.traits)
    first, second = (run_policy_conformance(faulty, seed=3, max_examples=5) for _ in range(2))
    assert first == second
    assert str(first) == str(second)


def test_verdict_of_a_faulty_policy_reads_well():
    verdict = run_policy_conformance(PLANTED[4][0], max_examples=5)
    text = str(verdict)
    assert not verdict.passed
    assert text.startswith("Policy 'smallest' violates the contract (seed 0).")
    assert "FAILS       constraints go before preferences" in text
    assert "why: A mode that a batch does not allow" in text
    with pytest.raises(AssertionError, match="violates the contract"):
        verdict.raise_if_failed()


def test_trait_that_does_not_exist_fails_the_verdict():
    class Claims(CountingPolicy):
        traits = ("fastest",)

    verdict = run_policy_conformance(Claims, max_examples=5)
    assert verdict.unknown == ("fastest",)
    assert not verdict.passed
    assert "unknown traits claimed: fastest" in str(verdict)


def test_trait_not_claimed_is_skipped_by_name():
    tests = TestSmallest()
    with pytest.raises(unittest.SkipTest, match="all_keys_reachable is not claimed"):
        tests.test_trait_all_keys_reachable()
    verdict = Verdict("x", (), claimed=("order",), unknown=(), seed=0)
    assert "not claimed, not tested: all_keys_reachable, monotone" in str(verdict)


def test_instance_is_left_as_it_was():
    policy = CountingPolicy()
    before = copy.deepcopy(vars(policy))
    assert run_policy_conformance(policy, max_examples=5).passed
    assert vars(policy) == before


def test_what_is_no_policy_is_refused():
    with pytest.raises(
        TypeError, match=r"A policy is .* or a factory that returns one; got 7, which has no decide"
    ):
        run_policy_conformance(7)
    with pytest.raises(TypeError, match=r"method decide\(\), .* the factory returned None, which"):
        run_policy_conformance(lambda: None)


def test_make_policy_must_be_defined():
    with pytest.raises(NotImplementedError, match="must define make_policy"):
        PolicyTests().make_policy()


def test_policy_may_refuse_some_configurations():
    class Picky(PiecewiseOnlyPolicy):
        traits = ()

        def declare(self, config):
            if len(config.query_lens) > 1:
                raise ConfigError("query_lens", config.query_lens, "one length")
            return super().declare(config)

    assert run_policy_conformance(Picky, max_examples=5).passed


def test_policy_that_refuses_everything_fails():
    """Otherwise it would satisfy every property by never being asked."""

    class Refuses(SmallestPolicy):
        def declare(self, config):
            raise ConfigError("mode", config.mode, "another one")

    found = find(Refuses, "chosen key was declared")
    assert found.holds is False
    assert re.search(r"declare rejected every configuration \(\d+ tried\)", found.message)
    assert (
        "declare rejected every configuration of"
        in find(Refuses, "a plain batch gets a graph").message
    )


def test_policy_for_few_configurations_narrows_them():
    class OnlyPlain(SmallestPolicy):
        def declare(self, config):
            if config.query_lens != (1,) or config.max_loras:
                raise ConfigError("query_lens", config.query_lens, "(1,), without adapters")
            return super().declare(config)

    plain = configs(query_lens=[(1,)], max_loras=0)
    assert run_policy_conformance(OnlyPlain, max_examples=5, configs=plain).passed


@pytest.mark.parametrize("answer", [7, None, object()])
def test_declared_thing_that_is_no_key_is_named(answer):
    class Odd(SmallestPolicy):
        def declare(self, config):
            return [answer]

    found = find(Odd, "chosen key was declared")
    assert found.holds is False
    assert f"declare returned the key {answer!r}, but must return only GraphKeys" in found.message


def test_declare_that_returns_nothing_is_named():
    class Forgets(SmallestPolicy):
        def declare(self, config):
            pass

    found = find(Forgets, "chosen key was declared")
    assert found.message == "declare returned None, but must return only GraphKeys"


def test_decisions_that_differ_in_a_field_are_shown_in_full():
    class Wavers(SmallestPolicy):
        traits = ()
        turn = 0

        def decide(self, batch, graphs):
            self.turn += 1
            return Decision.eager("never", timed=self.turn % 2 == 0)

    message = find(Wavers, "same batch same decision").message
    assert "timed=True" in message.splitlines()[0]
    assert "timed=False" in message.splitlines()[0]


def test_batch_with_a_bounded_query_length_is_named():
    """A uniform graph must not serve requests of varying length."""

    class MistakesVaryingLengths(SmallestPolicy):
        def decide(self, batch, graphs):
            if batch.max_query_len is not None and not batch.uniform:
                for key in graphs:
                    own = key.descriptor
                    if own.uniform and own.num_tokens >= batch.num_tokens:
                        return Decision.replay(key)
            return super().decide(batch, graphs)

    found = find(MistakesVaryingLengths, "uniform graph serves only its own query length")
    assert re.search(r"for a decode batch with up to \d tokens? per request", found.message)


def test_declare_that_raises_is_named():
    class Raises(SmallestPolicy):
        def declare(self, config):
            return 1 / 0

    found = find(Raises, "every batch gets an answer")
    assert found.holds is False
    assert "declare raised ZeroDivisionError" in found.message


def test_policy_of_a_local_class_is_not_tried_in_another_process():
    class Local(SmallestPolicy):
        pass

    found = find(Local, "trait stateless in another process")
    assert found.holds is None
    assert "cannot be pickled" in found.message


def test_policy_of_a_script_is_not_tried_in_another_process(monkeypatch):
    """A policy typed in a script or terminal is not at fault for that."""
    scripted = type("Scripted", (SmallestPolicy,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Scripted", scripted, raising=False)
    found = find(scripted, "trait stateless in another process")
    assert found.holds is None
    assert "move it to a module" in found.message


def test_kit_for_policies_loads_no_torch():
    """Authors of policies need no torch."""
    code = (
        "import sys; from dispatchkit.testing import run_policy_conformance, PolicyTests, "
        "DispatcherMachine; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kit_can_be_looked_at_without_hypothesis():
    """Names are loaded on first use; the error for missing packages states the next step."""
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import dispatchkit.testing as kit\n"
        "assert 'PolicyTests' in dir(kit)\n"
        "try: kit.PolicyTests\n"
        "except ModuleNotFoundError as error: print(error.__notes__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'dispatchkit[testing]'" in done.stdout


def test_unknown_name_of_the_kit_is_an_attribute_error():
    import dispatchkit.testing as kit

    with pytest.raises(AttributeError, match="no attribute 'PolicyTest'"):
        _ = kit.PolicyTest


def test_a_failure_is_printed_once_with_the_line_that_raised():
    class Raises(SmallestPolicy):
        traits = ()

        def decide(self, batch, graphs):
            raise ValueError("planted")

    text = str(run_policy_conformance(Raises, max_examples=2))
    assert re.search(r"decide raised ValueError: planted \(test_policy_kit\.py:\d+\)\.", text)
    assert "the same failure as for 'every batch gets an answer'" in text
    assert len(re.findall("decide raised ValueError: planted", text)) < text.count("FAILS")


def test_a_plain_batch_with_a_wrong_answer_is_reported_like_others():
    class Wrong(SmallestPolicy):
        def decide(self, batch, graphs):
            return "FULL"

    found = find(Wrong, "a plain batch gets a graph")
    assert found.message.startswith("decide returned 'FULL', but must return a Decision or None")
