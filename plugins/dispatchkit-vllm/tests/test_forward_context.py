"""The forward context is set around a step, read inside it, and restored afterwards."""

from __future__ import annotations

import enum
import threading

import pytest

pytest.importorskip("torch")

from dispatchkit import BatchDescriptor, RuntimeMode
from dispatchkit.errors import ConfigError, UnknownNameError

from dispatchkit_vllm.wrapper import (
    NoForwardContextError,
    forward_context_is_available,
    get_forward_context,
    set_forward_context,
)


def test_outside_of_a_step_there_is_none():
    assert not forward_context_is_available()
    with pytest.raises(NoForwardContextError, match="set_forward_context"):
        get_forward_context()
    with pytest.raises(AssertionError):  # expected by vLLM's code
        get_forward_context()


def test_contexts_nest_and_the_outer_one_comes_back():
    with set_forward_context("FULL", "outer", layer=3):
        with set_forward_context(RuntimeMode.PIECEWISE, "inner"):
            assert get_forward_context().descriptor == "inner"
        outer = get_forward_context()
        assert (outer.runtime_mode, outer.descriptor) == (RuntimeMode.FULL, "outer")
        assert outer.facts == {"layer": 3}
    assert not forward_context_is_available()


def test_a_failing_step_leaves_no_context_behind():
    with pytest.raises(ZeroDivisionError), set_forward_context("FULL", "key"):
        _ = 1 / 0
    assert not forward_context_is_available()


def test_a_descriptor_is_made_from_the_number_of_tokens():
    with set_forward_context(num_tokens=7) as context:
        assert context.descriptor == BatchDescriptor(7)
    with set_forward_context("FULL", "given", num_tokens=7) as context:
        assert context.descriptor == "given"
    with set_forward_context() as context:
        assert (context.runtime_mode, context.descriptor) == (RuntimeMode.NONE, None)


def test_another_enum_s_member_of_that_name_is_taken():
    foreign = enum.Enum("Foreign", "NONE PIECEWISE FULL")
    with set_forward_context(foreign.PIECEWISE, "key") as context:
        assert context.runtime_mode is RuntimeMode.PIECEWISE


def test_a_mode_made_of_two_or_an_unknown_one_is_refused():
    with pytest.raises(ConfigError, match="runtime mode"), set_forward_context("FULL_DECODE_ONLY"):
        pass
    with pytest.raises(UnknownNameError), set_forward_context("FUL"):
        pass


def test_threads_have_contexts_of_their_own():
    seen: list[bool] = []
    with set_forward_context("FULL", "key"):
        thread = threading.Thread(target=lambda: seen.append(forward_context_is_available()))
        thread.start()
        thread.join()
    assert seen == [False]
