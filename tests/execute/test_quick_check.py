"""The quick check of device inputs accepts nothing that the slow check refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit import StaticInput
from dispatchkit.errors import InputError
from dispatchkit.execute.io import inputs as module
from dispatchkit.execute.io.inputs import InputSet

SPECS = {
    "x": StaticInput((None, 3), "float32"),
    "y": StaticInput((None,), "int64"),
    "z": StaticInput((2,), "float32"),
}
CPU = torch.device("cpu")


def fitting(rows, *, transposed=False):
    x = torch.zeros(3, rows).T if transposed else torch.zeros(rows, 3)
    return [x, torch.zeros(rows, dtype=torch.int64), torch.zeros(2)]


WRONG = {
    "dtype": lambda rows: torch.zeros(rows, 3, dtype=torch.float64),
    "rows": lambda rows: torch.zeros(rows + 1, 3),
    "width": lambda rows: torch.zeros(rows, 4),
    "rank": torch.zeros,
    "device": lambda rows: torch.zeros(rows, 3, device="meta"),
    "gradient": lambda rows: torch.zeros(rows, 3, requires_grad=True),
    "list": lambda rows: [[0.0] * 3] * rows,
    "none": lambda rows: None,
}


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["fits", "strided", *WRONG]))))
def test_it_answers_as_the_slow_check_does_whatever_came_before(calls):
    quick, slow = InputSet(SPECS, CPU), InputSet(SPECS, CPU)
    for rows, what in calls:
        values = fitting(rows, transposed=what == "strided")
        if what in WRONG:
            values[0] = WRONG[what](rows)
        with torch.enable_grad():
            outcomes = []
            for check in (quick.check, slow._check_uniform):
                try:
                    found, readable = check(values)
                    outcomes.append(found)
                    assert not readable or all(value.is_contiguous() for value in values)
                except InputError as error:
                    outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert (outcomes[0] == rows) is (what not in WRONG)


def test_contiguous_inputs_are_known_to_be_readable_from_the_second_call_on():
    if module.TensorGuards is None:
        pytest.skip("this torch has no quick check")
    inputs = InputSet(SPECS, CPU)
    for rows in (2, 3):
        found = [inputs.check(fitting(rows, transposed=number == 2)) for number in range(4)]
        assert found == [(rows, False), (rows, True), (rows, False), (rows, True)]
    flagged = [torch._neg_view(torch.zeros(4, 3)), *fitting(4)[1:]]
    assert [inputs.check(flagged) for _ in range(3)] == [(4, False)] * 3


def test_a_tensor_that_fitted_without_gradients_is_refused_with_them():
    inputs = InputSet(SPECS, CPU)
    values = fitting(2)
    values[0] = torch.zeros(2, 3, requires_grad=True)
    with torch.no_grad():
        assert inputs.check(values) == (2, False)
        assert inputs.check(values) == (2, False)
    with torch.enable_grad(), pytest.raises(InputError, match="gradient"):
        inputs.check(values)


def test_calls_it_does_not_know_are_checked_slowly_and_it_is_not_made_anew_for_ever(monkeypatch):
    if module.TensorGuards is None:
        pytest.skip("this torch has no quick check")
    made = []

    def counted(*values, **options):
        made.append(values)
        return kept(*values, **options)

    kept = module.TensorGuards
    monkeypatch.setattr(module, "TensorGuards", counted)
    same = torch.zeros(2, dtype=torch.int64)
    twice = {"a": StaticInput((None,), "int64"), "b": StaticInput((None,), "int64")}
    inputs = InputSet(twice, CPU)
    for _ in range(200):
        assert inputs.check([same, same])[0] == 2  # torch's check rejects one tensor for both,
    assert len(made) == 2 * (1 + module._MAX_REPLACED)  # once as contiguous, once with any strides


def test_without_torchs_comparison_the_slow_check_is_all(monkeypatch):
    monkeypatch.setattr(module, "TensorGuards", None)
    inputs = InputSet(SPECS, CPU)
    assert inputs.check == inputs._check_uniform
    assert inputs.check(fitting(3)) == (3, False)
