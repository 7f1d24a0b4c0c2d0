"""Tensor parallelism: all ranks run the same batches, without an agreement per step.

One host:       torchrun --standalone --nproc-per-node 2 examples/ranks/tensor_parallel.py
Two hosts:      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id serve --rdzv-backend c10d \
                    --rdzv-endpoint HOST_OF_THE_FIRST:29400 examples/ranks/tensor_parallel.py
(the same command on both)

Without a GPU for each rank, the example runs on the CPU with the tape backend.

Every rank gets the same batches, as from one scheduler, and the policy does not learn. The ranks
compare their configurations once, at the start. After that, apart from the model's all-reduce,
they exchange data only in an occasional check, which detects a rank that has diverged.
"""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist

from dispatchkit import (
    GraphRunner,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)

from dispatchkit_ranks import RankAgreement, RankedRunner

WIDTH, HIDDEN, SIZES, STEPS = 64, 256, (1, 2, 4, 8, 16), 50


def main() -> None:
    """Compare the result of the ranks with that of the complete layer."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    size = dist.get_world_size()

    torch.manual_seed(0)
    up_weight, down_weight = torch.randn(WIDTH, HIDDEN) / 8, torch.randn(HIDDEN, WIDTH) / 16
    whole = (up_weight.to(device), down_weight.to(device))
    own_up = up_weight.chunk(size, 1)[rank].contiguous().to(device)
    own_down = down_weight.chunk(size, 0)[rank].contiguous().to(device)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ own_up) @ own_down

    def over_ranks(part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part)
        return part

    inputs = {"x": StaticInput((None, WIDTH), "float32")}
    runner = GraphRunner(
        [graph_piece(layer), eager_piece(over_ranks)],
        inputs,
        sizes=SIZES,
        mode="FULL",  # the graph includes the all-reduce
        options=RunnerOptions(device=device),
    )
    with RankAgreement(timeout=30.0) as ranks:
        ranked = RankedRunner(runner, ranks, inputs, same_batches=True, check_every=16)
        ranked.capture()
        traffic = random.Random(0)  # one scheduler, so all ranks get the same batches
        worst = 0.0
        for step in range(STEPS):
            torch.manual_seed(step)
            x = torch.randn(traffic.randint(1, 16), WIDTH).to(device)
            expected = torch.relu(x @ whole[0]) @ whole[1]
            worst = max(worst, float((ranked(x=x) - expected).abs().max()))
        exchanges = ranks.stats().num_exchanges
    modes = {name: count for name, count in runner.stats().steps_by_mode.items() if count}
    print(
        f"rank {rank}: steps by mode {modes}, {exchanges} exchanges between ranks, largest "
        f"difference from the undivided layer {worst:.1e}"
    )
    runner.clear()  # destroy the graphs before the communicator that they use
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
