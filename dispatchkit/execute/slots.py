"""SlotState: state that belongs to sessions, in banks with a row for each slot.

    slots = SlotState({"hidden": StaticInput((None, 128), "float32")}, num_slots=256)
    runner = GraphRunner(step, {"audio": StaticInput((None, 512), "float32"), "slots": slots})
    slots.join("caller 7")
    runner(audio=audio, slots=slots.slots_of(["caller 7"]))

A step gets its slots as an input, and reads and writes their rows (``SlotRows``) under that name.
After the slots, each bank has two more rows: the *blank* row, which always holds the initial state
of a session, and the *sink*. Padding rows read the blank row and write to the sink, as do all dummy
rows (warmup, capture, proof), so that banks are never saved around these. Free slots hold the
initial state, so joining costs nothing on the device.

Steps may instead access banks themselves (``RawBank``), such as a decoder's key-value cache. Such
banks have rows only for slots, and a slot is cleared when a session joins.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchkit.backends.capture_guard import free_in_children
from dispatchkit.backends.watching.dispatch_mode import inference_mode
from dispatchkit.errors import CaptureError, ConfigError, DescriptorError, InputError
from dispatchkit.execute.io.host_arrays import numpy_module
from dispatchkit.execute.io.static_input import StaticInput
from dispatchkit.execute.step.state import StepState, storage_of
from dispatchkit.keys.checks import check_count, check_flag, refuses_unknown_names, whole_number

_SLOTS_OF = "Pass the slots of the step's sessions: slots_of(sessions)."

#: In-place operations of torch that write chosen rows.
_INDEXED: Final = ("aten::index_", "aten::_index_put_impl_", "aten::scatter", "aten::_unsafe_index")


@attrs.frozen
class SlotInput(StaticInput):
    """The input of a step's slots; only rows of a call hold anything other than fill."""

    next_step = _SLOTS_OF


@refuses_unknown_names
@attrs.frozen
class RawBank(StaticInput):
    """A bank that steps read and write themselves, with rows only for the slots.

    The sessions of a step are in the first slots, or in slots given by a separate input. Padding
    rows must not change a session. What they change depends on the fields:

    Attributes:
        positions: The dimension of a session's positions, of which each step writes some. Padding
            rows write the last position, which is never read. Moves copy the positions in use.
            None: steps change whole rows in place, and padding rows change those of free slots.
        is_read_only: Steps do not change the bank.
    """

    positions: int | None = attrs.field(default=None, kw_only=True)
    is_read_only: bool = attrs.field(default=False, kw_only=True)


@attrs.frozen
class SlotMove:
    """A session that was moved to another slot.

    Attributes:
        session: The session.
        source: The slot it was in.
        target: The slot it is in now.
        num_bytes: Bytes copied.
    """

    session: Hashable
    source: int
    target: int
    num_bytes: int


@attrs.frozen(eq=False)
class Bank:
    """The memory of one kind of state.

    Attributes:
        tensor: All rows: one per slot, the blank row and the sink.
        spec: Its declaration.
    """

    tensor: torch.Tensor
    spec: StaticInput

    @property
    def dim(self) -> int:
        """The dimension of the slots."""
        return self.spec.shape.index(None)

    def row(self, slot: int) -> torch.Tensor:
        """Return the row of a slot, as a view."""
        return self.tensor.select(self.dim, slot)

    def clear(self, slot: int) -> None:
        """Fill the row of a slot with the initial state of a session."""
        self.row(slot).fill_(self.spec.fill_value)

    def copy(self, source: int, target: int, used: int | None) -> int:
        """Copy the row of a slot to another one; return the bytes copied.

        Args:
            source: The slot to copy.
            target: The other one.
            used: Number of its positions in use; None: all. Later positions are cleared.
        """
        from_row, to_row = self.row(source), self.row(target)
        dim = self.spec.positions if isinstance(self.spec, RawBank) else None
        if used is not None and dim is not None:
            dim -= dim > self.dim  # a row lacks the dimension of slots
            # In a full ring buffer, all positions are in use.
            used = min(used, from_row.shape[dim] - 1)
            to_row.narrow(dim, used, from_row.shape[dim] - used).fill_(self.spec.fill_value)
            from_row, to_row = from_row.narrow(dim, 0, used), to_row.narrow(dim, 0, used)
        to_row.copy_(from_row)
        return from_row.numel() * from_row.element_size()

    def take(self, index: torch.Tensor) -> torch.Tensor:
        """Return copies of rows."""
        return self.tensor.index_select(self.dim, index)

    def put(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows of the bank's dtype, which may be a view of it."""
        tensor = self.tensor
        if storage_of(rows) == storage_of(tensor):
            rows = rows.clone()
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            # torch has no such copy for them.
            tensor, rows = tensor.view(torch.uint8), rows.view(torch.uint8)
        tensor.index_copy_(self.dim, index, rows)

    def is_row_write(self, written: torch.Tensor, operation: str) -> bool:
        """Return whether a write into this memory is not to indexed rows of the whole bank.

        Other operations of torch than the indexed ones write every row, also those of other
        sessions. Operations of other libraries are taken to address rows themselves.
        """
        is_indexed = operation.startswith(_INDEXED)
        if operation.startswith("aten::") and not is_indexed:
            return True
        if is_indexed and written.numel() == self.tensor.numel():
            return False
        whole = self.tensor.shape[self.dim], self.tensor.stride(self.dim)
        return whole not in zip(written.shape, written.stride(), strict=True)


class SlotRows:
    """The rows of one step's sessions, passed to the step for its slots.

    ``rows["hidden"]`` reads the rows of a bank, ``rows["hidden"] = value`` writes them. The rows
    read are a copy or, with compact sessions, a view of the bank, which must not be written in
    place.

    Args:
        state: The banks.
        index: The row that each row of the step is written to (B,): its slot, or the sink.
        watch: Watches the step's writes to the rows.

    Attributes:
        index: The same. With ``bank`` for writes to parts of rows:
            ``rows.bank("keys")[rows.index, :, positions] = keys``.
    """

    def __init__(
        self, state: SlotState, index: torch.Tensor, watch: RowWatch | None = None
    ) -> None:
        self._state, self._watch = state, watch
        self.index: torch.Tensor = index

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the rows of a bank, B of them in the dimension of the slots."""
        state, number = self._state, self.index.shape[0]
        bank = state.get_bank(name)
        if state.compact and number <= state.num_slots:
            return bank.tensor.narrow(bank.dim, 0, number)
        index = self.index
        if state.compact:  # a capture size above the number of slots: the same rows, and blank ones
            index = torch.arange(number, device=index.device)
        taken = bank.take(index.clamp(max=state.num_slots))
        if self._watch is not None:
            self._watch.note_read(name, taken)
        return taken

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Write the rows of a bank.

        Raises:
            InputError: Their dtype or shape differs from the rows of the bank.
        """
        bank = self._state.get_bank(name)
        if not isinstance(value, torch.Tensor):
            got = type(value).__name__
            raise InputError(name, f"Rows of {name!r} must be a tensor, got a value of type {got}.")
        want = list(bank.tensor.shape)
        want[bank.dim] = self.index.shape[0]
        if list(value.shape) != want:
            raise InputError(
                name,
                f"Rows of {name!r} must have shape {tuple(want)} in this step, "
                f"got {tuple(value.shape)}.",
            )
        if value.dtype is not bank.tensor.dtype:
            raise InputError(
                name,
                f"Rows of {name!r} must be {bank.tensor.dtype}, got {value.dtype}. Convert them; "
                "nothing is converted silently.",
            )
        bank.put(self.index, value)
        if self._watch is not None:
            self._watch.note_assigned(name, value)

    def bank(self, name: str) -> torch.Tensor:
        """Return the whole of a bank, to write parts of its rows at ``index``."""
        return self._state.get_bank(name).tensor


@refuses_unknown_names
class SlotState:
    """State of sessions that join and leave: banks with a row per slot, and their assignment.

    It is declared among the inputs of one or more runners, under the name of the slots' input.
    Sessions are any hashable values.

    Args:
        banks: A ``StaticInput`` per kind of state: its shape with None for the slots, its dtype,
            and the initial state as fill. Or a ``RawBank`` each: then no input has slots, and
            runners declare ``state=slots.step_state``.
        num_slots: Maximum number of sessions.
        compact: Sessions are kept in slots 0 to n-1, by moving the last one into a gap, and steps
            read the banks as views. Each step must use the first slots, in order. This is for banks
            too large to gather in every step, and steps with all sessions.
        host: Calls pass slots as a list, an array or a CPU tensor, which is checked on the host.
            False: as a device tensor, which each step waits for to check it.
        device: The device of the banks; None for torch's default device.

    Attributes:
        num_slots: The same.
        compact: The same.
        is_raw: Steps address the banks by themselves.
        static_input: The declaration of the input in runners.

    Raises:
        ConfigError: There is no bank, a bank has no slots, or a setting is invalid.

    Thread safety: any thread may call it, and captures may run in another one. Operations on
    sessions are queued on the current stream, like steps. Wait for a submitted step before its
    sessions leave, move or are cleared.
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
        self._sessions: list[Hashable | None] = [None] * self.num_slots
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
        return f"<SlotState of {banks}: {len(self)} of {self.num_slots} slots taken>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle: the same banks, without sessions."""
        return _remake, self._declared

    # -- sessions -----------------------------------------------------------------------

    def join(self, session: Hashable) -> int:
        """Assign a slot with the initial state to a session; return its number.

        Raises:
            DescriptorError: It already has a slot, none is free, or the session is not hashable.
        """
        with self._changed:
            if session in self:
                hint = "leave() frees its slot; slots_of() returns it."
                raise DescriptorError("session", session, "one that has not joined", hint)
            while not self._free and self._lent:
                self._changed.wait()
            if not self._free:
                raise DescriptorError(
                    "session",
                    session,
                    f"one of at most {self.num_slots} sessions (num_slots)",
                    "No slot is free. Let another session leave, or raise num_slots.",
                )
            slot = self._free.pop()
            self._put(session, slot)
            if self.is_raw:
                self._clear([slot])
            return slot

    def leave(
        self, *sessions: Hashable, used: Mapping[Hashable, int] | None = None
    ) -> list[SlotMove]:
        """Free the slots of sessions and clear them.

        Args:
            sessions: The leaving sessions.
            used: Positions in use of remaining sessions, as far as known; other positions of a
                ``RawBank`` are not copied.

        Returns:
            The sessions that were moved to keep the others compact; as few as possible.

        Raises:
            DescriptorError: A session has no slot or is named twice, or ``used`` has an invalid
                number of positions; nothing is changed.
        """
        for session, number in (used or {}).items():
            if whole_number(number) is None or number < 0:
                raise DescriptorError(f"used[{session!r}]", number, "a number of positions")
        with self._changed:
            slots = self.slots_of(sessions)
            if len(set(slots)) < len(slots):
                raise DescriptorError("sessions", sessions, "named once each")
            for session, slot in zip(sessions, slots, strict=True):
                self._take(session, slot)
            moves = self._close_gaps(used or {}) if self.compact else []
            self._clear_left({*slots, *(one.source for one in moves)})
            self._find_free()
            return moves

    def move(self, session: Hashable, slot: int) -> SlotMove:
        """Move a session to a free slot, and clear its old slot.

        Raises:
            DescriptorError: The session has no slot, the slot is not free, or sessions are compact.
        """
        with self._changed:
            (source,) = self.slots_of([session])
            if self.compact:
                hint = "Compact sessions move when others leave."
                raise DescriptorError("slot", slot, f"{source}, its current slot", hint)
            while slot in list(self._lent):  # a slot that is no number may not be hashable
                self._changed.wait()
            if slot not in self._free:
                hint = "slots_of(sessions) returns those in use; the others are free."
                raise DescriptorError(
                    "slot", slot, f"a free slot from 0 to {self.num_slots - 1}", hint
                )
            made = self._move(session, source, slot)
            self._clear_left([source])
            self._find_free()
            return made

    def clear(self, session: Hashable) -> None:
        """Reset a session's rows to the initial state.

        Raises:
            DescriptorError: It has no slot.
        """
        with self._changed:
            self._clear(self.slots_of([session]))

    def slots_of(self, sessions: Iterable[Hashable]) -> list[int]:
        """Return the slots of sessions, for a step's input.

        Raises:
            DescriptorError: A session has no slot or is not hashable.
        """
        try:
            return [self._slots[session] for session in sessions]
        except TypeError:
            if isinstance(sessions, Iterable):
                raise _unhashable(sessions) from None
            hint = "One session: slots_of([session])."
            raise DescriptorError("sessions", sessions, "a list of sessions", hint) from None
        except KeyError as error:
            raise DescriptorError(
                "session", error.args[0], "one that has joined and not left", "join() it first."
            ) from None

    @property
    def sessions(self) -> tuple[Hashable, ...]:
        """The sessions with slots, in order of slots."""
        return tuple(self._sessions[slot] for slot in self._is_taken.nonzero()[0])

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
        """Return the rows of a session by bank: views, valid until it moves or leaves.

        Raises:
            DescriptorError: It has no slot.
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
        """The memory of all banks."""
        return tuple(bank.tensor for bank in self._banks.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all banks."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def get_bank(self, name: str) -> Bank:
        """Return a bank.

        Raises:
            DescriptorError: There is no bank of that name.
        """
        try:
            return self._banks[name]
        except KeyError:
            known = ", ".join(self._banks)
            raise DescriptorError("bank", name, f"one of: {known}") from None

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
        """Return the rows passed to a step for its slots (B,)."""
        return SlotRows(self, index, self._watches.get(threading.get_ident()))

    @contextmanager
    def lent(self, number: int) -> Iterator[SavedRows | None]:
        """Lend free slots to dummy rows, to compare their writes; clear them afterwards.

        Yields None if fewer are free. Sessions that need one of them wait.
        """
        with self._changed:
            found = self._free[:number] if len(self._free) >= number else []
            self._lent.update(found)
            self._find_free()
        if not found:
            yield None
            return
        try:
            yield SavedRows(self, torch.tensor(found, device=self.device))
        finally:
            with self._changed:
                self._clear(found)
                self._lent.difference_update(found)
                self._find_free()

    # -- checks -------------------------------------------------------------------------

    def check_slots(self, slots: Any, name: str) -> None:
        """Check the slots of a step.

        Args:
            slots: An array of int64 (B,).
            name: The input.

        Raises:
            DescriptorError: A slot is free, out of range or named twice; or sessions are compact
                and the slots are not the first ones in order.
        """
        number = len(slots)
        if self.compact:
            if number <= len(self._slots) and bool((slots == self._numbers[:number]).all()):
                return
        elif not number or (slots.max() < self.num_slots and self._are_sessions(slots)):
            return
        if bool((slots == self.static_input.fill).all()):
            return  # only dummy rows: a step that is being measured
        raise self._slots_error(slots.tolist(), name)

    def _are_sessions(self, slots: Any) -> bool:
        """Return whether slots, none too large, belong to distinct sessions."""
        try:
            counts = numpy_module().bincount(slots, minlength=self.num_slots)
        except ValueError:  # one is negative
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
                hint = f"This one is free. {_SLOTS_OF}"
                return DescriptorError(field, slot, "the slot of a session", hint)
            if slot in seen:
                hint = (
                    f"It is also {name}[{slots.index(slot)}], but a session has one row per step. "
                    "Pass distinct sessions to slots_of()."
                )
                return DescriptorError(field, slot, "a slot not passed before", hint)
            seen.add(slot)
        row = next(row for row, slot in enumerate(slots) if row != slot)
        return DescriptorError(
            f"{name}[{row}]",
            slots[row],
            f"{row}: steps of compact sessions use the first slots, in order",
            f"Pass range({len(slots)}), or create the SlotState without compact.",
        )

    def watch_rows(self) -> RowWatch:
        """Return a context that watches a step's writes to rows that it has read."""
        return RowWatch(self._banks, self._watches)

    # -- inside -------------------------------------------------------------------------

    def _put(self, session: Hashable, slot: int) -> None:
        self._slots[session], self._sessions[slot] = slot, session
        self._is_taken[slot] = True

    def _take(self, session: Hashable, slot: int) -> None:
        del self._slots[session]
        self._sessions[slot] = None
        self._is_taken[slot] = False

    def _find_free(self) -> None:
        """Collect the slots that sessions can take, lowest last, and wake waiting threads."""
        free = (~self._is_taken).nonzero()[0][::-1].tolist()
        self._free = [slot for slot in free if slot not in self._lent] if self._lent else free
        self._changed.notify_all()

    def _close_gaps(self, used: Mapping[Hashable, int]) -> list[SlotMove]:
        """Move the last sessions into the gaps in front of them."""
        number = len(self._slots)
        gaps = [slot for slot in range(number) if not self._is_taken[slot]]
        late = [slot for slot in range(number, self.num_slots) if self._is_taken[slot]]
        moves = []
        for source, target in zip(late, gaps, strict=True):
            session = self._sessions[source]
            moves.append(self._move(session, source, target, used.get(session)))
        return moves

    def _move(
        self, session: Hashable, source: int, target: int, used: int | None = None
    ) -> SlotMove:
        self._take(session, source)
        self._put(session, target)
        with torch.no_grad():
            num_bytes = sum(bank.copy(source, target, used) for bank in self._banks.values())
        return SlotMove(session, source, target, num_bytes)

    def _clear_left(self, slots: Iterable[int]) -> None:
        """Clear slots that sessions have left and that are free now."""
        if not self.is_raw:  # they are cleared when a session joins: padding may change them
            self._clear(slot for slot in slots if not self._is_taken[slot])

    def _clear(self, slots: Iterable[int]) -> None:
        with torch.no_grad():
            for slot in slots:
                for bank in self._banks.values():
                    bank.clear(slot)


class RowWatch:
    """Refuses in-place writes of a step to rows that it has read.

    Writes to views are refused before they happen, writes to copies only if the copies are not
    assigned. It is entered in the step's thread.

    Args:
        banks: The banks by name.
        watches: The active watches, by thread.
    """

    def __init__(self, banks: Mapping[str, Bank], watches: dict[int, RowWatch]) -> None:
        self._banks = {storage_of(bank.tensor): (name, bank) for name, bank in banks.items()}
        self._watches = watches
        self._copies: dict[int, tuple[str, StorageWeakRef]] = {}
        # The operation that changed a copy, by its storage.
        self._changed: dict[int, str] = {}

    def __enter__(self) -> None:
        self._watches[threading.get_ident()] = self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        del self._watches[threading.get_ident()]
        if kind is None:
            self._check_assigned()

    def check_write(self, written: torch.Tensor, operation: str) -> None:
        """Check an in-place write, before it is done.

        Raises:
            CaptureError: It writes to a view of rows.
        """
        storage = storage_of(written)
        name, bank = self._banks.get(storage, ("", None))
        if bank is not None and bank.is_row_write(written, operation):
            raise CaptureError(
                f"The step writes rows of {name!r} in place, by {operation}. In a padded step "
                f"they may belong to other sessions. Assign them: slots[{name!r}] = value; or "
                f"write parts of them: slots.bank({name!r})[slots.index, ...] = value.",
                reason="slot_written",
            )
        if self._is_copy(storage):
            self._changed[storage] = operation

    def note_read(self, name: str, taken: torch.Tensor) -> None:
        """Note a copy of rows.

        Raises:
            CaptureError: An earlier copy was changed and not assigned.
        """
        self._check_assigned(name)
        self._copies[storage_of(taken)] = name, StorageWeakRef(taken.untyped_storage())

    def note_assigned(self, name: str, value: torch.Tensor) -> None:
        """Note that rows are assigned.

        A value that is no copy itself may be computed from any of them.

        Raises:
            CaptureError: It is a copy, and another one was changed.
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
        """Refuse a changed copy that was not assigned, of one bank or of any."""
        for storage, operation in self._changed.items():
            name, _ = self._copies[storage]
            if of is not None and name != of:
                continue
            raise CaptureError(
                f"The step changes rows of {name!r} in place, by {operation}, and does not assign "
                f"them. They are a copy, so the change is lost. Assign them: slots[{name!r}] = "
                "rows; or clone() them first, if the change is not to be kept.",
                reason="slot_written",
            )


class SavedRows:
    """Saved rows that a step may change, to run it twice from the same state.

    Args:
        state: The banks.
        index: The slots of the step (B,).

    Attributes:
        index: The same.
        saved: The rows, keyed by the name that messages use.
    """

    def __init__(self, state: SlotState, index: torch.Tensor) -> None:
        self._state = state
        self.index: torch.Tensor = index
        self.saved: dict[str, torch.Tensor] = self.now()

    def now(self) -> dict[str, torch.Tensor]:
        """Return copies of the current rows, keyed by the name that messages use."""
        return {
            f"rows of {name!r}": bank.take(self.index) for name, bank in self._state._banks.items()
        }

    def restore(self) -> None:
        """Restore the rows."""
        banks = self._state._banks.values()
        for bank, rows in zip(banks, self.saved.values(), strict=True):
            bank.put(self.index, rows)


def _unhashable(session: Any) -> DescriptorError:
    hint = "Name it by its number or a string, and store unhashable data elsewhere."
    return DescriptorError("session", session, "hashable, as a key of a dictionary is", hint)


def _remake(
    banks: Mapping[str, StaticInput], num_slots: int, compact: bool, host: bool, device: Any
) -> SlotState:
    return SlotState(banks, num_slots, compact=compact, host=host, device=device)


def _device_of(device: Any) -> torch.device:
    """Return the device for banks, on which torch can create a tensor."""
    try:
        place = torch.get_default_device() if device is None else torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, TypeError, AssertionError) as error:  # the last: built without CUDA
        allowed = "a device that torch can use here"
        raise ConfigError("device", device, allowed, str(error).partition("\n")[0]) from error
    return place


def _check_banks(banks: Any) -> None:
    if not isinstance(banks, Mapping) or not banks:
        raise ConfigError("banks", banks, "a StaticInput for each kind of state, by name")
    for name, spec in banks.items():
        if not isinstance(spec, StaticInput) or spec.batch_dim is None or spec.named or spec.host:
            raise ConfigError(
                f"banks[{name!r}]", spec, "a StaticInput of the device, with None for the slots"
            )
        if isinstance(spec, RawBank):
            _check_raw_bank(name, spec)
    if len({isinstance(spec, RawBank) for spec in banks.values()}) > 1:
        hint = "Put the others into a separate SlotState."
        raise ConfigError("banks", sorted(banks), "either all RawBank or none", hint)


def _check_raw_bank(name: str, spec: RawBank) -> None:
    dim = spec.positions
    allowed = [one for one, size in enumerate(spec.shape) if size is not None]
    if dim is not None and dim not in allowed:
        raise ConfigError(f"banks[{name!r}].positions", dim, f"a dimension: one of {allowed}")
    if spec.is_read_only and dim is not None:
        raise ConfigError(
            f"banks[{name!r}].positions", dim, "omitted for a bank that steps do not write"
        )
