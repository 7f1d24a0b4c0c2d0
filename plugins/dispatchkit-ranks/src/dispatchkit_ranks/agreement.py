"""Exchange small rows of integers over a process group, within a time limit.

A failed collective leaves connections in an undefined state, so the first failure ends the
agreement. A rank whose collective failed leaves a note in the torch.distributed store and closes
its process group, which wakes ranks that still wait in a collective. It then reads the notes of all
ranks to find the rank that caused the failure.
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

from dispatchkit_ranks.exchange_group import ExchangeGroup
from dispatchkit_ranks.fingerprint import deviating_ranks, differences, versions
from dispatchkit_ranks.notes import Notes
from dispatchkit_ranks.protocol import MAX_COLUMNS, Phase
from dispatchkit_ranks.verdict import LEFT, RAISED, WAITED, Note

# A message starts with one column per phase, the mark and its negative; the row follows.
_MARK = len(Phase)
_ROW = _MARK + 2
#: Number of integers in one exchange.
ROW_WIDTH = _ROW + MAX_COLUMNS
# A collective waits several times, and its time limit restarts with each wait. Twice this limit and
# the time for notes must fit into the timeout.
_SHARE_OF_COLLECTIVE, _SHARE_OF_NOTES = 0.4, 0.08
# Minimum time to wait for notes, because a rank on a busy machine may need this long to leave one.
# A rank without a note is reported as never having arrived.
_MIN_NOTES_SECONDS = 1.0
# No rank times out before this share of a collective's time limit has passed since the last
# collective. Until then, no check for stopped ranks is needed.
_SHARE_UNTIL_CHECK = 0.5
# Time limit for leaving a note in a store that does not answer.
_SECONDS_FOR_OWN_NOTE = 0.5
_Given = TypeVar("_Given")
_Merged = TypeVar("_Merged")
_instances: dict[tuple[str, tuple[int, ...]], itertools.count[int]] = {}


@attrs.frozen
class AgreementStats:
    """Time that this rank spent in step exchanges, including waits for other ranks.

    Attributes:
        num_exchanges: Number of step exchanges, excluding the first after start-up or a capture.
        total_us: Total time in microseconds.
        max_us: Longest exchange in microseconds.
    """

    num_exchanges: int
    total_us: float
    max_us: float


class RankAgreement:
    """The ranks of a process group and their exchanges.

    All ranks must create an agreement at the same point of the program. They then compare their
    versions of Python, torch and dispatchkit. An agreement creates a separate process group with
    the same members, so that its collectives do not queue behind other collectives. The group is
    closed when the agreement ends.

    Args:
        group: A torch.distributed process group; by default the group of all ranks.
        timeout: Maximum time in seconds until all ranks stop if one rank does not reach a step.
            With a timeout below 15 seconds, or if the torch.distributed store does not answer,
            stopping may take two seconds longer. A rank counts as late after 0.4 of the timeout.
        setup_timeout: The timeout in seconds for start-up, captures and the first step after
            either, which ranks may reach at very different times. If it is less than ``timeout``,
            ``timeout`` applies.
        device: The device on which values are exchanged. The default is the CPU with gloo, which
            does not delay device work. With a CUDA device, the exchange uses NCCL, and the host
            waits for the device in every step.
        name: Name that distinguishes agreements of the same ranks in the store.
        facts: Values by name that must be equal on all ranks, compared at creation.

    Attributes:
        rank: Index of this rank in the group.
        size: Number of ranks in the group.
        members: Global ranks of the group's members, as assigned by torchrun.
        step: Last step that the ranks agreed on.

    Raises:
        ConfigError: torch.distributed is not initialized, or an argument is invalid.
        RankError: A rank does not arrive, or its versions or ``facts`` differ.

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
                "group",
                group,
                "an initialized process group",
                "Call torch.distributed.init_process_group() first.",
            )
        self.timeout: float = _seconds(timeout, "timeout")
        self.setup_timeout: float = max(self.timeout, _seconds(setup_timeout, "setup_timeout"))
        exchange_device = _device(device)
        parent = dist.group.WORLD if group is None else group
        # In ascending order, as in the group created below.
        self.members: tuple[int, ...] = tuple(sorted(dist.get_process_group_ranks(parent)))
        me = dist.get_rank()
        if me not in self.members:
            raise ConfigError(
                "group",
                self.members,
                f"a process group that contains rank {me} (this process)",
                "Create the agreement only on the ranks of its group.",
            )
        self.rank, self.size = self.members.index(me), len(self.members)
        self.step: int = 0
        self._stopped: RankError | None = None
        self._is_first_step = True
        self._num_exchanges, self._total, self._longest = 0, 0.0, 0.0
        # Time of the last exchange, and the seconds after it in which no rank can have timed out.
        self._last_exchange_at = time.perf_counter()
        self._check_after = self.timeout * _SHARE_OF_COLLECTIVE * _SHARE_UNTIL_CHECK
        self._group: ExchangeGroup | None = None
        # For each phase, the phase columns of this rank's message, and their merged values if all
        # ranks are in this phase.
        self._heads = [[int(at == each) * (self.rank + 1) for at in Phase] for each in Phase]
        self._full_heads = [[int(at == each) * self.size for at in Phase] for each in Phase]
        self._padding = [[0] * (MAX_COLUMNS - used) for used in range(MAX_COLUMNS + 1)]
        if self.size == 1:
            return
        serial = next(_instances.setdefault((name, self.members), itertools.count()))
        prefix = f"dispatchkit/{name}/{'-'.join(map(str, self.members))}/{serial}"
        self._notes = Notes(_store_of(parent), prefix, self.members, self.rank)
        self._notes.wait_for_all(self.setup_timeout)
        start = time.perf_counter()
        try:
            self._group = ExchangeGroup(
                self._notes.group_store(),
                self.rank,
                self.size,
                exchange_device,
                ROW_WIDTH,
                self.setup_timeout,
            )
        except RuntimeError as error:
            seconds = time.perf_counter() - start
            where = "the creation of the process group"
            raise self._collective_failed(error, seconds, self.setup_timeout, where) from error
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
        """Return the maximum of each column over all ranks, using one small collective.

        Args:
            row: At most ``MAX_COLUMNS`` integers.
            phase: The activity of this rank.
            label: Description of the activity, for messages.
            mark: An integer that must be equal on all ranks.
            step: Number of the step, recorded as the last agreed step; 0 outside steps.

        Raises:
            RankError: A rank is late, has left, has raised an error, is in another phase, or has
                another ``mark``; or the agreement has ended.
        """
        group = self._group
        if group is None:
            self._check_open()
            self.step = step or self.step
            return list(row)
        head = [*self._heads[phase], mark, -mark]
        # The length is fixed, so that ranks in different phases can exchange; unused columns are 0.
        message = [*head, *row, *self._padding[len(row)]]
        is_counted = phase is Phase.STEP and not self._is_first_step
        start = time.perf_counter()
        merged = self._run_collective(group.merge, message, phase, label, step)
        if is_counted:
            elapsed = self._last_exchange_at - start
            self._num_exchanges += 1
            self._total += elapsed
            if elapsed > self._longest:
                self._longest = elapsed
        elif phase is not Phase.SHARE:
            self._is_first_step = phase is not Phase.STEP
        # If all ranks are in this phase, its column is the number of ranks and the others are 0.
        if merged[:_ROW] != [*self._full_heads[phase], mark, -mark]:
            raise self._mismatch(merged, phase, mark, self._where(phase, label, step))
        if step:
            self.step = step
        return merged[_ROW : _ROW + len(row)]

    def _limit(self, phase: Phase) -> float:
        """Return the time limit of an exchange in seconds."""
        if self._is_first_step or phase is Phase.CAPTURE:
            return self.setup_timeout
        return self.timeout

    # -- cold paths ---------------------------------------------------------------------

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order."""
        return [part.decode() for part in self._collect(text.encode(), self.size, self.rank)]

    def share(self, text: str) -> str:
        """Return the text of rank 0; the texts of other ranks are ignored."""
        given = text.encode() if self.rank == 0 else b""
        return self._collect(given, 1, 0)[0].decode()

    def barrier(self, label: str = "a barrier") -> None:
        """Wait for all ranks."""
        self.exchange((), Phase.SHARE, label=label)

    def compare(self, facts: Mapping[str, str]) -> None:
        """End the agreement on all ranks if any value of ``facts`` differs between ranks.

        Raises:
            RankError: Values differ; the error lists them by rank.
        """
        everyone = [json.loads(text) for text in self.gather(json.dumps(dict(facts)))]
        found = differences(everyone, self.members)
        if not found:
            return
        listing = "".join(f"\n  {name}: {who}" for name, who in found.items())
        error = RankError(
            f"The ranks have different settings or versions.{listing}\nMake them equal on all "
            "ranks.",
            ranks=deviating_ranks(everyone, self.members),
            step=self.step,
            reason="differs",
        )
        self._end(error)
        raise error

    def stats(self) -> AgreementStats:
        """Return statistics of step exchanges, excluding the first after start-up or a capture."""
        return AgreementStats(self._num_exchanges, self._total * 1e6, self._longest * 1e6)

    # -- the end ------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether exchanges are possible."""
        return self._stopped is None

    def close(self) -> None:
        """End the agreement; all ranks must call this at the same point.

        Waits at most ``timeout`` for the other ranks, then closes the process group.
        """
        if self._stopped is not None:
            return
        if self._group is not None:
            message = [*self._heads[Phase.CLOSE], 0, 0, *self._padding[0]]
            # This fails if another rank left earlier and closed its side of the connection.
            with contextlib.suppress(RuntimeError):
                self._group.merge(message, self.timeout * _SHARE_OF_COLLECTIVE)
            self._notes.leave(Note(LEFT, self.step, "closed"))
        self._end(RankError("This rank called close().", reason=LEFT))

    def fail(self, error: BaseException | str) -> None:
        """End the agreement because of an error; other ranks stop at their next exchange."""
        if self._stopped is not None:
            return
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = text.rstrip(".: ")  # an error may have no message
        if self._group is not None:
            # Leave the note first: other ranks look for it when the group closes.
            self._notes.leave(Note(RAISED, self.step, text[:2000]))
        has_others = self._group is not None
        me = self.members[self.rank]
        self._end(RankError(f"This rank ({me}) raised {text}.", ranks=(me,), reason=RAISED))
        if has_others:
            self._notes.wait_for_readers(_notes_limit(self.timeout))

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

    # -- internals ----------------------------------------------------------------------

    def _collect(self, data: bytes, num_rows: int, row: int) -> list[bytes]:
        """Return the data of each rank or, if ``num_rows`` is 1, the data of rank 0."""
        group = self._group
        if group is None:
            self._check_open()
            return [data]
        longest = self.exchange((len(data),), Phase.SHARE)[0]
        # Each rank fills its own row. Other rows stay 0, so the maximum keeps every row.
        width = longest + 8
        table = np.zeros((num_rows, width), dtype=np.uint8)
        if num_rows > 1 or self.rank == row:
            table[row, :8] = np.frombuffer(len(data).to_bytes(8, "little"), dtype=np.uint8)
            table[row, 8 : 8 + len(data)] = np.frombuffer(data, dtype=np.uint8)
        found = self._run_collective(group.merge_bytes, table, Phase.SHARE)
        return [bytes(line[8 : 8 + int.from_bytes(bytes(line[:8]), "little")]) for line in found]

    def _run_collective(
        self,
        merge: Callable[[_Given, float], _Merged],
        given: _Given,
        phase: Phase,
        label: str = "",
        step: int = 0,
    ) -> _Merged:
        """Return the result of a collective; end the agreement if it fails.

        Raises:
            RankError: The collective failed.
        """
        limit, start = self._limit(phase), time.perf_counter()
        # A collective may succeed although other ranks have stopped: if NCCL aborted it on another
        # rank, it can complete here with partial data.
        must_check = start - self._last_exchange_at > self._check_after
        try:
            if must_check:
                self._check_no_rank_stopped()
            found = merge(given, limit * _SHARE_OF_COLLECTIVE)
            if must_check:
                self._check_no_rank_stopped()
        except RuntimeError as error:
            seconds = time.perf_counter() - start
            raise self._collective_failed(
                error, seconds, limit, self._where(phase, label, step)
            ) from error
        self._last_exchange_at = time.perf_counter()
        return found

    def _check_no_rank_stopped(self) -> None:
        if self._notes.has_stopped_ranks():
            raise RuntimeError("other ranks had stopped before this rank arrived")

    def _where(self, phase: Phase, label: str = "", step: int = 0) -> str:
        if label:
            return label
        return f"step {step}" if phase is Phase.STEP else "an exchange of settings or keys"

    def _collective_failed(
        self, error: Exception, seconds: float, limit: float, where: str
    ) -> RankError:
        """End the agreement after a failed collective; return the error that names the cause."""
        # A timeout and a lost connection both raise RuntimeError. Only gloo's messages distinguish
        # them.
        timed_out = "imed out" in str(error) or seconds >= limit * _SHARE_OF_COLLECTIVE
        own = Note(WAITED, self.step, str(error)[:500], seconds, timed_out)
        # Leave the note first: a late rank may still receive data from an aborted NCCL
        # collective, and only the note shows that the data is invalid.
        self._notes.leave(own, _SECONDS_FOR_OWN_NOTE)
        self._close_group()
        found = self._notes.find_cause(own, _notes_limit(limit), where)
        me = self.members[self.rank]
        stop = RankError(
            f"{found.text} (Reported by rank {me}.)",
            ranks=found.ranks,
            step=self.step,
            reason=found.reason,
        )
        self._stopped = stop
        return stop

    def _mismatch(self, merged: Sequence[int], phase: Phase, mark: int, where: str) -> RankError:
        """End the agreement because phases or marks of ranks differ; return the error."""
        me = self.members[self.rank]
        others = {
            each: self.members[merged[each] - 1] for each in Phase if merged[each] and each != phase
        }
        blamed: Sequence[int] = tuple(others.values())
        if others:
            report = "; ".join(
                f"rank {number} {each.description}" for each, number in others.items()
            )
            reason = LEFT if Phase.CLOSE in others else "differs"
            text = f"{report[0].upper()}{report[1:]}, while rank {me} has reached {where}."
        else:
            # All ranks reach this point, because the merged marks are equal on all ranks.
            everyone = self._marks(mark, where)
            who = "; ".join(differences(everyone, self.members).values())
            blamed, reason = deviating_ranks(everyone, self.members), "differs"
            text = f"The ranks reached {where} with different batches or keys: {who}."
        error = RankError(
            f"{text} All ranks must make the same calls in the same order; an idle rank joins "
            f"each step with 0 tokens. Last agreed step: {self.step}.",
            ranks=blamed,
            step=self.step,
            reason=reason,
        )
        self._end(error)
        return error

    def _marks(self, mark: int, where: str) -> list[dict[str, str]]:
        """Return each rank's mark and where the rank made it; all ranks must call this together."""
        texts = self.gather(json.dumps({"mark": f"checksum {mark:x} at {where}"}))
        return [json.loads(text) for text in texts]

    def _check_open(self) -> None:
        if self._stopped is not None:
            raise RankError(
                f"The agreement has ended. {self._stopped} Create a new agreement on all ranks.",
                ranks=self._stopped.ranks,
                step=self._stopped.step,
                reason=self._stopped.reason,
            )

    def _end(self, error: RankError) -> None:
        self._stopped = error
        self._close_group()

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _notes_limit(limit: float) -> float:
    return max(_MIN_NOTES_SECONDS, limit * _SHARE_OF_NOTES)


def _seconds(value: Any, setting: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(setting, value, "a positive, finite number of seconds")
    return float(value)


def _device(value: Any) -> torch.device:
    """Validate and return the device of the exchange.

    Without this check, the first collective on an invalid device would fail, with an error that
    blames another rank.
    """
    allowed = "'cpu' or a CUDA device"
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("device", value, allowed) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", value, allowed)
    if device.type == "cuda" and not dist.is_nccl_available():
        raise ConfigError("device", value, "'cpu'", "The installed torch was built without NCCL.")
    return device


def _store_of(group: Any) -> Any:
    """Return the store that a process group was created with."""
    public = getattr(group, "get_group_store", None)
    if public is not None:
        return public()
    # Up to torch 2.11, the function is private.
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(group)  # noqa: SLF001
