"""Measure hundreds of streams in hops of 32 ms: graphs with session state, and eager.

    python bench/streaming.py [--sessions N] [--seconds S] [--alone N]

The model is that of examples/streaming_vad.py with random weights. Every hop is one step of all
sessions. The time of a hop is measured from the call until its probabilities are available. Cases
take turns, one hop each; only ``eager, alone`` runs after the others:

- ``eager``: the model without graphs, with rows gathered and scattered;
- ``eager, alone``: the same, one session after another in batches of one, for a few hops;
- ``by hand``: one handwritten graph per size, with the same banks, slots as a list, rows gathered
  and scattered, and no checks;
- ``runner``: slots as a list, and gathered rows;
- ``runner, compact``: the same, but with rows read as views;
- ``runner, slots on the device``: slots as a device tensor, which each hop waits for;
- ``by hand, coming and going`` and ``runner, coming and going``: at each hop, a tenth of the
  sessions is late, one leaves and one joins.

Finally, the probabilities of each case with fixed sessions are compared with those of some sessions
running alone (``largest difference``). Without a GPU, few sessions run on the tape backend.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _common import at_least_one, emit

from dispatchkit import GraphRunner, SlotState, StaticInput

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from streaming_vad import BANKS, DEVICE, HOP, HOPS_PER_SECOND, VoiceDetector, alone

BENCH = "streaming"
HAS_GPU = torch.cuda.is_available()
WARM = 8  # number of unmeasured hops


def sizes_of(number: int) -> list[int]:
    return sorted({number - number // 8, number})


def runner_of(model: VoiceDetector, slots: SlotState) -> GraphRunner:
    number = slots.num_slots
    runner = GraphRunner(
        model,
        {"audio": StaticInput((None, HOP), "float32"), "slots": slots},
        sizes=sizes_of(number),
        max_num_tokens=number,
        mode="FULL",
        backend="cuda" if HAS_GPU else "tape",
    )
    if failed := runner.capture().failed:
        raise SystemExit(f"captures failed: {failed}")
    return runner


def state_of(number: int, **settings: bool) -> SlotState:
    state = SlotState(BANKS, number, device=DEVICE, **settings)
    for session in range(number):
        state.join(session)
    return state


def eager(model: VoiceDetector, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    rows = state_of(number).rows(torch.arange(number, device=DEVICE))
    return lambda audio: model(audio, rows)


def eager_alone(model: VoiceDetector, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    state = state_of(number)
    rows = [state.rows(one) for one in torch.arange(number, device=DEVICE).split(1)]
    return lambda audio: torch.cat(
        [model(own, slot) for own, slot in zip(audio.split(1), rows, strict=True)]
    )


class GatheredRows:
    """Rows of banks, selected by an index: gathered on reads, scattered on writes."""

    def __init__(self, banks: dict[str, torch.Tensor], index: torch.Tensor) -> None:
        self.banks, self.index = banks, index

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.banks[name].index_select(0, self.index)

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self.banks[name].index_copy_(0, self.index, value)


class ByHand:
    """Handwritten session state: a graph for each size, and a table of slots by session.

    The row after the slots is used for padding. There are no checks, and results are copies.
    """

    def __init__(self, model: VoiceDetector, number: int) -> None:
        self.padding, self.sizes = number, sizes_of(number)
        self.banks = {name: spec.full(number + 1, DEVICE) for name, spec in BANKS.items()}
        self.audio = torch.zeros(number, HOP, device=DEVICE)
        self.index = torch.full((number,), number, device=DEVICE)
        # One hop runs at a time, so the device has read the slots of a hop before the host writes
        # those of the next.
        self.pinned = torch.empty(number, dtype=torch.int64, pin_memory=True)
        self.given = self.pinned.numpy()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        stream, pool = torch.cuda.Stream(), None
        for size in reversed(self.sizes):
            rows = GatheredRows(self.banks, self.index[:size])
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                model(self.audio[:size], rows)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                made = model(self.audio[:size], rows)
            self.graphs[size], pool = (graph, made), graph.pool()
        self.slots: dict[int, int] = {}
        self.free = list(range(number - 1, -1, -1))

    def join(self, session: int) -> None:
        """Assign a free slot to a session."""
        self.slots[session] = self.free.pop()

    def leave(self, session: int) -> None:
        """Clear and free the slot of a session."""
        slot = self.slots.pop(session)
        for name, spec in BANKS.items():
            self.banks[name][slot].fill_(spec.fill_value)
        self.free.append(slot)

    def slots_of(self, sessions: list[int]) -> list[int]:
        """Return the slots of sessions."""
        return [self.slots[session] for session in sessions]

    def __call__(self, audio: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """Return the probabilities of a hop."""
        rows = len(slots)
        size = next(one for one in self.sizes if one >= rows)
        self.given[:rows] = slots
        self.given[rows:size] = self.padding
        self.index[:size].copy_(self.pinned[:size], non_blocking=True)
        self.audio[:rows].copy_(audio)
        graph, made = self.graphs[size]
        graph.replay()
        return made[:rows].clone()


def by_runner(
    model: VoiceDetector, number: int, **settings: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    state = state_of(number, **settings)
    runner, every = runner_of(model, state), list(range(number))
    slots = every if state.static_input.host else torch.tensor(every, device=DEVICE)
    return lambda audio: runner(audio=audio, slots=slots)


def by_hand(model: VoiceDetector, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    serve, every = ByHand(model, number), list(range(number))
    return lambda audio: serve(audio, every)


def coming_and_going(
    sessions: SlotState | ByHand, serve: Callable[..., torch.Tensor], number: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a case in which, at each hop, some sessions are late, one leaves and one joins."""
    chance, there, newest = random.Random(0), list(range(number)), number

    def run(audio: torch.Tensor) -> torch.Tensor:
        nonlocal newest
        chance.shuffle(there)
        sessions.leave(there[-1])
        sessions.join(newest)
        there[-1] = newest
        newest += 1
        ready = there[number // 10 :]
        return serve(audio=audio[: len(ready)], slots=sessions.slots_of(ready))

    return run


def wait() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=at_least_one, default=256 if HAS_GPU else 16)
    parser.add_argument("--seconds", type=at_least_one, default=10 if HAS_GPU else 1)
    parser.add_argument("--alone", type=at_least_one, default=16 if HAS_GPU else 2)
    args = parser.parse_args()
    number, num_hops = args.sessions, int(args.seconds * HOPS_PER_SECOND)
    torch.backends.cudnn.allow_tf32 = False  # TF32 results depend on the batch size
    torch.manual_seed(0)
    model = VoiceDetector().to(DEVICE).eval()
    audio = 0.1 * torch.randn(num_hops, number, HOP, device=DEVICE)

    with torch.no_grad():
        cases = {"eager": eager(model, number)}
        if HAS_GPU:
            cases["by hand"] = by_hand(model, number)
        cases |= {
            "runner": by_runner(model, number),
            "runner, compact": by_runner(model, number, compact=True),
            "runner, slots on the device": by_runner(model, number, host=False),
        }
        if HAS_GPU:
            hand = ByHand(model, number)
            for session in range(number):
                hand.join(session)
            cases["by hand, coming and going"] = coming_and_going(hand, hand, number)
        state = state_of(number)
        cases["runner, coming and going"] = coming_and_going(state, runner_of(model, state), number)
        times: dict[str, list[float]] = {name: [] for name in cases}
        results: dict[str, list[torch.Tensor]] = {name: [] for name in cases}
        for hop in audio:
            for name, run in cases.items():
                wait()
                start = perf_counter_ns()
                result = run(hop)
                wait()
                times[name].append((perf_counter_ns() - start) / 1000)
                results[name].append(result)

        one_by_one, single = eager_alone(model, number), []
        for hop in audio[: WARM + 8]:
            wait()
            start = perf_counter_ns()
            one_by_one(hop)
            wait()
            single.append((perf_counter_ns() - start) / 1000)
        times["eager, alone"] = single

    base = statistics.median(times["eager"][WARM:])
    for name, measured in times.items():
        samples = sorted(measured[WARM:])
        median = statistics.median(samples)
        emit(
            BENCH,
            name,
            median,
            "us",
            len(samples),
            ratio_to=None if name == "eager" else "eager",
            ratio=None if name == "eager" else median / base,
            p99=round(samples[int(0.99 * (len(samples) - 1))], 2),
            sessions=number,
        )
    few = range(0, number, max(1, number // args.alone))
    wanted = torch.stack([alone(model, audio[:, session]) for session in few], 1)
    for name, found in results.items():
        if "coming and going" in name:
            continue  # the sessions of this case change at each hop
        largest = float((torch.stack(found)[:, list(few)] - wanted).abs().max())
        case = f"largest difference, {name}"
        emit(BENCH, case, largest * 1e6, "1e-6", len(few), sessions=number)


if __name__ == "__main__":
    main()
