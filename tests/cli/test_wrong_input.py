"""Any command line or configuration leads to an answer or one message, never a traceback."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatchkit.cli.app import run as run_app

pytest.importorskip("numpy")

TRACE = "num_tokens,num_reqs,max_query_len,uniform_decode\n3,3,1,1\n9,4,6,0\n4,4,1,1\n"
FILES = {
    "good.csv": TRACE,
    "torn.csv": TRACE[:-4],
    "words.csv": "num_tokens\nmany\n",
    "empty.csv": "",
    "no.json": "{",
    "odd.json": '{"num_steps": "3", "modes": []}',
    "model.json": '{"format": "dispatchkit-cost-model"}',
    "good.toml": "[tool.dispatchkit]\nsizes = [1, 2, 4, 16]\n",
    "broken.toml": "[tool.dispatchkit\n",
    "misspelt.toml": "[tool.dispatchkit]\npolcy = 3\n",
    "mode.toml": '[tool.dispatchkit]\nmode = "FUL"\n',
}
COMMANDS = ["explain", "plan", "simulate", "report", "config show", "policies", "plugins"]
COMMANDS += ["bench --list", "new-policy"]
OPTIONS = """
--sizes --ceiling --mode --policy --loras --max-loras --uniform --num-reqs --all
--query-len --max-num-tokens --max-num-seqs --trace --cost-model --graphs --max-size --fit-on
--keyed --align --engine --memory-bytes --bytes-per-graph --max-graphs --max-bytes --eviction
--lanes --seed -o --output --device --polcy --jsn --help --checkout
""".split()
VALUES = """
0 1 3 8 -1 9999999999999999999999 1.5 nan inf 1,2,4 4,,8 , x FULL PIECEWISE none vllm vllm@0.11
vlm lru fifo first-half vllm sglang lm-decode-h100 [red] \u0663 True {} good.csv torn.csv words.csv
empty.csv no.json odd.json model.json nowhere.csv . /dev/null out.html no/folder/out.html --
""".split()
PAIRS = """
policy=vllm polcy=x sizes=1,2 sizes=0 max_num_tokens=2 lazy=maybe mode=FUL
policy_options={} policy_options=[ policy_options={"x":1} policy cost_model=no.json plugins=
=3 warmups=-1 disable=vllm
""".split()
VARIABLES = {
    "DISPATCHKIT_POLICY": ["vllm", "vlm", ""],
    "DISPATCHKIT_POLCY": ["x"],
    "DISPATCHKIT_SIZES": ["1,2,4", "4,x", "512"],
    "DISPATCHKIT_MAX_NUM_TOKENS": ["2", "0", "x"],
    "DISPATCHKIT_MODE": ["full", "FUL"],
    "DISPATCHKIT_CONFIG": ["good.toml", "broken.toml", "misspelt.toml", "mode.toml", "nowhere"],
}

words = st.one_of(
    st.sampled_from(OPTIONS),
    st.sampled_from(VALUES),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4),
)
before = st.one_of(
    st.just([]),
    st.sampled_from(PAIRS).map(lambda pair: ["--set", pair]),
    st.sampled_from([*FILES, "nowhere.toml"]).map(lambda name: ["--config", name]),
)
environments = st.lists(
    st.sampled_from([(name, value) for name, some in VARIABLES.items() for value in some]),
    max_size=1,
).map(dict)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")


cases = st.tuples(before, st.sampled_from(COMMANDS), st.lists(words, max_size=4), environments)
# Files in the folder are only read or rewritten each time.
checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=20, suppress_health_check=checks)
@given(cases)
def test_wrong_lines_and_configurations_give_messages(case: Any) -> None:
    """A quick check; the next test is thorough."""
    check_answer(*case)


@pytest.mark.slow
@settings(max_examples=max(200, settings.default.max_examples), suppress_health_check=checks)
@given(cases)
def test_many_wrong_lines_and_configurations_give_messages(case: Any) -> None:
    """No traceback, and no partial files."""
    check_answer(*case)


def check_answer(first: list[str], command: str, rest: list[str], environ: dict[str, str]) -> None:
    """Check that codes are 0, 1 or 2, JSON mode prints only JSON, and no file is partial."""
    args: Sequence[str] = [*first, *command.split(), "--json", *rest]
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.dict("os.environ", environ), redirect_stdout(out), redirect_stderr(err):
        code = run_app(args)
    assert code in (0, 1, 2)
    if code == 2:
        assert out.getvalue() == ""
        assert err.getvalue().strip() != ""
    elif "--help" not in rest:
        assert_json(out.getvalue())
    assert list(Path().glob("**/*.part")) == []


def assert_json(text: str) -> Any:
    """Check that standard output is one JSON document."""
    return json.loads(text)
