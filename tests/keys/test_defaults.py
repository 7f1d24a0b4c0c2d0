"""Defaults of settings."""

from __future__ import annotations

from dispatchkit import Axis, Batch
from dispatchkit.keys import default_capture_sizes
from dispatchkit.keys.capture_sizes import derive_capture_sizes


def test_a_batch_may_have_no_requests():
    assert Batch(4, num_reqs=0).num_reqs == 0


def test_an_axis_is_padded_unless_it_is_said_to_be_exact():
    assert not Axis("length", (4, 8)).exact


def test_a_step_has_one_token_for_each_request():
    asked = {"max_num_seqs": 10}
    found = default_capture_sizes(100, **asked)
    assert found == default_capture_sizes(100, **asked, query_len=1)
    assert found != default_capture_sizes(100, **asked, query_len=2)


def test_vllm_captures_up_to_512_tokens():
    asked = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    found = derive_capture_sizes("newest", **asked)
    assert found == derive_capture_sizes("newest", **asked, ceiling=512)
    assert found != derive_capture_sizes("newest", **asked, ceiling=528)
