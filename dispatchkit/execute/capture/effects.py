"""What Python state a step changes, and what that means for its graphs.

Warmups, captures and measurements run a step for nothing, and a replay runs no Python at all. Both
are right only for a step that leaves Python state as it is. So whatever changes in such a run is
put back, and the step is then told apart by three runs on dummy rows:

- *a cache*: a second run changes nothing, computes the same, and a rebuild from other rows is
  bit for bit the same. It is kept, since the graph reads it.
- *a first call*: a second run changes nothing, but computed something else or from other state.
  The next call of the caller runs eager, and the key is captured after it.
- *Python state*: every run changes it. Such a step always runs eager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from dispatchkit.dispatch import Reason
from dispatchkit.errors import CaptureError
from dispatchkit.execute.io.structure import is_immutable, is_same_value, leaves_of
from dispatchkit.execute.step.breaks import is_eager_region
from dispatchkit.execute.step.pieces import Piece
from dispatchkit.execute.step.python_state import (
    MISSING,
    Entry,
    PythonState,
    is_plain,
    is_same,
    restore,
)
from dispatchkit.execute.step.state import Snapshot
from dispatchkit.execute.step.values import ValueWatch

#: How often a value may be replaced before its step is not captured any more.
MAX_REPLACED: Final = 8
_MAX_NAMED: Final = 3
_CACHE: Final = "cache"
_NOT_OURS: Final = "not the step's"
_NOISY = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class PythonChangedError(CaptureError):
    """A run changed Python state, which has been put back.

    Args:
        entries: What it changed, before that is put back.
    """

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self._then = [entry.now() for entry in entries]
        super().__init__(
            f"The step changed {named(entries)} while it was captured, which a replay would not.",
            reason=Reason.PYTHON_STATE,
        )

    def redo(self) -> None:
        """Set the entries to what they were changed to."""
        for entry, value in zip(self.entries, self._then, strict=True):
            entry.set(value)


class PythonEffects:
    """Contains the Python effects of the runs of one step.

    Args:
        pieces: Those of the step: their functions are where its Python state is reached from.
        calls_eager: In PIECEWISE, functions under ``eager_region`` are no part of its graphs.
    """

    def __init__(self, pieces: Sequence[Piece], *, calls_eager: bool = False) -> None:
        self._pieces, self._calls_eager = tuple(pieces), calls_eager
        # What is reached by the whole step, and by graph pieces alone; what watches the values.
        self._states: dict[bool, PythonState] = {}
        self._watches: dict[bool, ValueWatch] = {}
        # Within ``contained``: whether graphs alone count.
        self._graphs_alone: bool | None = None
        self._replaced: Counter[str] = Counter()
        # Entries that the step was seen to change, by container and key.
        self._changed: dict[tuple[int, Any], Entry] = {}

    def forget(self) -> None:
        """Look anew at what the step reaches: it may be something else from now on."""
        self._states.clear()
        self._watches.clear()

    def _reach(self, *, graphs_alone: bool = False) -> PythonState:
        """Return what the step, or its graph pieces, reach now."""
        pieces = [one for one in self._pieces if one.is_graph or not graphs_alone]
        leaves_out = graphs_alone and self._calls_eager
        roots = {piece.name: piece.fn for piece in pieces}
        return PythonState(roots, is_left_out=is_eager_region if leaves_out else None)

    def state(self, *, graphs_alone: bool = False) -> PythonState:
        """Return what the step reaches, as it was when a capture last looked (``refresh``).

        Args:
            graphs_alone: Only what its graph pieces reach.
        """
        if graphs_alone not in self._states:
            self._states[graphs_alone] = self._reach(graphs_alone=graphs_alone)
        return self._states[graphs_alone]

    def watch(self, *, graphs_alone: bool = False) -> ValueWatch:
        """Return what watches the values that a graph made now has built in.

        Args:
            graphs_alone: Eager pieces read their values anew at each replay.
        """
        if graphs_alone not in self._watches:
            read = self.state(graphs_alone=graphs_alone)
            self._watches[graphs_alone] = ValueWatch(read, self._changed_before())
        return self._watches[graphs_alone]

    def note_replaced(self, entries: Iterable[Entry]) -> None:
        """Count entries that were found to be replaced after a capture."""
        self._replaced.update(str(entry) for entry in entries)
        self.forget()

    def refresh(self) -> bool:
        """Return whether what the step reaches is another than at the last capture.

        Everything is compared, which takes milliseconds for a large model: once for each capture.
        """
        known = self._states.get(False)
        if known is not None and known.is_current():
            return False
        self.forget()
        return True

    def _changed_before(self) -> tuple[Entry, ...]:
        """Return the entries that the step changed and now leaves alone, as they are now."""
        wanted = self._changed
        if not wanted:
            return ()
        return tuple(
            entry
            for entry in self.state().values_read()
            if (id(entry.record.target), entry.key) in wanted
        )

    @contextmanager
    def contained(self, *, graphs_alone: bool = False) -> Iterator[None]:
        """Put back what is changed in between.

        Args:
            graphs_alone: Eager pieces may change Python state: they run at each replay.

        Raises:
            PythonChangedError: There was something.
        """
        if often := [path for path, count in self._replaced.items() if count > MAX_REPLACED]:
            raise CaptureError(
                f"{often[0]} was replaced more than {MAX_REPLACED} times since it was captured "
                "first: no graph lasts. Write it in place (tensor.copy_(...)), or give it as an "
                "input.",
                reason=Reason.PYTHON_STATE,
            )
        before = self.state()
        if graphs_alone:
            self.state(graphs_alone=True)  # before anything is changed
        self._graphs_alone = graphs_alone
        changed: tuple[Entry, ...] = ()
        try:
            yield
            changed = self.check_run()
        except BaseException:
            changed = before.changes()
            raise
        finally:
            self._graphs_alone = None
            if changed:
                restore(changed)
                self.forget()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what is changed in between, whatever that means: no graph is made of it."""
        before = self.state()
        try:
            yield
        finally:
            if changed := before.changes():
                restore(changed)

    def check_run(self) -> tuple[Entry, ...]:
        """Look at what one run has changed, before another one changes it back.

        Returns:
            What eager pieces have changed.

        Raises:
            PythonChangedError: There was something that no replay would change.
        """
        if self._graphs_alone is None:
            return ()
        changed = ours = self.state().changes()
        if changed and self._graphs_alone:
            ours = self.state(graphs_alone=True).changes()
        if ours:
            raise PythonChangedError(ours)
        return changed

    def check(
        self,
        error: PythonChangedError,
        snapshot: Snapshot,
        run: Callable[[], Any],
        run_on_other_rows: Callable[[], Any],
    ) -> None:
        """Find out what a step's Python effects mean; return if the step can be captured.

        That is where they made a cache, which is kept now, and where another thread made the
        change, which is then made again.

        Args:
            error: What a run was seen to change.
            snapshot: Of the tensors that the step is known to write.
            run: Runs the step on dummy rows.
            run_on_other_rows: Runs it on others.

        Raises:
            CaptureError: The step has Python state, or this was its first call.
        """
        before = self._reach()
        try:
            found = self._find(before, snapshot, run, run_on_other_rows)
        except BaseException:
            restore(before.changes())
            raise
        if found in (_CACHE, _NOT_OURS):
            self.forget()
            if found == _NOT_OURS:
                error.redo()
            return
        restore(before.changes())
        snapshot.restore()
        self.forget()
        changed = error.entries
        self._changed |= {(id(one.record.target), one.key): one for one in changed}
        if found == Reason.FIRST_CALL:
            raise CaptureError(
                f"The first call of the step changes {named(changed)}, and computes something else "
                "than later ones. The next call runs eager; the key is captured after it.",
                reason=Reason.FIRST_CALL,
            )
        raise CaptureError(
            f"Each call of the step changes {named(changed)}, which a replay would not. Keep such "
            "state in a tensor that the step writes in place (self.h.copy_(...), a buffer), or "
            "change it outside of the step; until then every step runs eager.",
            reason=Reason.PYTHON_STATE,
        )

    def _find(
        self,
        before: PythonState,
        snapshot: Snapshot,
        run: Callable[[], Any],
        run_on_other_rows: Callable[[], Any],
    ) -> str:
        """Return the reason that a step's Python effects are; or what else they are."""
        snapshot.restore()
        first = _copies(leaves_of(run()))
        made = before.changes()
        if not made:
            return _NOT_OURS
        values = [_content(entry.now()) for entry in made]
        written = snapshot.contents()
        snapshot.restore()
        after = self._reach()
        second = _copies(leaves_of(run()))
        if after.changes():
            return Reason.PYTHON_STATE
        is_same_result = (
            _equal(first, second)
            and _equal(written, snapshot.contents())
            and _equal(values, [_content(entry.now()) for entry in made])
        )
        if not is_same_result:
            return Reason.FIRST_CALL
        snapshot.restore()
        restore(made)
        run_on_other_rows()
        if not _equal(values, [_content(entry.now()) for entry in made]):
            return Reason.FIRST_CALL
        snapshot.restore()
        return _CACHE


def named(entries: Sequence[Entry]) -> str:
    """Return some entries in words, with class, file and line."""
    more = f" and {len(entries) - _MAX_NAMED} more" if len(entries) > _MAX_NAMED else ""
    return ", ".join(str(entry) for entry in entries[:_MAX_NAMED]) + more


class _Unknown:
    """What cannot be compared; equal to nothing."""


def _content(value: Any) -> Any:
    """Return a copy of a value to compare later, deep through builtin containers."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if is_plain(value) or value is MISSING or is_immutable(value):
        return value
    if isinstance(value, dict):
        return {key: _content(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_content(one) for one in value]
    return _Unknown()


def _copies(leaves: Sequence[Any]) -> list[Any]:
    return [_content(leaf) for leaf in leaves]


def _equal(one: Any, other: Any) -> bool:
    """Return whether two copies are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bits_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return is_same(one, other) or is_same_value(one, other)


def write_noise(tensors: Iterable[torch.Tensor], *, seed: int = 0) -> None:
    """Fill floating-point tensors with noise that draws from no generator of anybody else.

    Others keep what they hold: a random index would reach memory that it must not.
    """
    for number, tensor in enumerate(tensors):
        if tensor.dtype in _NOISY:
            generator = torch.Generator(tensor.device).manual_seed(seed + number)
            tensor.normal_(generator=generator)


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bits: nan is equal to itself, zeros have signs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided or one.is_complex():
        return torch.equal(one, other)
    one, other = one.contiguous(), other.contiguous()
    if one.dim() == 0:
        one, other = one.reshape(1), other.reshape(1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
