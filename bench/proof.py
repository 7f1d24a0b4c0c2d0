"""Measure the cost of proving, for each graph, that padding changes no real row.

    python bench/proof.py [--rounds N]

The script measures ``runner.capture()`` at 8 sizes with and without the proof, for an encoder of 12
layers with sequences of 16 tokens and for an MLP of two layers. The cases take turns in one
process, and the ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter, process_time

import torch
from _common import at_least_one, emit

from dispatchkit import CaptureOptions, GraphRunner, RunnerOptions, StaticInput

SIZES = (1, 2, 4, 8, 16, 24, 32, 64)


def encoder(device: str) -> tuple[torch.nn.Module, dict[str, StaticInput]]:
    width = 768 if device == "cuda" else 64
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    # Disable the fused path, which uses a different layout.
    model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    return model, {"src": StaticInput((None, 16, width), "float32")}


def mlp(device: str) -> tuple[torch.nn.Module, dict[str, StaticInput]]:
    layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    return torch.nn.Sequential(*layers), {"input": StaticInput((None, 64), "float32")}


def capture_ms(module: torch.nn.Module, inputs: dict[str, StaticInput], *, proves: bool) -> float:
    """Capture all sizes with a new runner; return the milliseconds."""
    runner = GraphRunner(
        module,
        inputs,
        sizes=SIZES,
        mode="FULL",
        options=RunnerOptions(capture=CaptureOptions(prove_rows=proves)),
    )
    # On a CPU, exclude the time of other processes; on a GPU, include waits for the device.
    clock = perf_counter if torch.cuda.is_available() else process_time
    start = clock()
    report = runner.capture()
    runner.backend.synchronize()
    elapsed = (clock() - start) * 1e3
    if report.num_graphs != len(SIZES):
        raise SystemExit(str(report))
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=at_least_one, default=5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # more threads mostly wait for each other
    for name, make in (("encoder", encoder), ("MLP", mlp)):
        module, inputs = make(device)
        module = module.eval().to(device)
        capture_ms(module, inputs, proves=True)  # loads libraries and kernels
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.rounds):
            for proves, times in found.items():
                times.append(capture_ms(module, inputs, proves=proves))
        ratios = [mine / base for base, mine in zip(*found.values(), strict=True)]
        without, proven = (statistics.median(times) for times in found.values())
        best = [round(min(times), 2) for times in found.values()]
        emit(
            "proof",
            f"{name}, unproven",
            without,
            "ms",
            options.rounds,
            best=best[0],
            sizes=len(SIZES),
        )
        emit(
            "proof",
            f"{name}, proven",
            proven,
            "ms",
            options.rounds,
            ratio_to=f"{name}, unproven",
            ratio=statistics.median(ratios),
            best=best[1],
            sizes=len(SIZES),
        )


if __name__ == "__main__":
    main()
