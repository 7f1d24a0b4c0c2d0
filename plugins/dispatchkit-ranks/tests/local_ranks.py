"""Ranks as threads of one process, for tests that do not need torch."""

from __future__ import annotations

import json
import threading

from dispatchkit.errors import RankError

from dispatchkit_ranks import Phase, differences

LIMIT = 20.0


class Meeting:
    """A meeting point of threads; a round ends when all threads have contributed a value."""

    def __init__(self, size):
        self.size = size
        self.failed = None
        self._changed = threading.Condition()
        self._rounds = [{}]

    def bring_together(self, rank, value):
        with self._changed:
            current = self._rounds[-1]
            current[rank] = value
            if len(current) == self.size:
                self._rounds.append({})
                self._changed.notify_all()
            self._changed.wait_for(lambda: len(current) == self.size or self.failed, LIMIT)
            if len(current) < self.size:
                who, why = self.failed or (None, "somebody did not come")
                raise RankError(f"Rank {who} stopped: {why}", ranks=[who])
            return [current[each] for each in range(self.size)]

    def fail(self, rank, error):
        with self._changed:
            self.failed = self.failed or (rank, error)
            self._changed.notify_all()


class LocalRanks:
    """One rank of a meeting."""

    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.num_exchanges = 0

    def exchange(self, row, phase=Phase.STEP, *, label="", mark=0, step=0):
        self.num_exchanges += 1
        found = self.meeting.bring_together(self.rank, (phase, mark, list(map(int, row))))
        if len({(each[0], each[1], len(each[2])) for each in found}) > 1:
            raise RankError("The ranks do different things.", step=step, reason="differs")
        return [max(column) for column in zip(*(each[2] for each in found), strict=True)]

    def gather(self, text):
        return self.meeting.bring_together(self.rank, text)

    def share(self, text):
        return self.meeting.bring_together(self.rank, text)[0]

    def compare(self, facts):
        found = differences(list(map(json.loads, self.gather(json.dumps(facts)))), range(self.size))
        if found:
            raise RankError(str(found), reason="differs")

    def fail(self, error):
        self.meeting.fail(self.rank, error)


def run_ranks(size, run):
    """Call ``run(ranks)`` in a thread per rank; return each result or exception."""
    meeting = Meeting(size)
    results = [None] * size

    def work(rank):
        try:
            results[rank] = run(LocalRanks(meeting, rank))
        except Exception as error:  # noqa: BLE001 - raised in the test
            meeting.fail(rank, error)
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def all_good(results):
    """Return the results, or raise the first exception, preferably other than ``RankError``."""
    errors = [each for each in results if isinstance(each, Exception)]
    for error in sorted(errors, key=lambda each: isinstance(each, RankError)):
        raise error
    return results
