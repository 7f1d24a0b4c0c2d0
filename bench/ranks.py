"""Measure agreement between ranks, compared with a bare all-reduce of the same size.

    python bench/ranks.py                                    # two processes with gloo
    torchrun --standalone --nproc-per-node 2 bench/ranks.py  # any number of processes

Cases take turns, in the same order on all ranks:

- ``bare all-reduce``: ``torch.distributed.all_reduce`` of as many numbers as an exchange contains,
  on a gloo group of the same ranks.
- ``agree``: the agreement of all ranks on the batch of a step. ``agree and dispatch``: the same,
  followed by the decision for this batch. ``agree over nccl``: the agreement over NCCL on the GPUs.
- ``agree and dispatch, same batches``: the ranks always have the same batches, so they exchange
  nothing. This case is compared with a plain ``dispatch``.
- ``step``, ``step, agreed`` and ``step, same batches``, only on GPUs: a small tensor-parallel layer
  with an all-reduce in its FULL graph, without agreement, with agreement, and with batches that
  cannot differ. Steps are measured on the host until the end of their device work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from _common import emit, emit_all, interleaved

from dispatchkit import (
    DispatchConfig,
    Dispatcher,
    GraphRunner,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.testing import OneBucketPolicy

SIZES = (1, 2, 4, 8, 16, 32, 64)
CALLS, ROUNDS = 20, 300
WIDTH, HIDDEN = 4096, 8192


def dispatcher() -> Dispatcher:
    """Return a dispatcher whose keys all have a graph."""
    config = DispatchConfig(sizes=SIZES, max_num_tokens=SIZES[-1])
    made = Dispatcher(OneBucketPolicy(), config)
    for key in made.registry:
        made.registry.captured(key, "graph")
    return made


def repeated(run: Callable[[], Any], calls: int = CALLS) -> Callable[[], None]:
    """Return a function that calls ``run`` the given number of times."""

    def many() -> None:
        for _ in range(calls):
            run()

    return many


def main() -> None:
    """Start the ranks, or run as one of them."""
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        # Without this address, torchrun asks a name server for the address of this host.
        command += ["--local-addr", "127.0.0.1", "--nproc-per-node", "2", __file__]
        subprocess.run(command, check=True)
        return
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    decisions(on_gpus)
    if on_gpus:
        steps()
    dist.destroy_process_group()


def decisions(on_gpus: bool) -> None:
    """Measure agreements and decisions, without steps."""
    import torch
    import torch.distributed as dist

    from dispatchkit_ranks import RankAgreement, RankedDispatcher
    from dispatchkit_ranks.agreement import ROW_WIDTH

    bare = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    row = torch.zeros(ROW_WIDTH, dtype=torch.int64)
    plain = dispatcher()
    agreements = [RankAgreement(name=name) for name in ("each", "same")]
    each = RankedDispatcher(dispatcher(), agreements[0])
    same = RankedDispatcher(dispatcher(), agreements[1], same_batches=True)
    own = 3 + 2 * agreements[0].rank  # batches differ between ranks
    cases = {
        "bare all-reduce": lambda: dist.all_reduce(row, op=dist.ReduceOp.MAX, group=bare),
        "agree": lambda: each.agree(own, own),
        "agree and dispatch": lambda: each.dispatch(own, own),
    }
    if on_gpus:
        agreements.append(RankAgreement(name="nccl", device="cuda"))
        on_device = RankedDispatcher(dispatcher(), agreements[2])
        cases["agree over nccl"] = lambda: on_device.agree(own, own)
    times = interleaved({name: repeated(run) for name, run in cases.items()}, rounds=ROUNDS)
    alone = interleaved(
        {
            "dispatch": repeated(lambda: plain.dispatch(5, 5), 1000),
            "agree and dispatch, same batches": repeated(lambda: same.dispatch(5, 5), 1000),
        },
        rounds=20,
    )
    size = agreements[0].size
    if agreements[0].rank == 0:
        emit_all("ranks", times, per=CALLS, ratio_to="bare all-reduce", ranks=size)
        emit_all("ranks", alone, per=1000, ratio_to="dispatch", ranks=size)
        num_exchanges = agreements[1].stats().num_exchanges
        emit("ranks", "exchanges, same batches", num_exchanges, "exchanges", 20_000, ranks=size)
    for agreement in agreements:
        agreement.close()
    dist.destroy_process_group(bare)


def steps() -> None:
    """Measure complete steps of a tensor-parallel layer, with and without agreement."""
    import torch
    import torch.distributed as dist

    from dispatchkit_ranks import RankAgreement, RankedRunner

    device = torch.device("cuda", torch.cuda.current_device())
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device).manual_seed(rank)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16() / 64

    up, down = weight(WIDTH, HIDDEN // size), weight(HIDDEN // size, WIDTH)

    def layer(x: torch.Tensor) -> torch.Tensor:
        part = torch.relu(x @ up) @ down
        dist.all_reduce(part)
        return part

    inputs = {"x": StaticInput((None, WIDTH), "bfloat16")}

    def runner() -> GraphRunner:
        return GraphRunner(
            layer,
            inputs,
            sizes=SIZES,
            mode="FULL",
            policy=OneBucketPolicy(),
            options=RunnerOptions(device=device),
        )

    agreements = [RankAgreement(name=name) for name in ("step", "same step")]
    each = RankedRunner(runner(), agreements[0], inputs)
    same = RankedRunner(runner(), agreements[1], inputs, same_batches=True)
    for one in (each, same):
        one.capture()
    x = torch.randn(32, WIDTH, device=device).bfloat16()

    def timed(run: Callable[[], Any]) -> Callable[[], None]:
        def many() -> None:
            for _ in range(CALLS):
                run()
            torch.cuda.synchronize()

        return many

    cases = {
        "step": timed(lambda: each.runner(x=x)),
        "step, agreed": timed(lambda: each(x=x)),
        "step, same batches": timed(lambda: same(x=x)),
    }
    times = interleaved(cases, rounds=ROUNDS)
    if rank == 0:
        emit_all("ranks", times, per=CALLS, ratio_to="step", ranks=size)
    for one in (each, same):
        one.runner.clear()  # destroy the graphs before the communicator that they use
    for agreement in agreements:
        agreement.close()


if __name__ == "__main__":
    main()
