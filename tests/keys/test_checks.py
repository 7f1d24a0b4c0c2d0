"""Integers and flags: every setting accepts and refuses the same values."""

from __future__ import annotations

import numpy as np
import pytest

from dispatchkit.dispatch.lanes import lane_fault, lane_priorities
from dispatchkit.dispatch.policy import PacedPolicy, Policy, pace_fault
from dispatchkit.errors import ConfigError, DescriptorError, PolicyError
from dispatchkit.keys import Axis, Batch, BatchDescriptor, DispatchConfig
from dispatchkit.keys.axes import Variants
from dispatchkit.keys.checks import (
    check_count,
    check_flag,
    check_instance,
    has_members,
    read_flag,
    whole_number,
)
from dispatchkit.observe.recorder import StepRecorder
from dispatchkit.observe.timeline import Timeline

CONFIG = DispatchConfig(sizes=(8,))
VARIANTS = Variants((Axis("length", (4, 16)),), 8)


def priority(answer):
    """The lane priority that a policy returns."""
    policy = type("Answers", (), {"stream_priorities": lambda self, num_lanes: [answer]})()
    return lane_priorities(policy, 1, name="answers")[0]


def without(fault, value):
    if fault:
        raise ConfigError("answer", fault, "a whole number")
    return whole_number(value)


TAKERS = {
    "check_count": lambda value: check_count(value, "count"),
    "capture size": lambda value: DispatchConfig(sizes=[value]).sizes[0],
    "adapters": lambda value: DispatchConfig(sizes=[4], max_loras=value).max_loras,
    "bucket": lambda value: Axis("length", [value]).buckets[0],
    "value of an axis": lambda value: VARIANTS.of_values(0, {"length": value}).values[0],
    "adapters of a variant": lambda value: VARIANTS.facts(VARIANTS.of_buckets(value, (4,)))[0],
    "descriptor": lambda value: BatchDescriptor(value).num_tokens,
    "batch": lambda value: Batch(value).num_tokens,
    "allowed modes": lambda value: Batch(4, allowed=value).allowed,
    "capacity": lambda value: StepRecorder(CONFIG, capacity=value).capacity,
    "spans": lambda value: Timeline(capacity=value)._spans.maxlen,
    "priority": priority,
    "lane": lambda value: without(lane_fault(value, 5), value),
    "pace": lambda value: without(pace_fault(value), value),
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_whole_numbers_of_python_and_numpy_are_taken_as_ints(take):
    for value in (4, np.int64(4), np.uint8(4), np.array(4)):
        taken = take(value)
        assert (type(taken), taken) == (int, 4)


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_anything_else_is_refused_flags_too(take):
    for value in (True, np.True_, np.array(True), 4.0, np.float32(4), None, [4], object()):
        with pytest.raises((ConfigError, DescriptorError, PolicyError)):
            take(value)


def test_requests_that_are_not_given_stay_none():
    assert (Batch(4).num_reqs, BatchDescriptor(4, None).num_reqs) == (None, None)
    assert type(BatchDescriptor(4, np.int64(2)).num_reqs) is int


def test_limits_are_part_of_the_message():
    for limits, text in (
        ({"minimum": 3}, "a whole number of at least 3,"),
        ({"minimum": 3, "maximum": 5}, "a whole number from 3 to 5,"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_count(2, "count", **limits)
    with pytest.raises(ConfigError, match="from 1 to 5"):
        check_count(6, "count", maximum=5)
    assert check_count(-2, "count", minimum=None) == -2


@pytest.mark.parametrize("read", [check_flag, read_flag])
def test_flags_of_python_and_numpy_are_flags(read):
    for value in (True, np.True_, False, np.False_):
        assert read(value, "lazy") is bool(value)
    for value in (1, 0, None, "maybe", np.int64(1)):
        with pytest.raises(ConfigError, match="lazy must be"):
            read(value, "lazy")


def test_words_are_flags_only_where_settings_are_text():
    words = {"yes": True, " On ": True, "1": True, "FALSE": False, "no": False, "0": False}
    for word, flag in words.items():
        assert read_flag(word, "lazy") is flag
        with pytest.raises(ConfigError, match="True or False"):
            check_flag(word, "lazy")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x" * 300, r"'x+ \.\.\. x+' \(302 characters\)"),
        (10**5000, "<int too large to print>"),
        (np.zeros((3, 16)), r"<ndarray of shape \(3, 16\)>"),
        ({"x": np.zeros((3, 16)), "n": 3}, r"{'x': <ndarray of shape \(3, 16\)>, 'n': 3}"),
        (["a", (np.zeros(2),)], r"\['a', \(<ndarray of shape \(2,\)>,\)\]"),
        (np.float32(4), r"(np.float32\()?4.0\)?"),
        (type("Module", (), {"__repr__": lambda self: "Module(\n  3\n)"})(), "<Module>"),
        (type("Odd", (), {"__repr__": lambda self: 1 / 0})(), "<Odd that cannot be printed>"),
    ],
    ids=["text", "int", "array", "dictionary", "list", "scalar", "lines", "faulty"],
)
def test_a_message_shows_its_value_in_short(value, shown):
    """Elements of tensors, which may be on a device, are not printed."""
    with pytest.raises(ConfigError, match=f"^axes must be right, got {shown}\\.$") as caught:
        raise ConfigError("axes", value, "right")
    assert caught.value.value is value


class Wrapped:
    """A policy that passes all calls on to another policy."""

    def __init__(self, **members):
        self.inner = members

    def __getattr__(self, name):
        try:
            return vars(self)["inner"][name]
        except KeyError:
            raise AttributeError(name) from None


def test_members_of_a_protocol_may_come_from_a_wrapped_object():
    """Since Python 3.12, ``isinstance`` ignores members that ``__getattr__`` returns."""
    policy = Wrapped(declare=list, decide=max)
    assert check_instance(policy, Policy, "policy") is policy
    assert not has_members(policy, PacedPolicy)
    assert has_members(Wrapped(**policy.inner, observe=print, pace=1), PacedPolicy)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (3, Policy, "policy must be a Policy, got 3. The object lacks declare, decide."),
        (Wrapped(declare=list), Policy, r"a Policy, got <.*Wrapped object.*>. The object lacks de"),
        (type("Own", (), {"declare": list, "decide": max}), Policy, r"an instance: Own\(\.\.\.\)"),
        (DispatchConfig, DispatchConfig, r"Pass an instance: DispatchConfig\(\.\.\.\)\.$"),
        (int, DispatchConfig, "policy must be a DispatchConfig, got <class 'int'>. The hint.$"),
    ],
)
def test_objects_and_classes_that_do_not_fit_are_refused(value, kind, message):
    with pytest.raises(ConfigError, match=message):
        check_instance(value, kind, "policy", "" if kind is Policy else "The hint.")
