"""Warnings that are given once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from dispatchkit.once import Once


def test_each_key_is_the_first_once():
    once = Once()
    assert [once.first(key) for key in ("a", "b", "a", ("a",), "b")] == [
        *(True, True, False, True, False)
    ]
    assert Once().first("a"), "each owner has its own"


def test_of_threads_that_come_together_one_is_the_first():
    once, start = Once(), threading.Barrier(8)

    def ask(_):
        start.wait()
        return [once.first(key) for key in range(500)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert [sum(column) for column in zip(*answers, strict=True)] == [1] * 500
