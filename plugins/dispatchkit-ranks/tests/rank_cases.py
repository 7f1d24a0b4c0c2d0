"""Test cases that every rank runs in its own process."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rank_policies import AlwaysFull, Planted, Smallest, Wilful, make_dispatcher, random_batch
from tensor_parallel import NUM_SEQS, Decoder, over_ranks, traffic

from dispatchkit import (
    GraphRunner,
    Outcome,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.errors import PolicyError, RankError

from dispatchkit_ranks import LeaderPolicy, RankAgreement, RankedDispatcher, RankedRunner
from dispatchkit_ranks.exchange_group import ExchangeGroup

# Far longer than a start takes on a busy machine, including NCCL's.
START = 60.0
# Steps between comparisons of batches, where these must be equal.
CHECK_EVERY = 3


def run(request, world, rank, port):
    """Join the world's process group, run a case, and destroy the group."""
    torch.set_num_threads(1)
    request = dict(request)
    case, size, host = request.pop("case"), request.pop("size"), request.pop("host", "agent")
    backend = "gloo"
    if request.get("device", "cpu") == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=START))
    store = dist.PrefixStore(f"world{world}", store)
    if host == "agent":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    else:
        # Rank 0 serves the store, as it does without torchrun.
        if rank == 0:
            own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("port", str(own.port))
        else:
            own = dist.TCPStore("127.0.0.1", int(store.get("port")))
        dist.init_process_group(backend, store=own, rank=rank, world_size=size)
    found = globals()[case](rank, size, **request)
    dist.destroy_process_group()
    return found


def shown(decision):
    return [str(decision.mode), str(decision.key), decision.padded_num_tokens]


def report(error):
    return {"ranks": list(error.ranks), "step": error.step, "reason": error.reason,
            "text": str(error)}  # fmt: skip


def schedule(rank, size, *, seed, num_steps, rule="alone", device="cpu"):
    """Dispatch random batches and return the decisions."""
    rng = random.Random(f"{seed}/{rank}")
    policy = Smallest(eager_below=2)
    if rule == "leader":
        policy = LeaderPolicy(policy, Wilful(seed) if rank == 0 else None)
    dispatcher = make_dispatcher(policy, max_loras=1)
    found = []
    with RankAgreement(timeout=START, setup_timeout=START, device=device) as ranks:
        ranked = RankedDispatcher(dispatcher, ranks, epoch_steps=4)
        for _ in range(num_steps):
            key = rng.choice(sorted(dispatcher.registry, key=str))
            if rng.random() < 0.1:
                dispatcher.registry.failed(key, "test")
            elif rng.random() < 0.1:
                dispatcher.registry.captured(key, "again")
            batch = (0,) if rng.random() < 0.2 else random_batch(rng, dispatcher.config)
            agreed = ranked.agree(*batch)
            decision = dispatcher.dispatch(*agreed[:5])
            found.append(shown(decision))
            if agreed.num_tokens:
                facts = dispatcher.batch(*agreed[:5])
                dispatcher.observe(Outcome(facts, decision, elapsed_us=1.0 + rank))
    return {"decisions": found, "epoch": ranked.epoch}


def meet(rank, size, *, device):
    """Merge rows without an agreement; works with a single rank too."""
    place = torch.device(device)
    store = dist.PrefixStore("meet", dist.group.WORLD.get_group_store())
    group = ExchangeGroup(store, rank, size, place, 3, START)
    rows = [group.merge([rank + 1, -rank, each], START) for each in range(3)]
    table = np.arange(4, dtype=np.uint8)[None] * (rank + 1)
    found = group.merge_bytes(table, START).tolist()
    group.close()
    return {"rows": rows, "bytes": found}


def alike(rank, size, *, odd_rank, what):
    """Start with one rank whose configuration differs."""
    settings = {what: 2} if rank == odd_rank else {}
    ranks = RankAgreement(timeout=START, setup_timeout=START)
    try:
        RankedDispatcher(make_dispatcher(**settings), ranks)
    except RankError as error:
        return report(error)
    return None


def leftovers(rank, size, *, num_lives):
    """Count groups, threads and open files after closing each of several agreements."""

    def now():
        gc.collect()
        groups = len(dist.distributed_c10d._world.pg_map)
        files = len(list(Path("/proc/self/fd").iterdir()))
        tasks = len(list(Path("/proc/self/task").iterdir()))
        return [groups, threading.active_count(), tasks, files]

    def live():
        with RankAgreement(timeout=START, setup_timeout=START) as ranks:
            ranked = RankedDispatcher(make_dispatcher(), ranks)
            for n in (1, 2, 3):
                ranked.dispatch(n)
        return now()

    # the first life also creates what torch creates only once
    return [live() for _ in range(1 + num_lives)]


def statistics(rank, size):
    """Start one rank late; the wait must not count as time of exchanges."""
    ranks = RankAgreement(timeout=START, setup_timeout=START)
    ranked = RankedDispatcher(make_dispatcher(), ranks)
    store = dist.PrefixStore("statistics", dist.group.WORLD.get_group_store())
    start = time.perf_counter()
    if rank == 1:
        # Wait until the other rank waits in its first step, then half a second more.
        store.wait(["comes"])
        time.sleep(0.5)
    else:
        store.set("comes", "1")
    ranked.dispatch(1)
    waited = time.perf_counter() - start
    for n in (1, 2, 3):
        ranked.dispatch(n)
    stats = ranks.stats()
    ranks.close()
    return {"waited": waited, "total": stats.total_us / 1e6, "steps": stats.num_exchanges}


def not_coming(rank, size):
    """Start all ranks but the last."""
    store = dist.PrefixStore("not_coming", dist.group.WORLD.get_group_store())
    if rank == size - 1:
        store.wait([f"stopped/{each}" for each in range(size - 1)], timedelta(seconds=START))
        return None
    try:
        RankAgreement(timeout=0.2, setup_timeout=0.5)
    except RankError as error:
        store.set(f"stopped/{rank}", "1")
        return report(error)
    return None


def faults(rank, size, *, schedules, device="cpu"):
    """Run schedules one after another, each with a new agreement."""
    return [_faulty(rank, size, index, device, **each) for index, each in enumerate(schedules)]


def _faulty(rank, size, index, device, *, seed, num_steps, kind, bad_rank, bad_step, timeout):
    # All ranks receive the same batches where these must be equal.
    rng = random.Random(seed if kind == "differ" else f"{seed}/{rank}")
    store = dist.PrefixStore(f"faults/{index}", dist.group.WORLD.get_group_store())
    others = [f"stopped/{each}" for each in range(size) if each != bad_rank]
    policy = Planted()
    dispatcher = make_dispatcher(policy, query_lens=(1,), strict=True)
    is_bad = rank == bad_rank
    options = {"same_batches": True, "check_every": CHECK_EVERY} if kind == "differ" else {}
    found, error, start, ranked = [], None, 0.0, None
    try:
        with RankAgreement(timeout=timeout, setup_timeout=START, device=device) as ranks:
            ranked = RankedDispatcher(dispatcher, ranks, **options)
            ranked.dispatch(1)
            for step in range(num_steps):
                batch = (0,) if rng.random() < 0.2 else random_batch(rng, dispatcher.config)
                if step == bad_step and kind == "capture_raises":
                    _capture_again(ranked, is_bad)
                if is_bad and step >= bad_step and kind == "differ":
                    batch = (1 + batch[0] % 8,)
                if is_bad and step == bad_step:
                    if kind == "raise":
                        raise ZeroDivisionError("planted")
                    if kind == "leave":
                        break
                    if kind == "die":
                        os._exit(1)
                    if kind == "freeze":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    if kind == "late":
                        # Wait until all other ranks have stopped.
                        store.wait(others, timedelta(seconds=START))
                    if kind == "slow":
                        time.sleep(0.1 * timeout)
                    if kind == "policy":
                        policy.raises, batch = True, (3,)
                        dispatcher.set_lazy(False)  # cells are filled again
                    if kind == "capture":
                        ranked.capture(lambda key: None)
                    if kind == "lose":
                        key = rng.choice(sorted(dispatcher.registry, key=str))
                        dispatcher.registry.failed(key, "planted")
                start = time.monotonic()
                found.append(shown(ranked.dispatch(*batch)))
    except RankError as caught:
        error = {**report(caught), "seconds": time.monotonic() - start}
        # Only the late rank waits for this key; otherwise the store may have ended with the bad
        # rank.
        if kind == "late":
            store.set(f"stopped/{rank}", "1")
    except (ZeroDivisionError, PolicyError):
        error = {"raised": True}
    withheld = [] if ranked is None else sorted(map(str, ranked.withheld))
    return {"decisions": found, "error": error, "open": ranks.is_open, "withheld": withheld}


def given_up(rank, size, *, comes, timeout):
    """Delay the last rank, whose collective still completes, as one of NCCL may."""
    store = dist.PrefixStore("given_up", dist.group.WORLD.get_group_store())
    others = [f"stopped/{each}" for each in range(size - 1)]
    error = None
    try:
        with RankAgreement(timeout=timeout, setup_timeout=START) as ranks:
            ranks.exchange((rank,), step=1)
            if rank == size - 1:
                if comes == "after the others stopped":
                    store.wait(others, timedelta(seconds=START))
                else:
                    # Less than the timeout of the others, so that none of them has stopped.
                    time.sleep(0.3 * timeout)

                def merge(row, seconds):
                    notes = [f"stop/{each}" for each in range(size - 1)]
                    ranks._notes._store.wait(notes, timedelta(seconds=START))
                    return list(row)

                ranks._group.merge = merge
            ranks.exchange((rank,), step=2)
    except RankError as caught:
        error = report(caught)
        store.set(f"stopped/{rank}", "1")
    return {"error": error}


def _capture_again(ranked, fails):
    """Recapture a key on all ranks after one rank lost it and fails to capture it."""
    registry = ranked.dispatcher.registry
    key = min(registry, key=str)

    def capture(each):
        if fails:
            raise MemoryError("planted")
        registry.captured(each, "again")

    if fails:
        registry.failed(key, "planted")
    ranked.capture(capture, [key])


def padded_steps(rank, size, *, fails_on):
    """Run a runner per rank; all pad to the largest batch, and results equal eager."""
    weight = torch.arange(12.0).reshape(3, 4) / 7

    def step(x):
        if fails_on == rank and x.shape[0] == 4:
            raise MemoryError("no room")
        return torch.tanh(x @ weight)

    inputs = {"x": StaticInput((None, 3), "float32", fill=0.5)}
    options = RunnerOptions(config=make_dispatcher().config)
    runner = GraphRunner(step, inputs, policy=Smallest(), backend="tape", options=options)
    rng = random.Random(rank)
    found, worst = [], 0.0
    with RankAgreement(timeout=START, setup_timeout=START) as ranks:
        ranked = RankedRunner(runner, ranks, inputs)
        lost = ranked.capture()
        for index in range(12):
            if index % 4 == rank:
                found.append(ranked.idle())
                continue
            rows = rng.randint(1, 8) if index % 3 else 3
            x = torch.rand(rows, 3)
            result = ranked(x=x, num_reqs=rows, uniform=1)
            worst = max(worst, float((result - torch.tanh(x @ weight)).abs().max()))
            found.append(list(result.shape) == [rows, 4])
        hits = runner.stats().hits
    lost_keys = {str(key): {str(r): why for r, why in each.items()} for key, each in lost.items()}
    return {"found": found, "worst": worst, "lost": lost_keys, "hits": hits}


def tensor_parallel(rank, size, *, num_steps, device, same_batches):
    """Compare a decoder split over ranks, whose graphs all-reduce, with the whole one."""
    place = torch.device(device, rank if device == "cuda" else None)
    whole, part = Decoder(0, 1, place), Decoder(rank, size, place)
    inputs = {
        "tokens": StaticInput((None,), "int64"),
        "seqs": StaticInput((None,), "int64", fill=NUM_SEQS),
        "positions": StaticInput((None,), "int64"),
    }
    runner = GraphRunner(
        part,
        inputs,
        sizes=(1, 2, 4, 8, 12),
        mode="FULL",
        policy=AlwaysFull(),
        state=[part.cache],
        options=RunnerOptions(device=place),
    )
    rng = random.Random(5)
    worst, largest, kinds = 0.0, 0.0, set()
    # The last token of each sequence, chosen by rank 0; its next step continues from it.
    chosen: dict[int, int] = {}
    greedy = {"tokens": 0, "decoded": 0, "different": 0}
    with RankAgreement(timeout=START, setup_timeout=START) as ranks:
        ranked = RankedRunner(runner, ranks, inputs, same_batches=same_batches)
        lost = ranked.capture()
        for tokens, seqs, positions, decode in traffic(rng, num_steps, 12):
            if decode:
                greedy["decoded"] += sum(seq in chosen for seq in seqs)
                tokens = [chosen.get(*pair) for pair in zip(seqs, tokens, strict=True)]
            given = {
                name: torch.tensor(values, device=place)
                for name, values in (("tokens", tokens), ("seqs", seqs), ("positions", positions))
            }
            found = ranked(**given, num_reqs=len(set(seqs)), uniform=int(decode))
            with torch.no_grad():
                expected = whole(**given)
            worst = max(worst, float((found - expected).abs().max()))
            largest = max(largest, float(expected.abs().max()))
            kinds.add(bool(decode))
            # Sums over ranks round in another order, so that nearly equal logits may swap.
            best = expected.topk(2).values
            is_clear = (best[:, 0] - best[:, 1]) > 1e-4 * largest
            own = found.argmax(-1)
            greedy["tokens"] += int(is_clear.sum())
            greedy["different"] += int(((own != expected.argmax(-1)) & is_clear).sum())
            own = own.cpu()
            dist.broadcast(own, 0)
            chosen |= dict(zip(seqs, own.tolist(), strict=True))
        exchanges = ranks.stats().num_exchanges
    steps = runner.stats().steps_by_mode
    runner.clear()  # graphs that use a communicator must be released before it
    return {
        "worst": worst,
        "largest": largest,
        "lost": len(lost),
        "steps": steps,
        "kinds": sorted(kinds),
        "exchanges": exchanges,
        "greedy": greedy,
    }


def spread_rows(rank, size, *, num_steps, device):
    """Add up rows of all ranks inside the graph, which needs equal row counts."""
    place = torch.device(device, rank if device == "cuda" else None)
    weight = torch.arange(12.0, device=place).reshape(3, 4) / 7
    inputs = {"x": StaticInput((None, 3), "float32")}
    runner = GraphRunner(
        lambda x: over_ranks(x @ weight),
        inputs,
        sizes=(1, 2, 4, 8),
        mode="FULL",
        policy=AlwaysFull(),
        options=RunnerOptions(device=place),
    )
    # Every rank draws the row counts of all ranks.
    rng = random.Random(11)
    worst = 0.0
    with RankAgreement(timeout=START, setup_timeout=START) as ranks:
        ranked = RankedRunner(runner, ranks, inputs)
        ranked.capture()
        for _ in range(num_steps):
            rows = [rng.choice((0, 1, 3, 5, 8)) for _ in range(size)]
            whole = torch.zeros(max(rows), 4, device=place)
            own = None
            for number, count in enumerate(rows):
                x = torch.tensor([[rng.random() for _ in range(3)] for _ in range(count)])
                if count:
                    whole[:count] += x.to(place) @ weight
                    own = x.to(place) if number == rank else own
            if own is None:
                ranked.idle()
                continue
            found = ranked(x=own)
            worst = max(worst, float((found - whole[: len(own)]).abs().max()))
    steps = runner.stats().steps_by_mode
    runner.clear()
    return {"worst": worst, "steps": steps}
