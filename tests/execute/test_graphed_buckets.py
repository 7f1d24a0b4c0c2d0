"""graphed: buckets of a varying axis are planned from observed sizes."""

from __future__ import annotations

import itertools
import random

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import graphed  # noqa: E402
from dispatchkit.execute.graphed import buckets as module  # noqa: E402
from dispatchkit.execute.graphed.buckets import Buckets, plan_buckets  # noqa: E402


def padded(counts, buckets):
    return sum(min(b for b in buckets if b >= size) * n for size, n in counts.items())


def test_a_plan_pads_least_of_all_choices():
    draw = random.Random(0)
    for _ in range(30):
        counts = {draw.randint(1, 99): draw.randint(1, 50) for _ in range(draw.randint(1, 7))}
        num_buckets = draw.randint(1, 5)
        found = plan_buckets(counts, num_buckets)
        assert len(found) <= num_buckets
        assert found[-1] == max(counts)
        least = min(
            padded(counts, (*others, max(counts)))
            for others in itertools.combinations(counts, min(num_buckets, len(counts)) - 1)
        )
        assert padded(counts, found) == least


def test_a_plan_of_thousands_of_sizes_covers_them():
    counts = dict.fromkeys(range(1, 5000, 3), 1)
    found = plan_buckets(counts, 6)
    assert len(found) == 6
    assert padded(counts, found) < 0.9 * padded(counts, [2**power for power in range(14)])


def noted(sizes, buckets=None):
    buckets = buckets or Buckets()
    return buckets, [at for at, size in enumerate(sizes) if buckets.note(size)]


def test_buckets_change_where_a_plan_pays_and_twice_at_most():
    draw = random.Random(0)
    buckets, changed = noted(draw.choice((70, 72, 20)) for _ in range(600))
    assert changed == [0, 511]
    assert buckets.sizes == (24, 72, 128, 256, 512)
    assert str(buckets) == "padded to 24, 72, 128, 256, 512"
    _, changed = noted((draw.choice((33, 40, 97)) for _ in range(20000)), buckets)
    assert changed == [8192 - 600 - 1]
    noted([513], buckets)
    assert buckets.sizes[-4:] == (512, 1024, 2048, 4096)


@pytest.mark.parametrize("sizes", [(16, 32, 64), (60, 62, 64)], ids=["right", "nearly right"])
def test_a_plan_that_pays_little_changes_nothing(sizes):
    buckets, changed = noted(itertools.islice(itertools.cycle(sizes), 9000))
    assert not buckets.is_planned
    assert len(changed) <= 1


def test_calls_are_replayed_in_planned_buckets_and_captures_are_counted(monkeypatch):
    monkeypatch.setattr(module, "_PLAN_AFTER", (10, 20))
    run = graphed(lambda x: x * 2 + 1, backend="tape", sizes=[4])
    for length in (12, 70, 72, 20, 66, 19, 72, 70, 24, 72, 68, 17, 65, 71, 72, 70, 66, 22, 23, 70):
        x = torch.randn(4, length, 3)
        torch.testing.assert_close(run(x), x * 2 + 1)
    stats = run.graphed.stats()
    assert stats.steps_by_mode["NONE"] == 0
    captures = [
        (words.partition(", dim_1 ")[2], one.captures) for words, one in stats.runners.items()
    ]
    assert captures == [("", 1), ("<= 512", 2), ("padded to 24, 72, 128, 256, 512", 2)]


def test_what_was_captured_ahead_stays(monkeypatch):
    monkeypatch.setattr(module, "_PLAN_AFTER", (8, 16))
    run = graphed(lambda x: x * 2 + 1, backend="tape", sizes=[4])
    for length in (12, 70):
        run(torch.randn(4, length, 3))
    run.graphed.capture(torch.randn(4, 70, 3))
    before = run.graphed.runners[-1]
    for _ in range(20):
        run(torch.randn(4, 70, 3))
    assert run.graphed.runners[-1] is before
