"""What ``graphed`` adds to calls that run plainly: microseconds beside a module that does nothing.

    python bench/plain.py [--rounds 7]

Each line is the least of some rounds of 2,000 calls, in time of this thread, and ``added`` what the
call of the plain module took less. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
from _common import at_least_one, emit

from dispatchkit import graphed

CALLS = 2000


class Nothing(torch.nn.Module):
    """Returns its first input."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the first input."""
        return inputs[0]


class Refused(Nothing):
    """The same, and cannot be captured: it fails where operations are watched."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the first input."""
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - no public name
            raise RuntimeError("on purpose")
        return inputs[0]


def least_us(call: Any, inputs: list[torch.Tensor], rounds: int) -> float:
    """Return the least time of a call, in microseconds."""
    for _ in range(CALLS):
        call(*inputs)
    times = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call(*inputs)
        times.append((time.thread_time_ns() - start) / CALLS / 1e3)
    return min(times)


def main() -> None:
    """Print a line for each kind of plain call and number of tensors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=at_least_one, default=7)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    for count in (1, 2, 3):
        rows = [torch.ones(4, 8) for _ in range(count)]
        needing = [torch.ones(4, 8, requires_grad=True) for _ in range(count)]
        numbers = [torch.tensor(1.0) for _ in range(count)]
        cases = {
            "cannot be captured": (Refused().eval(), rows, False),
            "training": (Nothing().train(), rows, True),
            "gradients": (Nothing().eval(), needing, True),
            "no batch": (Nothing().eval(), numbers, False),
        }
        for name, (module, inputs, grad) in cases.items():
            with torch.set_grad_enabled(grad):
                plain = least_us(module, inputs, rounds)
                fast = least_us(graphed(module, backend="tape"), inputs, rounds)
            case = f"{name}, {count} tensors"
            added = round(fast - plain, 2)
            emit(
                "plain", case, fast, "us", rounds, ratio_to="plain", ratio=fast / plain, added=added
            )


if __name__ == "__main__":
    main()
