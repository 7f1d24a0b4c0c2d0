"""The benchmark of a step: refused arguments, and the account of a step's time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--only", "nothing"], "unknown group 'nothing'; the groups on this machine are "),
        (["0"], "'0' is not a whole number of at least 1"),
        (["--trace", "nowhere.csv"], "nowhere.csv: the file does not exist"),
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


@pytest.mark.slow
def test_each_rung_of_the_account_launches_once(monkeypatch):
    """If a guard fails or a rung is outdated, less is measured than reported."""
    monkeypatch.syspath_prepend(str(BENCH))
    import step
    from _account import Parts

    case = step.Case([step.FIXED], [step.INT64] * 3, 1)
    parts = Parts(case, case.runner("view", step.Idle()))
    launches = []
    parts.launch = parts.plan._launch = lambda graph, stream: launches.append(graph)
    for rungs in (parts.in_place(), parts.views()):
        for name, run in rungs.items():
            for _ in range(20):  # more than between two comparisons of values
                launches.clear()
                run(step.FIXED)
                assert len(launches) == 1, name
