"""Sessions' state on a device: the tests of the tape, and what only a device can break."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import seed, settings  # noqa: E402
from hypothesis.stateful import run_state_machine_as_test  # noqa: E402

from dispatchkit import GraphRunner, RunnerOptions, SlotState, StaticInput  # noqa: E402
from dispatchkit.errors import DescriptorError  # noqa: E402
from tests.execute.slot_sessions import SessionMachine  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::dispatchkit.execute.ChurnWarning"),
]


class SessionsOnADevice(SessionMachine):
    device, backend = "cuda:0", "cuda"


@pytest.mark.parametrize("part", range(8))
def test_sessions_together_are_what_each_is_alone(part, is_nightly):
    """Sessions join, leave, move and step in any order, compared with each run alone.

    10,000 sequences take minutes in one process, so parts can run in several.
    """
    machine = seed(part)(type("PartOfSessions", (SessionsOnADevice,), {}))
    number = 1250 if is_nightly else 30
    run_state_machine_as_test(
        machine, settings=settings(max_examples=number, stateful_step_count=10, deadline=None)
    )


class Recurrent(torch.nn.Module):
    """A convolution over a session's samples, a GRU cell, and a head."""

    def __init__(self, width=64, hop=32, kernel=8):
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 16, kernel)
        self.project = torch.nn.Linear(16 * hop, width)
        self.cell = torch.nn.GRUCell(width, width)
        self.head = torch.nn.Linear(width, 1)

    def forward(self, audio, slots):
        audio = torch.cat((slots["tail"], audio), 1)
        slots["tail"] = audio[:, -7:]
        features = self.conv(audio.unsqueeze(1)).relu().flatten(1)
        hidden = self.cell(self.project(features).relu(), slots["hidden"])
        slots["hidden"] = hidden
        return self.head(hidden).sigmoid().squeeze(1)


@pytest.mark.parametrize("compact", [False, True])
def test_hundreds_of_sessions_in_random_batches_are_what_each_is_alone(compact):
    """A recurrent model with a convolution runs in batches of any size."""
    torch.manual_seed(0)
    number, hops = 200, 12
    model = Recurrent().cuda().double()  # so that other kernels' rounding does not show
    banks = {
        "tail": StaticInput((None, 7), "float64"),
        "hidden": StaticInput((None, 64), "float64"),
    }
    state = SlotState(banks, number, compact=compact, device="cuda:0")
    inputs = {"audio": StaticInput((None, 32), "float64"), "slots": state}
    sizes = (1, 8, 64, 128, 256)
    runner = GraphRunner(
        model,
        inputs,
        sizes=sizes,
        max_num_tokens=256,
        mode="FULL",
        options=RunnerOptions(strict=True),
    )
    assert not runner.capture().failed
    audio = torch.randn(number, hops, 32, dtype=torch.float64, device="cuda:0")

    alone = SlotState(banks, 1, device="cuda:0")
    wanted = torch.empty(number, hops, dtype=torch.float64, device="cuda:0")
    with torch.no_grad():
        for session in range(number):
            alone.join(session)
            index = torch.zeros(1, dtype=torch.int64, device="cuda:0")
            for hop in range(hops):
                given = audio[session : session + 1, hop]
                wanted[session, hop] = model(given, alone.rows(index))[0]
            alone.leave(session)

    found = torch.full_like(wanted, torch.nan)
    generator = torch.Generator().manual_seed(1)
    done = dict.fromkeys(range(number), 0)
    for session in range(0, number, 2):
        state.join(session)
    waiting = list(range(1, number, 2))
    while len(state) or waiting:
        while waiting and len(state) < number:
            state.join(waiting.pop())
        ready = list(state.sessions)
        if not compact:
            order = torch.randperm(len(ready), generator=generator).tolist()
            ready = [ready[at] for at in order]
        most = int(torch.randint(1, len(ready) + 1, (), generator=generator))
        ready = ready[:most]
        at = torch.tensor([done[one] for one in ready], device="cuda:0")
        rows = torch.tensor(ready, device="cuda:0")
        found[rows, at] = runner(audio=audio[rows, at], slots=state.slots_of(ready))
        for session in ready:
            done[session] += 1
        state.leave(*(one for one in ready if done[one] == hops))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_runs_on_dummy_rows_change_no_session():
    """Captures, proofs and calibration leave all sessions unchanged."""
    banks = {"total": StaticInput((None, 4), "float32")}
    state = SlotState(banks, 8, device="cuda:0")

    def step(x, slots):
        total = slots["total"] + x + 1
        slots["total"] = total
        return total

    runner = GraphRunner(
        step,
        {"x": StaticInput((None, 4), "float32"), "slots": state},
        sizes=(1, 2, 8),
        max_num_tokens=8,
        policy="adaptive",
        backend="cuda",
    )
    for session in "abc":
        state.join(session)
        state[session]["total"].fill_(5.0)
    runner.capture()
    torch.cuda.synchronize()
    for session in "abc":
        assert state[session]["total"].tolist() == [5.0] * 4
    with pytest.raises(DescriptorError, match="must be a different slot than"):
        runner(x=torch.ones(2, 4, device="cuda"), slots=[1, 1])
    with pytest.raises(DescriptorError, match="free"):
        runner(x=torch.ones(2, 4, device="cuda"), slots=[1, 5])
    total = runner(x=torch.ones(2, 4, device="cuda"), slots=[2, 0])
    assert total.tolist() == [[7.0] * 4] * 2
    assert [state[one]["total"][0].item() for one in "abc"] == [7.0, 5.0, 7.0]
