"""Policies and dispatchers shared by tests of ranks, without torch."""

from __future__ import annotations

from dispatchkit import (
    BatchDescriptor,
    CellUpdate,
    Decision,
    DispatchConfig,
    Dispatcher,
    GraphKey,
    RuntimeMode,
)
from dispatchkit.testing import SmallestPolicy

SIZES = (1, 2, 4, 8)
MAX_NUM_TOKENS = 8


class Smallest(SmallestPolicy):
    """Runs eager below a number of tokens; ranks with different limits disagree."""

    def __init__(self, eager_below=0):
        self.eager_below = eager_below

    def decide(self, batch, graphs):
        if batch.num_tokens < self.eager_below:
            return Decision.eager("small")
        return super().decide(batch, graphs)


class Planted(Smallest):
    """Raises in ``decide`` if ``raises`` is set."""

    raises = False

    def decide(self, batch, graphs):
        if self.raises:
            raise ZeroDivisionError("planted")
        return super().decide(batch, graphs)


class AlwaysFull(Smallest):
    """Declares FULL graphs for every batch, mixed or uniform."""

    name = "always full"

    def declare(self, config):
        return [GraphKey(RuntimeMode.FULL, BatchDescriptor(n)) for n in config.sizes]


class Wilful:
    """Changes its decision for a batch after each outcome."""

    name = "wilful"

    def __init__(self, seed=0):
        self.count = seed
        self.asked = []

    def declare(self, config):
        return Smallest().declare(config)

    def decide(self, batch, graphs):
        self.asked.append(batch)
        return

    def observe(self, outcome):
        self.count += 1
        batch = outcome.batch
        eager = Decision.eager(f"wanted_{self.count}", timed=self.count % 2 == 0)
        kinds = {0: (eager, True), 1: (eager, False), 2: (None, False)}
        answer, one_shot = kinds[self.count % 3]
        return [CellUpdate(batch, answer, one_shot)]


def make_dispatcher(policy=None, *, captured=True, sizes=SIZES, strict=False, **settings):
    config = DispatchConfig(
        sizes=sizes, max_num_tokens=MAX_NUM_TOKENS, **{"query_lens": (1, 2), **settings}
    )
    dispatcher = Dispatcher(policy or Smallest(), config, strict=strict)
    if captured:
        for key in dispatcher.registry:
            dispatcher.registry.captured(key, f"graph of {key}")
    return dispatcher


def random_batch(random, config):
    """Return valid arguments for ``dispatch``."""
    uniform = random.randrange(1 + len(config.query_lens))
    if uniform:
        query_len = config.query_lens[uniform - 1]
        num_reqs = random.randint(1, config.max_num_tokens // query_len)
        num_tokens = num_reqs * query_len
    else:
        num_tokens = random.randint(1, config.max_num_tokens)
        num_reqs = random.randint(0, num_tokens)
    loras = random.randint(0, config.max_loras)
    return num_tokens, num_reqs, uniform, loras, random.choice((0, 1, 2, 2, 2))
