"""Detect Python state that a step changes, and handle it for its graphs.

Warmups, captures and measurements run a step on dummy rows, and a replay runs no Python at all.
Both are correct only if the step does not change Python state. So any change in such a run is
undone, and three runs on dummy rows then classify the step:

- *a cache*: a second run changes nothing and computes the same, and rebuilding it from other rows
  gives a bitwise equal cache. It is kept, since the graph reads it.
- *a first call*: a second run changes nothing, but the first computed something different or from
  other state. The caller's next call runs eager, and the key is captured after it.
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

#: How often a value may be replaced before its step is no longer captured.
MAX_REPLACED: Final = 8
_MAX_NAMED: Final = 3
_CACHE: Final = "cache"
_NOT_OURS: Final = "not the step's"
_NOISY = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class PythonChangedError(CaptureError):
    """A run changed Python state, which has been restored.

    Args:
        entries: The changed entries.
    """

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self._then = [entry.now() for entry in entries]
        super().__init__(
            f"The step changed {named(entries)} during the capture, which a replay would not do.",
            reason=Reason.PYTHON_STATE,
        )

    def redo(self) -> None:
        """Apply the changes again."""
        for entry, value in zip(self.entries, self._then, strict=True):
            entry.set(value)


class PythonEffects:
    """Undoes the Python effects of one step's runs.

    Args:
        pieces: The step's pieces, from whose functions its Python state is reached.
        calls_eager: In PIECEWISE, functions under ``eager_region`` are not part of its graphs.
    """

    def __init__(self, pieces: Sequence[Piece], *, calls_eager: bool = False) -> None:
        self._pieces, self._calls_eager = tuple(pieces), calls_eager
        # State reached by the whole step and by graph pieces alone, and the watches of its values.
        self._states: dict[bool, PythonState] = {}
        self._watches: dict[bool, ValueWatch] = {}
        # Inside ``contained``: whether only graphs count.
        self._graphs_alone: bool | None = None
        self._replaced: Counter[str] = Counter()
        # Entries that the step has changed, by container and key.
        self._changed: dict[tuple[int, Any], Entry] = {}

    def forget(self) -> None:
        """Look up again what the step reaches, since it may have been replaced."""
        self._states.clear()
        self._watches.clear()

    def _reach(self, *, graphs_alone: bool = False) -> PythonState:
        """Return the state that the step or its graph pieces currently reach."""
        pieces = [one for one in self._pieces if one.is_graph or not graphs_alone]
        leaves_out = graphs_alone and self._calls_eager
        roots = {piece.name: piece.fn for piece in pieces}
        return PythonState(roots, is_left_out=is_eager_region if leaves_out else None)

    def state(self, *, graphs_alone: bool = False) -> PythonState:
        """Return the state that the step reaches, as of the last ``refresh``.

        Args:
            graphs_alone: Only what its graph pieces reach.
        """
        if graphs_alone not in self._states:
            self._states[graphs_alone] = self._reach(graphs_alone=graphs_alone)
        return self._states[graphs_alone]

    def watch(self, *, graphs_alone: bool = False) -> ValueWatch:
        """Return a watch of the values that a graph captured now has built in.

        Args:
            graphs_alone: Eager pieces read their values again at each replay.
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
        """Return whether the state that the step reaches differs from the last capture.

        Everything is compared, which takes milliseconds for a large model, once per capture.
        """
        known = self._states.get(False)
        if known is not None and known.is_current():
            return False
        self.forget()
        return True

    def _changed_before(self) -> tuple[Entry, ...]:
        """Return the current values of entries that the step changed once and no longer changes."""
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
                f"{often[0]} was replaced more than {MAX_REPLACED} times since it was first "
                "captured, which invalidates each graph. Write it in place (tensor.copy_(...)), "
                "or pass it as an input.",
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
        """Restore all state at the end, without classifying changes; no graph is captured."""
        before = self.state()
        try:
            yield
        finally:
            if changed := before.changes():
                restore(changed)

    def check_run(self) -> tuple[Entry, ...]:
        """Check the changes of one run before another one reverts them.

        Returns:
            Changes made by eager pieces.

        Raises:
            PythonChangedError: There was a change that a replay would not make.
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
        """Classify a step's Python effects; return if the step can be captured.

        It can if they created a cache, which is then kept, or if another thread made the change,
        which is then applied again.

        Args:
            error: The changes of a run.
            snapshot: A snapshot of the tensors that the step is known to write.
            run: Runs the step on dummy rows.
            run_on_other_rows: Runs it on other dummy rows.

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
                f"The first call of the step changes {named(changed)}, and computes something "
                "different from later ones. The next call runs eager; the key is captured after "
                "it.",
                reason=Reason.FIRST_CALL,
            )
        raise CaptureError(
            f"Each call of the step changes {named(changed)}, which a replay would not do. Keep "
            "such state in a tensor that the step writes in place (self.h.copy_(...), a buffer), "
            "or change it outside the step; until then every step runs eager.",
            reason=Reason.PYTHON_STATE,
        )

    def _find(
        self,
        before: PythonState,
        snapshot: Snapshot,
        run: Callable[[], Any],
        run_on_other_rows: Callable[[], Any],
    ) -> str:
        """Return the reason to count for a step's Python effects, or their class."""
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
    """Describe some entries, with class, file and line."""
    more = f" and {len(entries) - _MAX_NAMED} more" if len(entries) > _MAX_NAMED else ""
    return ", ".join(str(entry) for entry in entries[:_MAX_NAMED]) + more


class _Unknown:
    """A value that cannot be compared; equal to nothing."""


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
    """Return whether two copies are equal, tensors bitwise."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bits_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return is_same(one, other) or is_same_value(one, other)


def write_noise(tensors: Iterable[torch.Tensor], *, seed: int = 0) -> None:
    """Fill floating-point tensors with noise, without using existing generators.

    Other tensors keep their contents: a random index could access invalid memory.
    """
    for number, tensor in enumerate(tensors):
        if tensor.dtype in _NOISY:
            generator = torch.Generator(tensor.device).manual_seed(seed + number)
            tensor.normal_(generator=generator)


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal, so NaN equals itself and zeros have signs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided or one.is_complex():
        return torch.equal(one, other)
    one, other = one.contiguous(), other.contiguous()
    if one.dim() == 0:
        one, other = one.reshape(1), other.reshape(1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
