"""Data parallelism: every rank has its own batches, and all run graphs of the same size.

One host:       torchrun --standalone --nproc-per-node 2 examples/ranks/data_parallel.py
Two hosts:      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id serve --rdzv-backend c10d \
                    --rdzv-endpoint HOST_OF_THE_FIRST:29400 examples/ranks/data_parallel.py
(the same command on both)

Without a GPU for each rank, the example runs on the CPU with the tape backend.

Like an expert layer that all ranks share, the model sums its hidden rows over all ranks. This
all-reduce needs the same number of rows on every rank. A rank that is idle in a step takes part
with padding rows. With ``--learn``, rank 0 learns from measured times, and distributes its table of
decisions to the other ranks.
"""

from __future__ import annotations

import argparse
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
    load_plugins,
)

from dispatchkit_ranks import LeaderPolicy, RankAgreement, RankedRunner

WIDTH, SIZES, STEPS = 64, (1, 2, 4, 8, 16), 50


def main() -> None:
    """Serve some steps of random traffic."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--learn", action="store_true", help="let rank 0 learn for all ranks")
    learn = parser.parse_args().learn

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    # The agreement uses gloo on the CPU. On GPUs, the model's collectives use NCCL.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")

    torch.manual_seed(0)  # the same weights on all ranks
    first, second = (torch.randn(WIDTH, WIDTH, device=device) / 8 for _ in range(2))

    def up(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ first)

    def over_ranks(hidden: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(hidden)
        return hidden

    def down(hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ second

    policies = load_plugins()
    policy = policies.create_policy("vllm")
    if learn:
        # Only the leader has a learner; all ranks use the same fallback policy.
        learner = policies.create_policy("adaptive") if rank == 0 else None
        policy = LeaderPolicy(policy, learner)

    inputs = {"x": StaticInput((None, WIDTH), "float32")}
    runner = GraphRunner(
        [graph_piece(up), eager_piece(over_ranks), graph_piece(down)],
        inputs,
        sizes=SIZES,
        # The NCCL collective becomes part of the graph; the gloo collective runs eager.
        mode="FULL" if on_gpu else "PIECEWISE",
        policy=policy,
        options=RunnerOptions(device=device),
    )
    facts = {"model": "two layers", "weights": 0}
    # If a rank fails in this block, the others stop with an error that names the failed rank.
    with RankAgreement(timeout=30.0, facts=facts) as ranks:
        ranked = RankedRunner(runner, ranks, inputs, epoch_steps=10)
        lost = ranked.capture()
        if lost and rank == 0:
            print(f"Keys that no rank uses, because a rank could not capture them: {lost}")
        traffic = random.Random(rank)
        for _ in range(STEPS):
            num_tokens = traffic.choice((0, 1, 3, 7, 12))
            if num_tokens == 0:
                ranked.idle()
                continue
            x = torch.randn(num_tokens, WIDTH, device=device)
            result = ranked(x=x)
            if result.shape != x.shape:
                shapes = f"{tuple(result.shape)}, but the input has shape {tuple(x.shape)}"
                raise RuntimeError(f"rank {rank}: the result has shape {shapes}")
        cost = ranks.stats()
    steps = runner.stats()
    modes = {name: count for name, count in steps.steps_by_mode.items() if count}
    print(
        f"rank {rank}: steps by mode {modes}, {ranked.ranked.epoch} tables received from the "
        f"leader, {cost.total_us / max(1, cost.num_exchanges):.0f} us per agreement on a step"
    )
    runner.clear()  # destroy the graphs before the communicator that they use
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
