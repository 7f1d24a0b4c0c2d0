"""RankAgreement: exchanges of small rows over a process group, each with a time limit.

A failed collective leaves connections half used, so the first failure ends the agreement:
its group is dropped, which wakes the other ranks at once, and each rank reads the notes in
the store to find out which rank to name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
import torch.distributed as dist

from dispatchkit.errors import ConfigError, RankError

from dispatchkit_ranks.fingerprint import differences, odd_ranks, versions
from dispatchkit_ranks.notes import Notes
from dispatchkit_ranks.protocol import MAX_COLUMNS, Phase
from dispatchkit_ranks.verdict import LEFT, RAISED, WAITED, Note
from dispatchkit_ranks.wire import Wire

# The largest and smallest phase, the mark and its negative; the row follows.
_MARK = len(Phase)
_ROW = _MARK + 2
#: Numbers in one exchange.
ROW_WIDTH = _ROW + MAX_COLUMNS
# A collective waits several times, and its limit restarts with each wait. Two limits plus the
# time for notes fit within the whole timeout.
_SHARE_OF_COLLECTIVE, _SHARE_OF_NOTES = 0.4, 0.08
# On a busy machine a rank that woke with the others may need this long to leave its note; until
# then it looks like a rank that never arrived.
_LEAST_FOR_NOTES = 1.0
# The others always wait for this share of a collective's limit, counted from the last collective.
_SHARE_OF_PATIENCE = 0.5
# The longest wait for a store that does not accept a note.
_SECONDS_FOR_OWN_NOTE = 0.5
_Given = TypeVar("_Given")
_Merged = TypeVar("_Merged")
_instances: dict[tuple[str, tuple[int, ...]], itertools.count[int]] = {}


@attrs.frozen
class AgreementStats:
    """The time this rank spent in agreements, waits for other ranks included, start-up excluded.

    Attributes:
        num_exchanges: Number of step exchanges.
        total_us: Total microseconds spent in them.
        max_us: Microseconds spent in the longest.
    """

    num_exchanges: int
    total_us: float
    max_us: float


class RankAgreement:
    """The ranks of a process group and their exchanges.

    All ranks create one at the same point; creation compares versions. It owns a separate
    process group with the same members as the given one, so that its collectives do not queue
    behind others, and closes that group when the agreement ends.

    Args:
        group: A torch.distributed process group; by default the group of all ranks.
        timeout: Seconds within which every rank has stopped if another rank does not reach a
            step. Below 15 seconds, or if the store does not answer, it may take two seconds
            longer. A rank counts as late after 0.4 of the timeout.
        setup_timeout: The same for start-up, captures and the first step, which ranks may
            reach far apart.
        device: Where rows are exchanged. By default the CPU over gloo, which does not delay
            device work; a CUDA device uses NCCL and synchronizes with the device in every step.
        name: Distinguishes agreements of the same ranks in the store.
        name: Tells agreements of the same ranks apart in the store.
        facts: Facts that must be equal on all ranks, compared at creation.

    Attributes:
        rank: Index of this rank in the group.
        size: Number of ranks in the group.
        members: Their global ranks, as torchrun assigns them.
        step: Last step that was agreed on.

    Raises:
        ConfigError: torch.distributed is not initialised, or an argument is invalid.
        RankError: A rank does not arrive, or has other versions or facts.

    Thread safety: use it from one thread.
    """

    rank: int
    size: int

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 60.0,
        setup_timeout: float = 600.0,
        device: str | torch.device = "cpu",
        name: str = "default",
        facts: Mapping[str, object] | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "group", group, "a process group", "Call torch.distributed.init_process_group."
            )
        self.timeout: float = _seconds(timeout, "timeout")
        self.setup_timeout: float = max(self.timeout, _seconds(setup_timeout, "setup_timeout"))
        place = _device(device)
        parent = dist.group.WORLD if group is None else group
        # In ascending order, as in the group created below.
        self.members: tuple[int, ...] = tuple(sorted(dist.get_process_group_ranks(parent)))
        me = dist.get_rank()
        if me not in self.members:
            raise ConfigError("group", self.members, f"a group that rank {me} is in")
        self.rank, self.size = self.members.index(me), len(self.members)
        self.step: int = 0
        self._stopped: RankError | None = None
        self._is_first_step = True
        self._num_exchanges, self._total, self._longest = 0, 0.0, 0.0
        # When all ranks last met, and how long after it no rank can have stopped.
        self._met_at = time.perf_counter()
        self._patience = self.timeout * _SHARE_OF_COLLECTIVE * _SHARE_OF_PATIENCE
        self._wire: Wire | None = None
        # The head of this rank's row, and the merged head if all ranks send the same one.
        self._heads = [[int(at == each) * (self.rank + 1) for at in Phase] for each in Phase]
        self._met = [[int(at == each) * self.size for at in Phase] for each in Phase]
        self._padding = [[0] * (MAX_COLUMNS - used) for used in range(MAX_COLUMNS + 1)]
        if self.size == 1:
            return
        serial = next(_instances.setdefault((name, self.members), itertools.count()))
        prefix = f"dispatchkit/{name}/{'-'.join(map(str, self.members))}/{serial}"
        self._notes = Notes(_store_of(parent), prefix, self.members, self.rank)
        self._notes.meet(self.setup_timeout)
        start = time.perf_counter()
        try:
            self._wire = Wire(
                self._notes.group_store(),
                self.rank,
                self.size,
                place,
                ROW_WIDTH,
                self.setup_timeout,
            )
        except RuntimeError as error:
            seconds = time.perf_counter() - start
            where = "the creation of their process group"
            raise self._broken(error, seconds, self.setup_timeout, where) from error
        self.compare({**versions(), **{k: str(v) for k, v in (facts or {}).items()}})

    # -- the step -----------------------------------------------------------------------

    def exchange(
        self,
        row: Sequence[int],
        phase: Phase = Phase.STEP,
        *,
        label: str = "",
        mark: int = 0,
        step: int = 0,
    ) -> list[int]:
        """Return the maximum of each column over all ranks, with one small collective.

        Args:
            row: At most ``MAX_COLUMNS`` integers.
            phase: What this rank is doing.
            label: The phase in words, for messages.
            mark: An integer that must be equal on all ranks.
            step: Number of the step; recorded as the last known step.

        Raises:
            RankError: A rank is late, gone, has raised, or is doing something else.
        """
        wire = self._wire
        if wire is None:
            self._check_open()
            self.step = step or self.step
            return list(row)
        head = [*self._heads[phase], mark, -mark]
        # Fixed length, so that ranks in different phases can meet; unused columns are 0.
        message = [*head, *row, *self._padding[len(row)]]
        is_counted = phase is Phase.STEP and not self._is_first_step
        start = time.perf_counter()
        merged = self._meet(wire.merge, message, phase, label, step)
        if is_counted:
            elapsed = self._met_at - start
            self._num_exchanges += 1
            self._total += elapsed
            if elapsed > self._longest:
                self._longest = elapsed
        elif phase is not Phase.SHARE:
            self._is_first_step = phase is not Phase.STEP
        # If all ranks are in this phase, the last rank's number is the largest.
        if merged[:_ROW] != [*self._met[phase], mark, -mark]:
            raise self._apart(merged, phase, mark, self._where(phase, label, step))
        if step:
            self.step = step
        return merged[_ROW : _ROW + len(row)]

    def _limit(self, phase: Phase) -> float:
        """Return the time limit of an exchange in seconds; longer where ranks may be far apart."""
        if self._is_first_step or phase is Phase.CAPTURE:
            return self.setup_timeout
        return self.timeout

    # -- cold paths ---------------------------------------------------------------------

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank, in order."""
        return [part.decode() for part in self._collect(text.encode(), self.size, self.rank)]

    def share(self, text: str) -> str:
        """Return rank 0's text; the texts of other ranks are ignored."""
        given = text.encode() if self.rank == 0 else b""
        return self._collect(given, 1, 0)[0].decode()

    def barrier(self, label: str = "a barrier") -> None:
        """Wait for all ranks."""
        self.exchange((), Phase.SHARE, label=label)

    def compare(self, facts: Mapping[str, str]) -> None:
        """Stop on all ranks if any fact is not the same everywhere.

        Raises:
            RankError: It names what differs, and on which ranks.
        """
        everyone = [json.loads(text) for text in self.gather(json.dumps(dict(facts)))]
        found = differences(everyone, self.members)
        if not found:
            return
        listing = "".join(f"\n  {name}: {who}" for name, who in found.items())
        error = RankError(
            f"The ranks are set up differently.{listing}\nUse the same settings and versions.",
            ranks=odd_ranks(everyone, self.members),
            step=self.step,
            reason="differs",
        )
        self._end(error)
        raise error

    def stats(self) -> AgreementStats:
        """Return the time spent in agreements of steps since the first."""
        return AgreementStats(self._num_exchanges, self._total * 1e6, self._longest * 1e6)

    # -- the end ------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether exchanges are possible."""
        return self._stopped is None

    def close(self) -> None:
        """Leave together with the other ranks, which call it at the same point.

        Waits at most ``timeout`` for them. The group no longer exists afterwards.
        """
        if self._stopped is not None:
            return
        if self._wire is not None:
            message = [*self._heads[Phase.CLOSE], 0, 0, *self._padding[0]]
            # A rank that left earlier has closed its side; this rank leaves now.
            with contextlib.suppress(RuntimeError):
                self._wire.merge(message, self.timeout * _SHARE_OF_COLLECTIVE)
            self._notes.leave(Note(LEFT, self.step, "closed"))
        self._end(RankError("The agreement of the ranks was closed.", reason=LEFT))

    def fail(self, error: BaseException | str) -> None:
        """Stop and report the reason; the other ranks stop at their next exchange."""
        if self._stopped is not None:
            return
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        if self._wire is not None:
            # Leave the note first: dropping the group makes other ranks look for it.
            self._notes.leave(Note(RAISED, self.step, text[:2000]))
        has_others = self._wire is not None
        me = self.members[self.rank]
        self._end(RankError(f"This rank ({me}) raised {text}.", ranks=(me,), reason=RAISED))
        if has_others:
            self._notes.see_out(_time_for_notes(self.timeout))

    def __enter__(self) -> RankAgreement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)

    # -- inside -------------------------------------------------------------------------

    def _collect(self, data: bytes, num_rows: int, row: int) -> list[bytes]:
        """Gather one row of bytes from every rank, or one row from rank 0 alone."""
        wire = self._wire
        if wire is None:
            self._check_open()
            return [data]
        longest = self.exchange((len(data),), Phase.SHARE)[0]
        # Each rank fills its own row and leaves the others 0, the smallest byte.
        width = longest + 8
        table = np.zeros((num_rows, width), dtype=np.uint8)
        if num_rows > 1 or self.rank == row:
            table[row, :8] = np.frombuffer(len(data).to_bytes(8, "little"), dtype=np.uint8)
            table[row, 8 : 8 + len(data)] = np.frombuffer(data, dtype=np.uint8)
        found = self._meet(wire.merge_bytes, table, Phase.SHARE)
        return [bytes(line[8 : 8 + int.from_bytes(bytes(line[:8]), "little")]) for line in found]

    def _meet(
        self,
        merge: Callable[[_Given, float], _Merged],
        given: _Given,
        phase: Phase,
        label: str = "",
        step: int = 0,
    ) -> _Merged:
        """Return the result of a collective of the wire, or end the agreement and raise."""
        limit, start = self._limit(phase), time.perf_counter()
        # Other ranks may have stopped, and a collective need not fail then: an NCCL collective
        # that they aborted may complete here with partial data.
        is_overdue = start - self._met_at > self._patience
        try:
            if is_overdue:
                self._check_nobody_stopped()
            found = merge(given, limit * _SHARE_OF_COLLECTIVE)
            if is_overdue:
                self._check_nobody_stopped()
        except RuntimeError as error:
            seconds = time.perf_counter() - start
            raise self._broken(error, seconds, limit, self._where(phase, label, step)) from error
        self._met_at = time.perf_counter()
        return found

    def _check_nobody_stopped(self) -> None:
        if self._notes.is_anyone_stopped():
            raise RuntimeError("the others had stopped before this rank arrived")

    def _where(self, phase: Phase, label: str = "", step: int = 0) -> str:
        if label:
            return label
        return f"step {step}" if phase is Phase.STEP else "a comparison of settings"

    def _broken(self, error: Exception, seconds: float, limit: float, where: str) -> RankError:
        """End the agreement, attribute a failed collective to ranks, and return the error."""
        # Only gloo's text distinguishes a timeout from a lost connection; both are RuntimeErrors.
        timed_out = "imed out" in str(error) or seconds >= limit * _SHARE_OF_COLLECTIVE
        own = Note(WAITED, self.step, str(error)[:500], seconds, timed_out)
        # Leave the note first: a late rank may still receive data from an aborted NCCL
        # collective, and only the note shows that the data is invalid.
        self._notes.leave(own, _SECONDS_FOR_OWN_NOTE)
        self._drop_wire()
        found = self._notes.judge(own, _time_for_notes(limit), where)
        me = self.members[self.rank]
        stop = RankError(
            f"{found.text} (Reported by rank {me} of {self.size}.)",
            ranks=found.ranks,
            step=self.step,
            reason=found.reason,
        )
        self._stopped = stop
        return stop

    def _apart(self, merged: Sequence[int], phase: Phase, mark: int, where: str) -> RankError:
        """End the agreement of ranks that do different things; each of them finds out here."""
        me = self.members[self.rank]
        others = {
            each: self.members[merged[each] - 1] for each in Phase if merged[each] and each != phase
        }
        blamed: Sequence[int] = tuple(others.values())
        if others:
            told = "; ".join(f"rank {number} {each.doing}" for each, number in others.items())
            reason = LEFT if Phase.CLOSE in others else "differs"
            text = f"{told[0].upper()}{told[1:]}, while rank {me} reached {where}."
        else:
            # Every rank sees that the marks differ, so all of them get here.
            everyone = self._marks(mark, where)
            who = "; ".join(differences(everyone, self.members).values())
            blamed, reason = odd_ranks(everyone, self.members), "differs"
            text = f"The ranks reached {where} with different batches or different keys: {who}."
        error = RankError(
            f"{text} All ranks must make the same calls in the same order; an idle rank joins "
            f"each step with 0 tokens. Last step: {self.step}.",
            ranks=blamed,
            step=self.step,
            reason=reason,
        )
        self._end(error)
        return error

    def _marks(self, mark: int, where: str) -> list[dict[str, str]]:
        """Return each rank's place and mark, once all know that these differ."""
        texts = self.gather(json.dumps({"mark": f"{where} with mark {mark:x}"}))
        return [json.loads(text) for text in texts]

    def _check_open(self) -> None:
        if self._stopped is not None:
            raise RankError(
                f"This agreement has ended: {self._stopped}",
                ranks=self._stopped.ranks,
                step=self._stopped.step,
                reason=self._stopped.reason,
            )

    def _end(self, error: RankError) -> None:
        self._stopped = error
        self._drop_wire()

    def _drop_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


def _time_for_notes(limit: float) -> float:
    return max(_LEAST_FOR_NOTES, limit * _SHARE_OF_NOTES)


def _seconds(value: Any, setting: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(setting, value, "a number of seconds above 0")
    return float(value)


def _device(value: Any) -> torch.device:
    """Return the exchange device; a wrong one must not look like a rank that does not arrive."""
    allowed = "the CPU or a CUDA device"
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("device", value, allowed) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", value, allowed)
    if device.type == "cuda" and not dist.is_nccl_available():
        raise ConfigError("device", value, "the CPU here", "This torch was built without NCCL.")
    return device


def _store_of(group: Any) -> Any:
    """Return the store that a process group was created with."""
    public = getattr(group, "get_group_store", None)
    if public is not None:
        return public()
    # torch 2.11 and earlier have it under a private name only.
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(group)  # noqa: SLF001
