"""What the benchmark of a step says to arguments that it cannot take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--only", "nothing"], "no group 'nothing' on this machine; those here are "),
        (["0"], "'0' is not a whole number of at least 1"),
        (["--trace", "nowhere.csv"], "nowhere.csv: no such file"),
    ],
)
def test_what_cannot_be_measured_is_told(monkeypatch, capsys, given, said):
    monkeypatch.syspath_prepend(str(BENCH))
    import step

    monkeypatch.setattr(sys, "argv", ["step.py", *given])
    with pytest.raises(SystemExit) as raised:
        step.main()
    assert raised.value.code == 2
    assert said in capsys.readouterr().err
