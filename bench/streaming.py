"""Hundreds of streams, a hop of 32 ms at a time: graphs with state of sessions beside eager.

    python bench/streaming.py [--sessions N] [--seconds S] [--alone N]

The model is that of examples/streaming_vad.py, with random weights. Every hop is one step of all
sessions. Measured is the time of each hop, from the call until its probabilities are there. All
cases take turns, a hop each:

- ``eager``: the model, its rows gathered and scattered; ``eager, alone``: one session after
  another, in batches of one, for a few hops;
- ``by hand``: a graph of all sessions captured by hand, whose state needs no slots at all;
- ``runner``: slots as a list, rows gathered; ``runner, compact``: rows read as views; ``runner,
  slots on the device``: a device tensor, which each hop waits for; ``runner, coming and going``:
  a tenth of the sessions is late at each hop, one leaves and one joins.

Then the probabilities of each case are compared with those of some sessions alone (``largest
difference``). Without a GPU it runs on the tape, with few sessions.
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
WARM = 8  # hops that are not measured


def runner_of(model: VoiceDetector, slots: SlotState) -> GraphRunner:
    number = slots.num_slots
    runner = GraphRunner(
        model,
        {"audio": StaticInput((None, HOP), "float32"), "slots": slots},
        sizes=sorted({number - number // 8, number}),
        max_num_tokens=number,
        mode="FULL",
        backend="cuda" if HAS_GPU else "tape",
    )
    if failed := runner.capture().failed:
        raise SystemExit(f"not captured: {failed}")
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


class OwnRows(dict[str, torch.Tensor]):
    """State of a fixed batch: rows that are written where they are."""

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self[name].copy_(value)


class ByHand:
    """A graph of all sessions, with whatever it reads and writes."""

    def __init__(self, model: VoiceDetector, number: int) -> None:
        self.rows = OwnRows({name: spec.full(number, DEVICE) for name, spec in BANKS.items()})
        self.given = torch.zeros(number, HOP, device=DEVICE)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(self.given, self.rows)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.made = model(self.given, self.rows)
        for name, spec in BANKS.items():
            self.rows[name] = spec.full(number, DEVICE)

    def __call__(self, audio: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of a hop."""
        self.given.copy_(audio)
        self.graph.replay()
        return self.made.clone()


def by_runner(
    model: VoiceDetector, number: int, **settings: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    state = state_of(number, **settings)
    runner, every = runner_of(model, state), list(range(number))
    slots = every if state.static_input.host else torch.tensor(every, device=DEVICE)
    return lambda audio: runner(audio=audio, slots=slots)


def coming_and_going(model: VoiceDetector, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tenth is late each time, one leaves and one joins: no hop has the slots of another."""
    state = state_of(number)
    runner, chance = runner_of(model, state), random.Random(0)
    there, newest = list(range(number)), number

    def run(audio: torch.Tensor) -> torch.Tensor:
        nonlocal newest
        chance.shuffle(there)
        state.leave(there[-1])
        state.join(newest)
        there[-1] = newest
        newest += 1
        ready = there[number // 10 :]
        return runner(audio=audio[: len(ready)], slots=state.slots_of(ready))

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
    torch.backends.cudnn.allow_tf32 = False  # which rounds otherwise in batches of another size
    torch.manual_seed(0)
    model = VoiceDetector().to(DEVICE).eval()
    audio = 0.1 * torch.randn(num_hops, number, HOP, device=DEVICE)

    with torch.no_grad():
        cases = {"eager": eager(model, number)}
        if HAS_GPU:
            cases["by hand"] = ByHand(model, number)
        cases |= {
            "runner": by_runner(model, number),
            "runner, compact": by_runner(model, number, compact=True),
            "runner, slots on the device": by_runner(model, number, host=False),
            "runner, coming and going": coming_and_going(model, number),
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        heard: dict[str, list[torch.Tensor]] = {name: [] for name in cases}
        for hop in audio:
            for name, run in cases.items():
                wait()
                start = perf_counter_ns()
                result = run(hop)
                wait()
                times[name].append((perf_counter_ns() - start) / 1000)
                heard[name].append(result)

        one_by_one, single = eager_alone(model, number), []
        for hop in audio[: WARM + 8]:
            wait()
            start = perf_counter_ns()
            one_by_one(hop)
            wait()
            single.append((perf_counter_ns() - start) / 1000)
        times["eager, alone"] = single

    base = statistics.median(times["eager"][WARM:])
    for name, found in times.items():
        samples = sorted(found[WARM:])
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
    del heard["runner, coming and going"]  # other sessions at each hop
    for name, found in heard.items():
        largest = float((torch.stack(found)[:, list(few)] - wanted).abs().max())
        case = f"largest difference, {name}"
        emit(BENCH, case, largest * 1e6, "1e-6", len(few), sessions=number)


if __name__ == "__main__":
    main()
