"""SlotState: session state, stored in banks with one row per slot.

    slots = SlotState({"hidden": StaticInput((None, 128), "float32")}, num_slots=256)
    runner = GraphRunner(step, {"audio": StaticInput((None, 512), "float32"), "slots": slots})
    slots.join("caller 7")
    runner(audio=audio, slots=slots.slots_of(["caller 7"]))

Callers pass slots. The step receives ``SlotRows`` in their place, to read and write the rows.
After the rows of the slots, each bank has a *blank* row, which always holds the initial state of a
session, and a *sink*, which is never read. Padding rows, and the dummy rows of a warmup or capture,
write to the sink, so a run on dummy rows need not save the banks. These rows read the blank row or,
with compact sessions, the rows of other slots. The proof of rows uses free slots if there are
enough of them, and clears them afterwards. Free slots hold the initial state, so a session that
joins needs no work on the device.

A ``RawBank``, such as a decoder's key-value cache, is addressed by the step itself. It has rows
only for the slots, and a slot is cleared when a session joins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Final, TypeVar

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchkit.backends.capture_guard import free_in_children
from dispatchkit.backends.watching.dispatch_mode import inference_mode
from dispatchkit.errors import (
    CaptureError,
    ConfigError,
    DescriptorError,
    InputError,
    counted,
    format_value,
)
from dispatchkit.execute.io.host_arrays import numpy_module
from dispatchkit.execute.io.static_input import StaticInput
from dispatchkit.execute.step.state import StepState, storage_of
from dispatchkit.keys.checks import check_count, check_flag, refuses_unknown_names, whole_number
from dispatchkit.keys.records import setting

_T = TypeVar("_T")

_SLOTS_OF = "Pass the slots of the step's sessions: slots_of(sessions)."

#: In-place torch operations that write to selected rows.
_INDEXED: Final = ("aten::index_", "aten::_index_put_impl_", "aten::scatter", "aten::_unsafe_index")


@attrs.frozen
class SlotInput(StaticInput):
    """The input for a step's slots; its fill value is the index of the sink."""

    next_step = _SLOTS_OF


@refuses_unknown_names
@attrs.frozen
class RawBank(StaticInput):
    """A bank that the step itself addresses; it has rows only for the slots.

    The sessions of a step are in the first slots, or in the slots that a separate input lists.
    Padding rows must not change a session.

    Attributes:
        positions: Dimension of a session's positions, if each step writes only some positions.
            Padding rows must then write to the last position, which is never read, and
            ``SlotState.leave`` can limit moves to the positions in use. If None, steps change whole
            rows in place, and padding rows change the rows of free slots.
        is_read_only: Whether steps never change the bank.
    """

    positions: int | None = attrs.field(default=None, kw_only=True)
    is_read_only: bool = setting(False, check_flag, kw_only=True)


@attrs.frozen
class SlotMove:
    """The move of a session to another slot.

    Attributes:
        session: Session that was moved.
        source: Old slot.
        target: New slot.
        num_bytes: Number of copied bytes.
    """

    session: Hashable
    source: int
    target: int
    num_bytes: int


@attrs.frozen(eq=False)
class Bank:
    """The memory of one kind of state.

    Attributes:
        tensor: All rows: one per slot, followed by the blank row and the sink unless the bank is a
            ``RawBank``.
        spec: Declaration of the bank.
    """

    tensor: torch.Tensor
    spec: StaticInput

    @property
    def dim(self) -> int:
        """The dimension of the slots."""
        return self.spec.shape.index(None)

    def row(self, slot: int) -> torch.Tensor:
        """Return a view of the row of a slot."""
        return self.tensor.select(self.dim, slot)

    def clear(self, slot: int) -> None:
        """Fill the row of a slot with the initial state of a session."""
        self.row(slot).fill_(self.spec.fill_value)

    def copy(self, source: int, target: int, used: int | None) -> int:
        """Copy the row of a slot to another slot, and return the number of copied bytes.

        Args:
            source: Slot to copy from.
            target: Slot to copy to.
            used: Number of positions in use; None means all. Later positions are cleared.
        """
        from_row, to_row = self.row(source), self.row(target)
        dim = self.spec.positions if isinstance(self.spec, RawBank) else None
        if used is not None and dim is not None:
            dim -= dim > self.dim  # a row has no dimension of slots
            # For a ring buffer, ``used`` may exceed the number of positions.
            used = min(used, from_row.shape[dim] - 1)
            to_row.narrow(dim, used, from_row.shape[dim] - used).fill_(self.spec.fill_value)
            from_row, to_row = from_row.narrow(dim, 0, used), to_row.narrow(dim, 0, used)
        to_row.copy_(from_row)
        return from_row.numel() * from_row.element_size()

    def take(self, index: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows with the given indices."""
        return self.tensor.index_select(self.dim, index)

    def put(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows, which must have the bank's dtype and may be a view of the bank."""
        tensor = self.tensor
        if storage_of(rows) == storage_of(tensor):
            rows = rows.clone()
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            # torch does not implement index_copy_ for float8 dtypes.
            tensor, rows = tensor.view(torch.uint8), rows.view(torch.uint8)
        tensor.index_copy_(self.dim, index, rows)

    def may_change_other_rows(self, written: torch.Tensor, operation: str) -> bool:
        """Return whether a write may change rows of other sessions.

        In-place torch operations that take no index write every row of the tensor. If an operation
        of another library receives a whole bank, it is assumed to write only the step's slots.
        """
        is_indexed = operation.startswith(_INDEXED)
        if operation.startswith("aten::") and not is_indexed:
            return True
        if is_indexed and written.numel() == self.tensor.numel():
            return False
        whole = self.tensor.shape[self.dim], self.tensor.stride(self.dim)
        return whole not in zip(written.shape, written.stride(), strict=True)


class SlotRows:
    """The rows of a step's sessions; the step receives them in place of its slots.

    ``rows["hidden"]`` reads the rows of a bank, and ``rows["hidden"] = value`` writes them. Reading
    returns a copy of the rows, or a view of the bank if sessions are compact. The step must not
    write to such a view in place.

    Args:
        state: State that contains the banks.
        index: Bank rows to write (B,), one for each row of the step: slots or the sink.
        watch: Watch that checks the step's writes to the rows, or None.

    Attributes:
        index: The given index. To write parts of rows, use ``index`` with ``bank``:
            ``rows.bank("keys")[rows.index, :, positions] = keys``.
    """

    def __init__(
        self, state: SlotState, index: torch.Tensor, watch: RowWatch | None = None
    ) -> None:
        self._state, self._watch = state, watch
        self.index: torch.Tensor = index

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the rows of a bank, one for each row of the step."""
        state, number = self._state, self.index.shape[0]
        bank = state.get_bank(name)
        if state.compact and number <= state.num_slots:
            return bank.tensor.narrow(bank.dim, 0, number)
        index = self.index
        if state.compact:  # a capture size above the number of slots: add blank rows
            index = torch.arange(number, device=index.device)
        taken = bank.take(index.clamp(max=state.num_slots))
        if self._watch is not None:
            self._watch.note_read(name, taken)
        return taken

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Write the rows of a bank.

        Raises:
            InputError: The value is not a tensor with the dtype and shape of the rows.
        """
        bank = self._state.get_bank(name)
        if not isinstance(value, torch.Tensor):
            got = type(value).__name__
            raise InputError(
                name, f"Rows of {name!r} must be a tensor, got {got}. Assign a tensor."
            )
        want = list(bank.tensor.shape)
        want[bank.dim] = self.index.shape[0]
        if list(value.shape) != want:
            raise InputError(
                name,
                f"Rows of {name!r} must have shape {tuple(want)} in this step, "
                f"got {tuple(value.shape)}. Assign as many rows as the step has, including "
                f"padding, or write parts of rows: slots.bank({name!r})[slots.index, ...] = value.",
            )
        if value.dtype is not bank.tensor.dtype:
            raise InputError(
                name,
                f"Rows of {name!r} must be {bank.tensor.dtype}, got {value.dtype}. Convert them "
                f"with value.to({bank.tensor.dtype}).",
            )
        bank.put(self.index, value)
        if self._watch is not None:
            self._watch.note_assigned(name, value)

    def bank(self, name: str) -> torch.Tensor:
        """Return the tensor of a bank, to write parts of its rows at ``index``."""
        return self._state.get_bank(name).tensor


@refuses_unknown_names
class SlotState:
    """The state of sessions that join and leave, and the slot of each session.

    Runners declare the state as an input, and calls pass slots by the name of this input. A session
    is identified by any hashable value.

    Args:
        banks: One ``StaticInput`` per kind of state: the shape (None for the slots), the dtype, and
            the initial state as the fill value. Alternatively, one ``RawBank`` per kind of state.
            With ``RawBank``, slots are not an input, and runners declare
            ``state=slots.step_state``.
        num_slots: Maximum number of sessions.
        compact: Whether to keep the sessions in slots 0 to n-1, by moving the last session into any
            gap. Steps then read the banks as views, and each step must use the first slots, in
            order. Use compact sessions for banks that are too large to gather in every step, if
            steps usually serve all sessions.
        host: Whether calls pass slots as a list, an array or a CPU tensor, which is checked on the
            host. If False, calls pass a device tensor, and each step waits until the tensor can be
            checked.
        device: Device of the banks; None means torch's default device.

    Attributes:
        num_slots: The given maximum number of sessions.
        compact: Whether sessions are kept in slots 0 to n-1.
        is_raw: Whether the banks are ``RawBank`` objects.
        static_input: Declaration of the slots as an input of runners.

    Raises:
        ConfigError: There are no banks, a bank has no dimension of slots, or a setting is invalid.

    Thread safety: all methods may be called from any thread, even while another thread captures.
    Operations on sessions are queued on the current stream, like steps. Wait for a submitted step
    before its sessions leave, move or are cleared.
    """

    def __init__(
        self,
        banks: Mapping[str, StaticInput],
        num_slots: int,
        *,
        compact: bool = False,
        host: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        self.num_slots: int = check_count(num_slots, "num_slots")
        self.compact: bool = check_flag(compact, "compact")
        _check_banks(banks)
        place = _device_of(device)
        self.is_raw: bool = isinstance(next(iter(banks.values())), RawBank)
        num_rows = self.num_slots if self.is_raw else self.num_slots + 2
        with inference_mode(False):
            self._banks = {
                name: Bank(spec.full(num_rows, place), spec) for name, spec in banks.items()
            }
        self.static_input: SlotInput = SlotInput(
            (None,), torch.int64, fill=self.num_slots + 1, host=check_flag(host, "host")
        )
        numpy = numpy_module()
        self._slots: dict[Hashable, int] = {}
        # Whether a change has begun but not ended; all attributes but ``_slots`` may then be wrong.
        self._is_changing = False
        self._is_taken = numpy.zeros(self.num_slots, dtype=bool)
        self._numbers = numpy.arange(self.num_slots)
        self._free: list[int] = list(range(self.num_slots - 1, -1, -1))
        # Free slots lent to dummy rows during a proof.
        self._lent: set[int] = set()
        self._watches: dict[int, RowWatch] = {}  # by thread
        lock = threading.RLock()
        free_in_children(lock)
        self._changed = threading.Condition(lock)
        self._declared = (dict(banks), self.num_slots, compact, host, device)

    def __repr__(self) -> str:
        banks = ", ".join(self._banks)
        return f"<SlotState of {banks}: {len(self)} of {self.num_slots} slots in use>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the declaration, without sessions."""
        return _remake, self._declared

    # -- sessions -----------------------------------------------------------------------

    def join(self, session: Hashable) -> int:
        """Assign a slot with the initial state to a session, and return the slot.

        Raises:
            DescriptorError: The session already has a slot or is not hashable, or no slot is free.
        """
        with self._unchanged():
            if session in self:
                hint = "Get its slot with slots_of([session]), or call leave(session) first."
                raise DescriptorError(
                    "session",
                    session,
                    "a session without a slot",
                    hint,
                    message=f"Session {format_value(session)} already has a slot.",
                )
            while not self._free and self._lent:
                self._changed.wait()
            if not self._free:
                raise DescriptorError(
                    "session",
                    session,
                    f"one of at most {counted(self.num_slots, 'session')} (num_slots)",
                    "Call leave() for another session, or increase num_slots.",
                    message=f"No slot is free for session {format_value(session)}; "
                    f"num_slots is {self.num_slots}.",
                )
            self._is_changing = True
            slot = self._free.pop()
            if self.is_raw:
                self._clear([slot])
            self._put(session, slot)
            self._is_changing = False
            return slot

    def leave(
        self, *sessions: Hashable, used: Mapping[Hashable, int] | None = None
    ) -> list[SlotMove]:
        """Free and clear the slots of sessions; slots of raw banks are cleared in ``join``.

        Args:
            sessions: Sessions that leave.
            used: For each remaining session, the number of positions in use, if known. A move then
                copies only these positions of a ``RawBank``.

        Returns:
            The moves that closed gaps between compact sessions; as few as possible.

        Raises:
            DescriptorError: A session has no slot or is passed twice, or ``used`` contains an
                invalid number of positions. After this error, all sessions keep their slots.
        """
        for session, number in (used or {}).items():
            if whole_number(number) is None or number < 0:
                hint = "Pass the number of positions that the session uses, or omit the session."
                raise DescriptorError(f"used[{session!r}]", number, "a non-negative integer", hint)
        with self._unchanged():
            slots = self.slots_of(sessions)
            if len(set(slots)) < len(slots):
                hint = "Pass each session once."
                raise DescriptorError("sessions", sessions, "distinct", hint)
            self._is_changing = True
            for session, slot in zip(sessions, slots, strict=True):
                del self._slots[session]
                self._is_taken[slot] = False
            moves = self._close_gaps(used or {}) if self.compact else []
            self._clear_left({*slots, *(one.source for one in moves)})
            self._find_free()
            self._is_changing = False
            return moves

    def move(self, session: Hashable, slot: int) -> SlotMove:
        """Move a session to a free slot, and free its old slot; return the move.

        Raises:
            DescriptorError: The session has no slot, the slot is not free, or sessions are compact.
        """
        with self._unchanged():
            (source,) = self.slots_of([session])
            if self.compact:
                hint = (
                    "Compact sessions move only when other sessions leave. To move this session, "
                    "create the SlotState without compact."
                )
                raise DescriptorError(
                    "slot",
                    slot,
                    f"{source}, its current slot",
                    hint,
                    message=f"Session {format_value(session)} cannot be moved to slot "
                    f"{format_value(slot)}, because sessions are compact.",
                )
            while slot in list(self._lent):  # an invalid slot may be unhashable
                self._changed.wait()
            if slot not in self._free:
                hint = "Choose a slot that slots_of(slots.sessions) does not contain."
                raise DescriptorError(
                    "slot", slot, f"a free slot from 0 to {self.num_slots - 1}", hint
                )
            self._is_changing = True
            made = self._move(session, source, slot)
            self._clear_left([source])
            self._find_free()
            self._is_changing = False
            return made

    def clear(self, session: Hashable) -> None:
        """Reset a session's rows to the initial state.

        Raises:
            DescriptorError: The session has no slot.
        """
        with self._unchanged():
            self._clear(self.slots_of([session]))

    def slots_of(self, sessions: Iterable[Hashable]) -> list[int]:
        """Return the slots of sessions, for a step's input.

        Raises:
            DescriptorError: A session has no slot or is not hashable.
        """
        session, slots = None, []
        try:
            for session in sessions:
                slots.append(self._slots[session])
            return slots
        except TypeError:
            if isinstance(sessions, Iterable):
                raise _unhashable(session) from None
            raise _not_a_list(sessions) from None
        except KeyError:
            if isinstance(sessions, str):  # one session was passed instead of a list
                raise _not_a_list(sessions) from None
            hint = "Call join(session) first."
            raise DescriptorError(
                "session",
                session,
                "a session with a slot",
                hint,
                message=f"Session {format_value(session)} has no slot.",
            ) from None

    @property
    def sessions(self) -> tuple[Hashable, ...]:
        """The sessions that have slots, ordered by slot."""
        return tuple(sorted(self._slots, key=self._slots.__getitem__))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, session: Hashable) -> bool:
        try:
            return session in self._slots
        except TypeError:
            raise _unhashable(session) from None

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.sessions)

    def __getitem__(self, session: Hashable) -> dict[str, torch.Tensor]:
        """Return views of the rows of a session, by bank; valid until the session moves or leaves.

        Raises:
            DescriptorError: The session has no slot.
        """
        (slot,) = self.slots_of([session])
        return {name: bank.row(slot) for name, bank in self._banks.items()}

    # -- memory -------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the banks."""
        return next(iter(self._banks.values())).tensor.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of all banks."""
        return tuple(bank.tensor for bank in self._banks.values())

    @property
    def num_bytes(self) -> int:
        """The size of all banks in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def get_bank(self, name: str) -> Bank:
        """Return a bank.

        Raises:
            DescriptorError: There is no bank with this name.
        """
        try:
            return self._banks[name]
        except (KeyError, TypeError):
            known = ", ".join(self._banks)
            hint = "Correct the name, or declare the bank in SlotState(banks=...)."
            raise DescriptorError("bank", name, f"one of: {known}", hint) from None

    @property
    def step_state(self) -> StepState:
        """The state that steps change in raw banks, for ``GraphRunner(state=...)``."""
        raw = [
            (bank.tensor, bank.spec.positions is None)
            for bank in self._banks.values()
            if isinstance(bank.spec, RawBank) and not bank.spec.is_read_only
        ]
        return StepState(
            tensors=[tensor for tensor, in_place in raw if in_place],
            scratch=[tensor for tensor, in_place in raw if not in_place],
        )

    def rows(self, index: torch.Tensor) -> SlotRows:
        """Return the rows that a step receives in place of its slots.

        Args:
            index: Slots of the step (B,).
        """
        return SlotRows(self, index, self._watches.get(threading.get_ident()))

    @contextmanager
    def lent(self, number: int, wait: Callable[[], None]) -> Iterator[SavedRows | None]:
        """Lend free slots to the dummy rows of a proof, and clear the slots afterwards.

        Yields the saved rows of the slots, or None if fewer than ``number`` slots are free. A
        session that needs a lent slot waits until the slot is returned.

        Args:
            number: Number of slots to lend.
            wait: Function that waits for the current stream, because the next step that uses a lent
                slot may run on another stream.
        """
        found: list[int] = []
        try:
            try:
                with self._unchanged():
                    if len(self._free) >= number:
                        found = self._free[:number]
                        self._lent.update(found)
                        self._find_free()
                yield SavedRows(self, torch.tensor(found, device=self.device)) if found else None
            finally:
                self._take_back(found, wait)
        finally:  # repeated, because a signal handler may have raised in the first call
            self._take_back(found, wait)

    # -- checks -------------------------------------------------------------------------

    def check_slots(self, slots: Any, name: str) -> None:
        """Check the slots of a step.

        Args:
            slots: Slots of the step, an array of int64 (B,).
            name: Name of the input, for messages.

        Raises:
            DescriptorError: A slot is free, out of range or passed twice; or sessions are compact
                and the step does not use the first slots, in order.
        """
        number = len(slots)
        if self._is_changing:
            with self._unchanged():
                pass
        if self.compact:
            if number <= len(self._slots) and bool((slots == self._numbers[:number]).all()):
                return
        elif not number or (slots.max() < self.num_slots and self._are_sessions(slots)):
            return
        if bool((slots == self.static_input.fill).all()):
            return  # a calibration run, which has only dummy rows
        raise self._slots_error(slots.tolist(), name)

    def _are_sessions(self, slots: Any) -> bool:
        """Return whether slots, all below ``num_slots``, belong to distinct sessions."""
        try:
            counts = numpy_module().bincount(slots, minlength=self.num_slots)
        except ValueError:  # a slot is negative
            return False
        return not bool((counts > self._is_taken).any())

    def _slots_error(self, slots: list[int], name: str) -> DescriptorError:
        """Return the error for the first invalid slot of a step."""
        seen: set[int] = set()
        for row, slot in enumerate(slots):
            field = f"{name}[{row}]"
            if not 0 <= slot < self.num_slots:
                allowed = f"a slot from 0 to {self.num_slots - 1}"
                return DescriptorError(field, slot, allowed, _SLOTS_OF)
            if not self._is_taken[slot]:
                hint = f"This slot is free. {_SLOTS_OF}"
                return DescriptorError(field, slot, "the slot of a session", hint)
            if slot in seen:
                hint = (
                    "Each session can have only one row in a step. Pass distinct sessions to "
                    "slots_of()."
                )
                allowed = f"a different slot than {name}[{slots.index(slot)}]"
                return DescriptorError(field, slot, allowed, hint)
            seen.add(slot)
        row = next(row for row, slot in enumerate(slots) if row != slot)
        return DescriptorError(
            f"{name}[{row}]",
            slots[row],
            f"{row} for compact sessions",
            "A step of compact sessions must use the first slots, in order. Pass "
            f"list(range({len(slots)})), or create the SlotState without compact.",
        )

    def watch_rows(self) -> RowWatch:
        """Return a context that watches a step's writes to rows that the step has read."""
        return RowWatch(self._banks, self._watches)

    # -- internals ----------------------------------------------------------------------

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Hold the lock, and first complete a change that an exception has interrupted.

        A signal handler may raise at any instruction. Each change updates ``_slots`` one session at
        a time, so ``_slots`` is always valid. The other attributes are rebuilt from it, and free
        slots are cleared, except lent slots and slots of raw banks.
        """
        with self._changed:
            if self._is_changing:
                self._is_taken[:] = False
                self._is_taken[list(self._slots.values())] = True
                if self.compact:
                    self._close_gaps({})
                free = (~self._is_taken).nonzero()[0].tolist()
                self._clear_left(slot for slot in free if slot not in self._lent)
                self._find_free()
                self._is_changing = False
            yield

    def _put(self, session: Hashable, slot: int) -> None:
        self._slots[session] = slot
        self._is_taken[slot] = True

    def _take_back(self, slots: list[int], wait: Callable[[], None]) -> None:
        """Clear lent slots and make them free; do nothing if they are not lent."""
        with self._changed:
            if self._lent.isdisjoint(slots):
                return
            self._clear(slots)
            wait()
            self._is_changing = True
            self._lent.difference_update(slots)
            self._find_free()
            self._is_changing = False

    def _find_free(self) -> None:
        """Update the list of free slots, in descending order, and wake waiting threads."""
        free = (~self._is_taken).nonzero()[0][::-1].tolist()
        self._free = [slot for slot in free if slot not in self._lent] if self._lent else free
        self._changed.notify_all()

    def _close_gaps(self, used: Mapping[Hashable, int]) -> list[SlotMove]:
        """Move the last sessions into earlier gaps; return the moves."""
        number = len(self._slots)
        gaps = [slot for slot in range(number) if not self._is_taken[slot]]
        late = [(slot, session) for session, slot in self._slots.items() if slot >= number]
        moves = []
        for (source, session), target in zip(sorted(late, key=itemgetter(0)), gaps, strict=True):
            moves.append(self._move(session, source, target, used.get(session)))
        return moves

    def _move(
        self, session: Hashable, source: int, target: int, used: int | None = None
    ) -> SlotMove:
        num_bytes = _without_gradients(
            lambda: sum(bank.copy(source, target, used) for bank in self._banks.values())
        )
        self._put(session, target)
        self._is_taken[source] = False
        return SlotMove(session, source, target, num_bytes)

    def _clear_left(self, slots: Iterable[int]) -> None:
        """Clear the given slots that are now free, unless ``join`` will clear them."""
        if not self.is_raw:  # padding may change a free raw slot, so join() clears it
            self._clear(slot for slot in slots if not self._is_taken[slot])

    def _clear(self, slots: Iterable[int]) -> None:
        def clear() -> None:
            for slot in slots:
                for bank in self._banks.values():
                    bank.clear(slot)

        _without_gradients(clear)


class RowWatch:
    """Context that rejects in-place writes of a step to rows that the step has read.

    A write to a bank is rejected before it happens if it may change rows of other sessions. A write
    to a copy of rows is rejected if the step does not assign the copy. The context must be entered
    in the thread that runs the step.

    Args:
        banks: Banks whose rows are watched, by name.
        watches: Active watches by thread.
    """

    def __init__(self, banks: Mapping[str, Bank], watches: dict[int, RowWatch]) -> None:
        self._banks = {storage_of(bank.tensor): (name, bank) for name, bank in banks.items()}
        self._watches = watches
        self._copies: dict[int, tuple[str, StorageWeakRef]] = {}
        # The operation that changed a copy, by the storage of the copy.
        self._changed: dict[int, str] = {}

    def __enter__(self) -> None:
        self._watches[threading.get_ident()] = self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        del self._watches[threading.get_ident()]
        if kind is None:
            self._check_assigned()

    def check_write(self, written: torch.Tensor, operation: str) -> None:
        """Check an in-place write before it happens.

        Raises:
            CaptureError: The operation may change rows of other sessions.
        """
        storage = storage_of(written)
        name, bank = self._banks.get(storage, ("", None))
        if bank is not None and bank.may_change_other_rows(written, operation):
            raise CaptureError(
                f"The step writes rows of {name!r} in place, with {operation}. In a padded step, "
                "some of these rows may belong to other sessions. Assign whole rows with "
                f"slots[{name!r}] = value, or parts of rows with "
                f"slots.bank({name!r})[slots.index, ...] = value.",
                reason="slot_written",
            )
        if self._is_copy(storage):
            self._changed[storage] = operation

    def note_read(self, name: str, taken: torch.Tensor) -> None:
        """Record that the step has read a copy of rows.

        Raises:
            CaptureError: An earlier copy was changed but not assigned.
        """
        self._check_assigned(name)
        self._copies[storage_of(taken)] = name, StorageWeakRef(taken.untyped_storage())

    def note_assigned(self, name: str, value: torch.Tensor) -> None:
        """Record that the step has assigned rows.

        A value that is not itself a copy of rows may have been computed from any changed copy.
        Assigning it therefore counts as assigning all changed copies of the bank's rows.

        Raises:
            CaptureError: The value is a copy, and a different copy was changed.
        """
        storage = storage_of(value)
        is_copy = self._is_copy(storage) and self._copies[storage][0] == name
        for changed in [one for one in self._changed if self._copies[one][0] == name]:
            if changed == storage or not is_copy:
                del self._changed[changed]
        self._check_assigned(name)

    def _is_copy(self, storage: int) -> bool:
        _, reference = self._copies.get(storage, ("", None))
        return reference is not None and not reference.expired()

    def _check_assigned(self, of: str | None = None) -> None:
        """Reject copies that were changed but not assigned; ``of`` names a single bank to check."""
        for storage, operation in self._changed.items():
            name, _ = self._copies[storage]
            if of is not None and name != of:
                continue
            raise CaptureError(
                f"The step changes rows of {name!r} in place, with {operation}, but does not "
                "assign them. The rows are a copy, so the change would be lost. Assign the "
                f"changed rows with slots[{name!r}] = rows, or change a clone() if the change is "
                "temporary.",
                reason="slot_written",
            )


class SavedRows:
    """Saved rows of a step's sessions, to run the step twice from the same state.

    Args:
        state: State that contains the banks.
        index: Slots of the step (B,).

    Attributes:
        index: The given slots.
        saved: Rows of each bank, by the text that names them in messages.
    """

    def __init__(self, state: SlotState, index: torch.Tensor) -> None:
        self._state = state
        self.index: torch.Tensor = index
        self.saved: dict[str, torch.Tensor] = self.now()

    def now(self) -> dict[str, torch.Tensor]:
        """Return copies of the current rows of each bank, with the keys of ``saved``."""
        return {
            f"rows of {name!r}": bank.take(self.index) for name, bank in self._state._banks.items()
        }

    def restore(self) -> None:
        """Restore the rows."""
        banks = self._state._banks.values()
        for bank, rows in zip(banks, self.saved.values(), strict=True):
            bank.put(self.index, rows)


def _without_gradients(run: Callable[[], _T]) -> _T:
    """Call a function in no-grad mode, and return its result."""
    had_grad = torch.is_grad_enabled()
    try:  # C calls, because a signal could interrupt a Python context manager
        torch._C._set_grad_enabled(False)
        return run()
    finally:
        torch._C._set_grad_enabled(had_grad)


def _not_a_list(sessions: Any) -> DescriptorError:
    hint = "Pass a single session as slots_of([session])."
    return DescriptorError("sessions", sessions, "a list of sessions", hint)


def _unhashable(session: Any) -> DescriptorError:
    hint = "Identify the session by a number or a string."
    return DescriptorError("session", session, "a hashable value", hint)


def _remake(
    banks: Mapping[str, StaticInput], num_slots: int, compact: bool, host: bool, device: Any
) -> SlotState:
    return SlotState(banks, num_slots, compact=compact, host=host, device=device)


def _device_of(device: Any) -> torch.device:
    """Return the device of the banks.

    Raises:
        ConfigError: torch cannot create a tensor on the device.
    """
    try:
        place = torch.get_default_device() if device is None else torch.device(device)
        torch.empty(0, device=place)
    # torch raises AssertionError if it was built without CUDA.
    except (RuntimeError, TypeError, AssertionError) as error:
        allowed = "a device that torch can use here"
        raise ConfigError("device", device, allowed, str(error).partition("\n")[0]) from error
    return place


def _check_banks(banks: Any) -> None:
    if not isinstance(banks, Mapping) or not banks:
        raise ConfigError(
            "banks",
            banks,
            "a dictionary of StaticInputs by name, with at least one bank",
            "Declare one bank per kind of state, such as "
            '{"hidden": StaticInput((None, 128), "float32")}.',
        )
    for name, spec in banks.items():
        if not isinstance(name, str):
            raise ConfigError("name of a bank", name, "a string")
        if not isinstance(spec, StaticInput) or spec.batch_dim is None or spec.named or spec.host:
            raise ConfigError(
                f"banks[{name!r}]",
                spec,
                "a device StaticInput with a None dimension for the slots and no named axes",
                'Declare it as StaticInput((None, 128), "float32"), without host=True.',
            )
        if isinstance(spec, RawBank):
            _check_raw_bank(name, spec)
    if len({isinstance(spec, RawBank) for spec in banks.values()}) > 1:
        hint = "Declare the StaticInput banks in a separate SlotState."
        raise ConfigError("banks", sorted(banks), "all RawBank or all StaticInput", hint)


def _check_raw_bank(name: str, spec: RawBank) -> None:
    dim = spec.positions
    allowed = [one for one, size in enumerate(spec.shape) if size is not None]
    if dim is not None and dim not in allowed:
        hint = "Pass the dimension of positions, or omit it if steps change whole rows."
        dims = f"one of the dimensions {allowed}"
        if not allowed:
            dims, hint = (
                "None, because rows are scalars",
                "Add a dimension of positions to the shape.",
            )
        raise ConfigError(f"banks[{name!r}].positions", dim, dims, hint)
    if spec.is_read_only and dim is not None:
        raise ConfigError(
            f"banks[{name!r}].positions",
            dim,
            "None for a read-only bank",
            "Omit positions or, if steps write to the bank, omit is_read_only.",
        )
