"""Measure the time that ``graphed`` adds to plain calls, compared with a no-op module.

    python bench/plain.py [--rounds 300]

Each line contains the time per call of the fastest round of 100 calls, in CPU time of this thread.
Rounds of plain and graphed calls alternate, and ``added`` is the difference between the fastest
rounds. Rounds are short, because a processor that other processes use is rarely free for long. The
script runs on a CPU.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
from _common import at_least_one, emit

from dispatchkit import graphed

CALLS = 100


class NoOp(torch.nn.Module):
    """Module that returns its first input."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the first input."""
        return inputs[0]


class Uncapturable(NoOp):
    """Module that cannot be captured, because it raises while its operations are watched."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the first input."""
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - no public name
            raise RuntimeError("raised on purpose while watched")
        return inputs[0]


def round_us(call: Any, inputs: list[torch.Tensor]) -> float:
    """Run one round; return its time per call in microseconds."""
    start = time.thread_time_ns()
    for _ in range(CALLS):
        call(*inputs)
    return (time.thread_time_ns() - start) / CALLS / 1e3


def least_us(plain: Any, fast: Any, inputs: list[torch.Tensor], rounds: int) -> tuple[float, float]:
    """Return the time per call of the fastest plain and graphed rounds, in microseconds."""
    for _ in range(5):  # the first calls are watched
        round_us(fast, inputs)
    times = [(round_us(plain, inputs), round_us(fast, inputs)) for _ in range(rounds)]
    return min(one for one, _ in times), min(other for _, other in times)


def main() -> None:
    """Print a line for each reason for plain calls and each number of tensors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=at_least_one, default=300)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    for count in (1, 2, 3):
        rows = [torch.ones(4, 8) for _ in range(count)]
        needing = [torch.ones(4, 8, requires_grad=True) for _ in range(count)]
        numbers = [torch.tensor(1.0) for _ in range(count)]
        cases = {
            "cannot be captured": (Uncapturable().eval(), rows, False),
            "cannot be captured, gradients enabled": (Uncapturable().eval(), rows, True),
            "training": (NoOp().train(), rows, True),
            "gradients": (NoOp().eval(), needing, True),
            "no batch": (NoOp().eval(), numbers, False),
        }
        for name, (module, inputs, grad) in cases.items():
            with torch.set_grad_enabled(grad):
                plain, fast = least_us(module, graphed(module, backend="tape"), inputs, rounds)
            case = f"{name}, {count} tensors"
            added = round(fast - plain, 2)
            emit(
                "plain", case, fast, "us", rounds, ratio_to="plain", ratio=fast / plain, added=added
            )


if __name__ == "__main__":
    main()
