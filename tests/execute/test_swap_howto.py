"""The blocks of the page on changing a serving runner run in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "swap.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_blocks_run_in_their_order(make_runner, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("serving.toml").write_text(blocks("toml")[0])
    runner = make_runner(lambda tokens: tokens * 2, policy="vllm")
    runner.capture()
    names = {"runner": runner}
    swaps, watching, forecasting = blocks("python")
    exec(swaps, names)  # noqa: S102 - the page's own code
    said = re.search(r"# (epoch .*)", swaps).group(1)
    assert capsys.readouterr().out.strip() == said
    exec(watching, names)  # noqa: S102
    assert names["report"].policy == "threshold"
    before, _, after = forecasting.partition("...  # serve\n")
    exec(before, names)  # noqa: S102
    for rows in (1, 3, 8):
        runner(torch.arange(rows))
    exec(after, names)  # noqa: S102
    assert "threshold with the new settings, over 3 steps" in capsys.readouterr().out
    assert runner.dispatcher.epoch == 5
