"""Any number of threads may call one runner; results equal serial ones."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, StaticInput, eager_piece, graph_piece  # noqa: E402


def in_threads(number, work):
    """Run ``work(index)`` in threads that start together; return the results in order."""
    start = threading.Barrier(number)

    def run(index):
        start.wait()
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        return [future.result() for future in [pool.submit(run, i) for i in range(number)]]


def test_threads_give_the_serial_results(make_runner):
    """Steps of several threads run one at a time, each once."""
    weight = torch.randn(16, 16)
    runner = make_runner(
        [
            graph_piece(lambda x: torch.relu(x @ weight)),
            eager_piece(lambda h: h.cumsum(0)),
            graph_piece(lambda h: (h @ weight, h[0].sum())),
        ],
        {"x": StaticInput((None, 16), "float32")},
    )
    runner.capture()
    given = [torch.randn(1 + i % 8, 16) for i in range(64)]
    serial = [runner(x, ceiling=1 + i % 2) for i, x in enumerate(given)]

    def work(index):
        return [(i, runner(given[i], ceiling=1 + i % 2)) for i in range(index, len(given), 8)]

    for results in in_threads(8, work):
        for i, result in results:
            assert torch.equal(result[0], serial[i][0])
            assert torch.equal(result[1], serial[i][1])
    assert runner.stats().steps == 128


def test_simultaneous_first_calls_capture_each_key_once(make_runner):
    """Threads that request a key concurrently share its graph."""
    runner = make_runner(lambda tokens: tokens * 2, lazy=True)
    results = in_threads(50, lambda index: runner(torch.arange(1 + index % 8)))
    for index, result in enumerate(results):
        assert torch.equal(result, torch.arange(1 + index % 8) * 2)
    assert runner.stats().captures == 4
    assert runner.stats().steps_by_mode["FULL"] == 50


def test_state_is_stepped_once_for_each_call(make_runner):
    counter = torch.zeros((), dtype=torch.int64)

    def step(tokens):
        counter.add_(1)
        return tokens + 0, counter + 0

    runner = make_runner(step, state=[counter], lazy=True)
    results = in_threads(16, lambda index: int(runner(torch.arange(1 + index % 8))[1]))
    assert sorted(results) == list(range(1, 17))


def test_graphs_come_and_go_while_others_call(make_runner, quiet):
    """One thread evicts, invalidates and captures; the others get correct results."""
    runner = make_runner(lambda tokens: tokens * 3 + 1)
    runner.capture()
    done = threading.Event()

    def work(index):
        if index == 0:
            try:
                for number in range(12):
                    if number % 3 == 0:
                        runner.invalidate()
                    elif number % 3 == 1:
                        runner.clear()
                    runner.capture()
            finally:
                done.set()
            return 0
        count = 0
        while not done.is_set():
            rows = 1 + count % 8
            assert torch.equal(runner(torch.arange(rows)), torch.arange(rows) * 3 + 1)
            count += 1
        return count

    counts = in_threads(4, work)
    assert runner.stats().steps == sum(counts)
    assert runner.stats().captures == 4 + 8 * 4


def test_two_runners_capture_in_two_threads(policy):
    """The process runs one capture at a time; both succeed."""
    runners = [
        GraphRunner(
            lambda tokens, factor=factor: tokens * factor,
            {"tokens": StaticInput((None,), "int64")},
            sizes=(1, 2, 4, 8),
            mode="FULL",
            policy=policy,
            backend="tape",
        )
        for factor in (2, 3)
    ]
    reports = in_threads(2, lambda index: runners[index].capture())
    assert [report.num_graphs for report in reports] == [4, 4]
    for factor, runner in zip((2, 3), runners, strict=True):
        assert torch.equal(runner(torch.arange(5)), torch.arange(5) * factor)
