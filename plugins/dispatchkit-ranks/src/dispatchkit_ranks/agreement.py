"""RankAgreement: exchanges of small rows over a process group, with a limit on every wait.

A failed collective leaves connections half used, so the first failure ends the agreement:
its group is dropped, which wakes the other ranks at once, and each finds out from the notes
in the store whom to name.
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

# Who is in which phase, and the mark with its negative; the row follows.
_MARK = len(Phase)
_ROW = _MARK + 2
#: Numbers in one exchange.
ROW_WIDTH = _ROW + MAX_COLUMNS
# A collective has several waits in a row, each of them with the limit of its own: what comes
# between two of them starts it anew. Two limits and the time for notes are within the whole.
_SHARE_OF_COLLECTIVE, _SHARE_OF_NOTES = 0.4, 0.08
# On a busy machine a rank that woke with the others may need so long to leave its note; before it
# is there, that rank looks like one that never came.
_LEAST_FOR_NOTES = 1.0
# Others wait for so much of a collective's limit in any case, counted from the last one.
_SHARE_OF_PATIENCE = 0.5
# Nobody is kept waiting for longer by a store that does not take a note.
_SECONDS_FOR_OWN_NOTE = 0.5
_Given = TypeVar("_Given")
_Merged = TypeVar("_Merged")
_instances: dict[tuple[str, tuple[int, ...]], itertools.count[int]] = {}


@attrs.frozen
class AgreementStats:
    """What agreements cost this rank: its wait for the others included, start-up not.

    Attributes:
        num_exchanges: Exchanges of steps.
        total_us: Microseconds in them.
        max_us: Microseconds in the longest.
    """

    num_exchanges: int
    total_us: float
    max_us: float


class RankAgreement:
    """The ranks of a process group, and their exchanges.

    All ranks make one, at the same point; it compares versions at once. It has a process
    group of its own with the members of the given one, so that nothing else is in the way
    of its collectives, and closes it at its end.

    Args:
        group: A process group of torch.distributed; by default that of all ranks.
        timeout: Seconds within which every rank has stopped when another does not come to
            a step; of less than 15, or where the store does not answer, it may be two seconds
            more. A rank counts as late from 0.4 of them on.
        setup_timeout: The same for start-up, captures and the first step, where ranks may
            be far apart.
        device: Where the rows meet. By default the CPU, over gloo, which holds up no device
            work; a CUDA device uses NCCL and waits for the device in every step.
        name: Tells agreements of the same ranks apart in the store.
        facts: What must be the same on all ranks, compared at once.

    Attributes:
        rank: Number of this rank in the group.
        size: Ranks in the group.
        members: Their numbers among all ranks, as torchrun gives them.
        step: Last step that was agreed on.

    Raises:
        ConfigError: torch.distributed is not initialised, or an argument cannot be used.
        RankError: A rank does not come, or has other versions or facts.

    Thread safety: one thread uses it.
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
        # As the group below has them: in ascending order.
        self.members: tuple[int, ...] = tuple(sorted(dist.get_process_group_ranks(parent)))
        me = dist.get_rank()
        if me not in self.members:
            raise ConfigError("group", self.members, f"a group that rank {me} is in")
        self.rank, self.size = self.members.index(me), len(self.members)
        self.step: int = 0
        self._stopped: RankError | None = None
        self._is_first_step = True
        self._num_exchanges, self._total, self._longest = 0, 0.0, 0.0
        # When all were together last, and for how long after it surely nobody has stopped.
        self._met_at = time.perf_counter()
        self._patience = self.timeout * _SHARE_OF_COLLECTIVE * _SHARE_OF_PATIENCE
        self._wire: Wire | None = None
        # What a rank says of its phase, and what comes of it where all say the same.
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
        """Return the largest value of each column over all ranks: one small collective.

        Args:
            row: At most ``MAX_COLUMNS`` whole numbers.
            phase: What this rank is doing.
            label: The same in words, for messages.
            mark: A whole number that must be the same on all ranks.
            step: Number of the step, which is the last one known from then on.

        Raises:
            RankError: A rank is late, gone, has raised, or is doing something else.
        """
        wire = self._wire
        if wire is None:
            self._check_open()
            self.step = step or self.step
            return list(row)
        head = [*self._heads[phase], mark, -mark]
        # Fixed length, so that ranks in different phases can meet; what is left over is 0.
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
        # The last rank's number is the largest, where all are in this phase.
        if merged[:_ROW] != [*self._met[phase], mark, -mark]:
            raise self._apart(merged, phase, mark, self._where(phase, label, step))
        if step:
            self.step = step
        return merged[_ROW : _ROW + len(row)]

    def _limit(self, phase: Phase) -> float:
        """Return the seconds for an exchange: many, where ranks may be far apart."""
        if self._is_first_step or phase is Phase.CAPTURE:
            return self.setup_timeout
        return self.timeout

    # -- cold paths ---------------------------------------------------------------------

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank, in order."""
        return [part.decode() for part in self._collect(text.encode(), self.size, self.rank)]

    def share(self, text: str) -> str:
        """Return the text that rank 0 gave; what others give is not looked at."""
        given = text.encode() if self.rank == 0 else b""
        return self._collect(given, 1, 0)[0].decode()

    def barrier(self, label: str = "a barrier") -> None:
        """Wait for all ranks."""
        self.exchange((), Phase.SHARE, label=label)

    def compare(self, facts: Mapping[str, str]) -> None:
        """Stop on all ranks if any fact is not the same everywhere.

        Raises:
            RankError: It says what differs, and on which ranks.
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
        """Return what agreements of steps have cost since the first."""
        return AgreementStats(self._num_exchanges, self._total * 1e6, self._longest * 1e6)

    # -- the end ------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether exchanges are possible."""
        return self._stopped is None

    def close(self) -> None:
        """Leave together with the others, who close at the same point.

        One that is alone with that waits for at most ``timeout``. After it the group is gone.
        """
        if self._stopped is not None:
            return
        if self._wire is not None:
            message = [*self._heads[Phase.CLOSE], 0, 0, *self._padding[0]]
            # Whoever went first has closed its side; this one goes now.
            with contextlib.suppress(RuntimeError):
                self._wire.merge(message, self.timeout * _SHARE_OF_COLLECTIVE)
            self._notes.leave(Note(LEFT, self.step, "closed"))
        self._end(RankError("The agreement of the ranks was closed.", reason=LEFT))

    def fail(self, error: BaseException | str) -> None:
        """Stop, and tell the other ranks why; they stop at their next exchange."""
        if self._stopped is not None:
            return
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        if self._wire is not None:
            # The note first: dropping the group is what makes others look for it.
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
        """Bring together one row of bytes from every rank, or one from rank 0 alone."""
        wire = self._wire
        if wire is None:
            self._check_open()
            return [data]
        longest = self.exchange((len(data),), Phase.SHARE)[0]
        # Each rank fills its own row and leaves the others 0, the least of all bytes.
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
        """Return what a collective of the wire gives, or end and raise."""
        limit, start = self._limit(phase), time.perf_counter()
        # Others may have stopped by now, and a collective need not tell: over NCCL one that others
        # have given up may complete here, with whatever was under way.
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
        """End, find out whom a failed collective is put down to, and return the error."""
        # Gloo's text alone tells a limit from a lost connection; both are RuntimeErrors.
        timed_out = "imed out" in str(error) or seconds >= limit * _SHARE_OF_COLLECTIVE
        own = Note(WAITED, self.step, str(error)[:500], seconds, timed_out)
        # The note first: of an NCCL collective that is given up, whoever comes late may still
        # receive something, and must see by the note that it is nothing.
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
        """End where ranks met that do different things; every one of them learns of it here."""
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
            # Every rank sees that the marks differ, so that all of them come here.
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
    """Return where rows meet; a wrong one must not look like a rank that does not come."""
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
    """Return the store that a process group was made with."""
    public = getattr(group, "get_group_store", None)
    if public is not None:
        return public()
    # torch 2.11 and earlier offer it under a private name only.
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(group)  # noqa: SLF001
