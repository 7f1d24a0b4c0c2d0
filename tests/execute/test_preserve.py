"""preserved_state restores the state that steps changed, however its block ends."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from interrupts import Interrupt

from dispatchkit import GraphRunner, StaticInput, StepState
from dispatchkit.backends.tape import TapeBackend
from dispatchkit.execute import preserved_state
from dispatchkit.execute.step.state import Snapshot, restored


@pytest.mark.parametrize("fault", [None, ZeroDivisionError])
@pytest.mark.parametrize("seed", range(8))
def test_steps_in_flight_are_part_of_the_state_and_do_not_write_after_it_is_restored(
    seed: int, fault: type[Exception] | None
) -> None:
    """On a deferred tape, work of other streams runs late unless somebody waits for it."""
    total = torch.zeros(4)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        total.add_(tokens.sum(0))
        return tokens + 1

    backend = TapeBackend(scheduler=seed)
    runner = GraphRunner(
        step,
        {"tokens": StaticInput((None, 4), "float32")},
        sizes=[4],
        mode="FULL",
        backend=backend,
        state=StepState([total]),
    )
    runner.capture()
    backend.synchronize()
    total.fill_(5)
    side = backend.new_stream()
    with backend.use_stream(side):
        runner(tokens=torch.ones(4, 4))  # in flight when the block starts
    with suppress(ZeroDivisionError), preserved_state(runner), backend.use_stream(side):
        for _ in range(3):
            runner(tokens=torch.ones(4, 4))
        if fault is not None:
            raise fault
    backend.synchronize()
    assert total.tolist() == [9] * 4


@pytest.mark.parametrize("seed", range(40))
def test_steps_on_other_streams_see_what_is_saved_and_restored(seed: int) -> None:
    """Copies are queued on the stream of the block; its steps and later steps may be on others."""
    total = torch.zeros(4)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        total.add_(tokens.sum(0))
        return tokens + 1

    backend, inputs = TapeBackend(scheduler=seed), {"tokens": StaticInput((None, 4), "float32")}
    runner = GraphRunner(
        step, inputs, sizes=[4], mode="FULL", backend=backend, state=StepState([total])
    )
    runner.capture()
    backend.synchronize()
    total.fill_(5)
    block, steps = backend.new_stream(), backend.new_stream()
    with backend.use_stream(block), preserved_state(runner), backend.use_stream(steps):
        runner(tokens=torch.ones(4, 4))
    with backend.use_stream(steps):
        runner(tokens=torch.ones(4, 4))
    backend.synchronize()
    assert total.tolist() == [9] * 4


def test_an_interrupted_restore_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    total, calls = torch.zeros(4), []
    snapshot, restore = Snapshot(torch.device("cpu")), Snapshot.restore
    snapshot.save(total.untyped_storage())

    def interrupted_once(self: Snapshot) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise Interrupt
        restore(self)

    monkeypatch.setattr(Snapshot, "restore", interrupted_once)
    with pytest.raises(Interrupt), restored(snapshot):
        total.fill_(1)
    assert total.tolist() == [0] * 4
