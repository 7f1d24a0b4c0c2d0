"""Facts that follow from the rows of all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_policies import MAX_NUM_TOKENS, SIZES

from dispatchkit import Axis, DispatchConfig, RuntimeMode
from dispatchkit.errors import ConfigError, NoGraphError
from dispatchkit.keys.modes import ALLOWED_MODES

from dispatchkit_ranks import Facts
from dispatchkit_ranks.axis_facts import AxisFacts

CONFIG = DispatchConfig(
    sizes=SIZES,
    max_num_tokens=MAX_NUM_TOKENS,
    query_lens=(2, 1, 4),
    varlen_decode=True,
    max_loras=3,
)
SWITCHES = ("microbatch", "all_to_all")
FACTS = Facts(CONFIG, SWITCHES)

batches = st.tuples(
    st.integers(1, 10),
    st.integers(0, 10),
    st.integers(0, CONFIG.num_query_classes - 1),
    st.integers(0, 3),
    st.integers(0, len(ALLOWED_MODES) - 1),
    st.integers(0, 2),
    st.integers(0, 3),
)
IDLE = (0, 0, 0, 0, 2, 2, 3)


def merged(rows):
    return [max(column) for column in zip(*rows, strict=True)]


def agreed(given_batches):
    return FACTS.merge(merged([FACTS.row(*batch) for batch in given_batches]))


@given(st.lists(batches, min_size=1, max_size=6))
def test_the_outcome_is_the_most_of_all_and_the_most_careful_mode(given_batches):
    """No rank gets a size below its batch or a mode above its own limit."""
    ceiling = min(batch[5] for batch in given_batches)
    allowed = frozenset(mode for mode in RuntimeMode if mode <= ceiling)
    for batch in given_batches:
        allowed &= ALLOWED_MODES[batch[4]]
    if not allowed:
        with pytest.raises(NoGraphError) as caught:
            agreed(given_batches)
        assert caught.value.reason == "no_common_mode"
        return
    found = agreed(given_batches)
    assert found.num_tokens == max(batch[0] for batch in given_batches)
    assert found.num_reqs == max(batch[1] for batch in given_batches)
    assert found.loras == max(batch[3] for batch in given_batches)
    assert ALLOWED_MODES[found.ceiling] == allowed
    both = given_batches[0][6]
    for batch in given_batches:
        both &= batch[6]
    assert found.switches == both


@given(st.lists(batches, min_size=1, max_size=6))
def test_a_common_query_class_is_one_that_every_batch_belongs_to(given_batches):
    """A uniform graph must never serve a rank with a mixed batch."""
    given_batches = [(*batch[:4], 2, *batch[5:]) for batch in given_batches]
    classes = {batch[2] for batch in given_batches}
    found = agreed(given_batches).uniform
    # Classes: 0 mixed, 1 to 3 of 2, 1 and 4 tokens per request, 4 of at most 2 (the first).
    if len(classes) == 1:
        assert {found} == classes
    else:
        assert found == (4 if classes <= {1, 2, 4} else 0)


@given(st.lists(batches, min_size=1, max_size=5), st.integers(1, 3))
def test_idle_ranks_change_nothing(given_batches, num_idle):
    """A rank without work runs a dummy step of the others' size."""
    given_batches = [(*batch[:4], 2, *batch[5:]) for batch in given_batches]
    assert agreed([*given_batches, *[IDLE] * num_idle]) == agreed(given_batches)


def test_all_idle_is_a_step_of_nothing():
    """No rank has work, so there is nothing to pad to."""
    assert agreed([IDLE, IDLE])[:4] == (0, 0, 0, 0)


@given(st.lists(batches, min_size=2, max_size=5), st.randoms())
def test_the_order_of_ranks_does_not_matter(given_batches, random):
    """All ranks compute the same from the same merged row."""
    given_batches = [(*batch[:4], 2, *batch[5:]) for batch in given_batches]
    shuffled = random.sample(given_batches, len(given_batches))
    assert agreed(shuffled) == agreed(given_batches)


def test_too_many_switches_are_refused():
    """The row has a fixed length, so that ranks in different phases can still exchange rows."""
    with pytest.raises(ConfigError, match="switches must be a list of at most"):
        Facts(CONFIG, [f"switch{index}" for index in range(30)])


def test_what_there_is_too_much_of_is_named():
    """Without switches, the axes or the query lengths take too many columns."""
    axes = [Axis(f"axis{index}", (1, 2), exact=True) for index in range(12)]
    config = DispatchConfig(max_num_tokens=8, axes=axes)
    with pytest.raises(
        ConfigError, match=r"axes must be a list of at most \d+ .*exact axis counts twice"
    ):
        AxisFacts(config)
    config = DispatchConfig(max_num_tokens=64, query_lens=tuple(range(1, 41)))
    with pytest.raises(ConfigError, match=r"query_lens must be a list of at most (\d+)") as caught:
        Facts(config)
    most = int(caught.value.args[0].split("at most ")[1].split()[0])
    Facts(DispatchConfig(max_num_tokens=64, query_lens=tuple(range(1, most + 1))))


@pytest.mark.parametrize("device", ["gpu", "meta", 3.5])
def test_a_place_that_rows_cannot_meet_at_is_no_rank_that_is_late(device):
    """Each rank would wait for the others' notes and then name one of them."""
    agreement = pytest.importorskip("dispatchkit_ranks.agreement")
    with pytest.raises(ConfigError, match="device must be 'cpu' or a CUDA device"):
        agreement._device(device)
