"""Settings for other engines, read back as each engine reads them."""

from __future__ import annotations

import json
import shlex

import pytest

from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.keys import DispatchConfig
from dispatchkit.observe.trace import StepTrace

pytest.importorskip("numpy")

from dispatchkit_plan import emit, plan_sizes

SIZES = (1, 2, 4, 512)


def test_our_own_form_is_code():
    made = emit(SIZES, "dispatchkit")
    assert eval(made.text, {"DispatchConfig": DispatchConfig}).sizes == SIZES  # noqa: S307
    drafts = emit((8,), "dispatchkit", query_len=4)
    config = eval(drafts.text, {"DispatchConfig": DispatchConfig})  # noqa: S307
    assert (config.sizes, config.query_lens) == ((8,), (4,))


def test_vllm_gets_json_in_one_shell_word():
    flag, value = shlex.split(emit(SIZES, "vllm").text)
    assert flag == "--compilation-config"
    assert json.loads(value) == {"cudagraph_capture_sizes": [1, 2, 4, 512]}
    assert "tokens" in emit(SIZES, "vllm").means
    assert any("align=4" in note for note in emit(SIZES, "vllm", query_len=4).notes)


@pytest.mark.parametrize(
    ("engine", "flag"),
    [("sglang", "--cuda-graph-bs-decode"), ("sglang-legacy", "--cuda-graph-bs")],
)
def test_sglang_gets_numbers_of_requests(engine, flag):
    """A flag followed by integers, as argparse reads nargs='+'."""
    assert shlex.split(emit(SIZES, engine).text) == [flag, "1", "2", "4", "512"]
    assert emit((4, 8, 9), engine, query_len=4).sizes == (1, 2, 3)
    assert emit(SIZES, engine).means.startswith("requests")


def test_tensorrt_llm_gets_yaml():
    """Two levels with padding enabled; without it, only exact sizes would replay."""
    lines = emit(SIZES, "tensorrt-llm").text.splitlines()
    assert lines == [
        "cuda_graph_config:",
        "  enable_padding: true",
        "  batch_sizes: [1, 2, 4, 512]",
    ]


def test_a_plan_is_emitted_hedged_and_by_kind():
    """Engines that count decode requests get only the uniform family."""
    steps = StepTrace(
        {
            "num_tokens": [4, 8, 60] * 300,
            "num_reqs": [4, 8, 2] * 300,
            "uniform_decode": [1, 1, 0] * 300,
        }
    )
    plan = plan_sizes(steps, graphs=6, max_size=64, keyed=True)
    decode = next(f.sizes for f in plan.robust.families if f.uniform)
    assert emit(plan, "sglang").sizes == decode
    assert emit(plan, "vllm").sizes == plan.robust.sizes
    assert any("one list for all kinds" in note for note in emit(plan, "vllm").notes)
    assert json.dumps(emit(plan, "vllm").to_json())


def test_unknown_engines_and_empty_lists_are_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'sglang'"):
        emit(SIZES, "sglan")
    for engine in (3, ["vllm"], None):
        with pytest.raises(UnknownNameError, match="engine must be one of: dispatchkit, sglang"):
            emit(SIZES, engine)
    with pytest.raises(ConfigError, match="at least one size"):
        emit((), "vllm")
    with pytest.raises(ConfigError, match="query_len"):
        emit(SIZES, "vllm", query_len=0)
