"""Detect and classify the Python state that a step changes.

Warmups, captures and measurements run the step on dummy rows, and replays run no Python. Replays
are therefore correct only if the step does not change Python state. Changes made by runs on dummy
rows are undone, and up to three more runs on dummy rows classify the step:

- *Other thread*: the first of these runs changes nothing, so another thread made the changes. They
  are applied again.
- *Cache*: a second run changes nothing and computes the same results, and a run on other rows
  creates a bitwise equal cache. The cache is kept, because the graph reads it.
- *First call*: a second run changes nothing, but its results or state differ from those of the
  first run, or the cache depends on the rows. The caller's next call runs eager, and the key is
  captured after it.
- *Python state*: every run changes state. The step always runs eager.
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
from dispatchkit.execute.step.container_kinds import (
    MISSING,
    is_plain,
    is_same,
)
from dispatchkit.execute.step.pieces import Piece
from dispatchkit.execute.step.python_state import PythonState
from dispatchkit.execute.step.records import Entry, restore
from dispatchkit.execute.step.state import Snapshot
from dispatchkit.execute.step.values import ValueWatch

#: Number of times that a value may be replaced before captures of its step are refused.
MAX_REPLACED: Final = 8
_MAX_NAMED: Final = 3
#: Functions that set the state of random generators.
_SEEDING: Final = frozenset(
    {
        *("manual_seed", "manual_seed_all", "set_seed", "fork_rng"),
        *("set_rng_state", "set_rng_state_all", "set_state", "graphsafe_set_state"),
    }
)
_CACHE: Final = "cache"
_OTHER_THREAD: Final = "other thread"
_NOISY = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class PythonChangedError(CaptureError):
    """A run changed Python state; the changes were undone.

    Args:
        entries: Changed entries.
    """

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self._then = [entry.now() for entry in entries]
        super().__init__(
            f"The step changed {named(entries)} during the capture, but a replay would not do so. "
            f"{_advice(entries)}.",
            reason=Reason.PYTHON_STATE,
        )

    def redo(self) -> None:
        """Apply the changes again."""
        for entry, value in zip(self.entries, self._then, strict=True):
            entry.set(value)


class PythonEffects:
    """The effects of a step on Python state.

    Args:
        pieces: Pieces of the step. Its Python state is everything that their functions can reach.
        calls_eager: Whether functions under ``eager_region`` run eager in PIECEWISE, so that they
            are not part of the graphs.
        generators: Declared random generators; warmups restore them, and replays advance them.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        calls_eager: bool = False,
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self._pieces, self._calls_eager = tuple(pieces), calls_eager
        self._generators = {id(one) for one in (torch.default_generator, *generators)}
        # Recorded states and value watches, by whether they cover only graph pieces.
        self._states: dict[bool, PythonState] = {}
        self._watches: dict[bool, ValueWatch] = {}
        # Whether only changes by graph pieces count; None outside ``contained``.
        self._graphs_alone: bool | None = None
        self._replaced: Counter[str] = Counter()
        # Entries that the step has changed, by the container's id and the entry's key.
        self._changed: dict[tuple[int, Any], Entry] = {}

    def forget(self) -> None:
        """Discard the recorded state, because objects of the step may have been replaced."""
        self._states.clear()
        self._watches.clear()

    def _reach(self, *, graphs_alone: bool = False) -> PythonState:
        """Return the Python state that the step, or only its graph pieces, can reach now."""
        pieces = [one for one in self._pieces if one.is_graph or not graphs_alone]
        leaves_out = graphs_alone and self._calls_eager
        known = self._generators | {id(one) for one in torch.cuda.default_generators}

        def is_excluded(value: Any) -> bool:
            return id(value) in known or (leaves_out and is_eager_region(value))

        return PythonState({piece.name: piece.fn for piece in pieces}, is_excluded=is_excluded)

    def state(self, *, graphs_alone: bool = False) -> PythonState:
        """Return the recorded state of the step; record it first if necessary.

        Args:
            graphs_alone: Whether to include only state that graph pieces reach.
        """
        if graphs_alone not in self._states:
            self._states[graphs_alone] = self._reach(graphs_alone=graphs_alone)
        return self._states[graphs_alone]

    def watch(self, *, graphs_alone: bool = False) -> ValueWatch:
        """Return a watch for changes to the values that a capture would build into graphs now.

        Args:
            graphs_alone: Whether to watch only graph pieces, because eager pieces read their values
                again in each replay.
        """
        if graphs_alone not in self._watches:
            read = self.state(graphs_alone=graphs_alone)
            self._watches[graphs_alone] = ValueWatch(read, self._changed_before())
        return self._watches[graphs_alone]

    def note_replaced(self, entries: Iterable[Entry]) -> None:
        """Record that entries were replaced after a capture."""
        self._replaced.update(str(entry) for entry in entries)
        self.forget()

    def refresh(self) -> bool:
        """Discard the recorded state if it is outdated, and return whether it was discarded.

        Comparing all entries takes milliseconds for a large model, once per capture.
        """
        known = self._states.get(False)
        if known is not None and known.is_current():
            return False
        self.forget()
        return True

    def _changed_before(self) -> tuple[Entry, ...]:
        """Return the entries that the step is known to have changed, with current values."""
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
        """Undo changes to Python state made in a ``with`` block, and raise if there were any.

        Args:
            graphs_alone: Whether eager pieces may change Python state, because they run in each
                replay. Their changes are undone without an error.

        Raises:
            PythonChangedError: The step changed Python state.
            CaptureError: A value of the step was replaced too often, or the step reads an iterator
                that cannot be restored.
        """
        if often := [path for path, count in self._replaced.items() if count > MAX_REPLACED]:
            raise CaptureError(
                f"{often[0]} has been replaced more than {MAX_REPLACED} times since the first "
                "capture, and each replacement invalidates the graphs. Keep it in a tensor that is "
                "written in place (tensor.copy_(...)), or pass it as an input.",
                reason=Reason.PYTHON_STATE,
            )
        before = self.state()
        read = self.state(graphs_alone=graphs_alone)  # recorded before the block changes anything
        if iterators := read.iterators_read():
            is_one = len(iterators) == 1
            noun, place = ("iterator", "position") if is_one else ("iterators", "positions")
            raise CaptureError(
                f"The step reads the {noun} {named(iterators)}, whose {place} cannot be restored "
                "after a warmup. Take the next item outside the step, and pass it as an input. "
                "Until then, every step runs eager.",
                reason=Reason.PYTHON_STATE,
            )
        self._graphs_alone = graphs_alone
        changed: tuple[Entry, ...] = ()
        with before.data_held():
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
        """Undo changes to Python state made in a ``with`` block that captures no graph."""
        before = self.state()
        with before.data_held():
            try:
                yield
            finally:
                if changed := before.changes():
                    restore(changed)

    def check_draws(self) -> None:
        """Check that a step which draws random numbers does not also seed a generator.

        Raises:
            CaptureError: The step's code names a function that sets the state of a generator.
        """
        read = self.state(graphs_alone=bool(self._graphs_alone))
        if found := sorted(read.names_read() & _SEEDING):
            raise CaptureError(
                f"The step draws random numbers, and its code names {found[0]}, which sets the "
                "state of a random generator. A replay would not do so, and would draw different "
                "numbers. Set the state outside the step. Until then, every step runs eager.",
                reason=Reason.PYTHON_STATE,
            )

    def check_run(self) -> tuple[Entry, ...]:
        """Check the changes made by one run, before another run can revert them.

        Returns:
            The entries that eager pieces changed.

        Raises:
            PythonChangedError: The run made a change that a replay would not make.
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
        """Classify the Python effects of a step, and raise if it cannot be captured now.

        The step can be captured if it created a cache, or if another thread changed the state. The
        cache is kept, and the other thread's change is applied again.

        Args:
            error: Error that lists the changes made by a run.
            snapshot: Snapshot of the tensors that the step is known to write.
            run: Function that runs the step on dummy rows.
            run_on_other_rows: Function that runs the step on other dummy rows.

        Raises:
            CaptureError: The step changes Python state, other than a cache, in its first call or in
                each call.
        """
        before = self._reach()
        with before.data_held():
            found = ""
            try:
                found = self._find(before, snapshot, run, run_on_other_rows)
            finally:
                if found not in (_CACHE, _OTHER_THREAD):
                    restore(before.changes())
        if found in (_CACHE, _OTHER_THREAD):
            self.forget()
            if found == _OTHER_THREAD:
                error.redo()
            return
        snapshot.restore()
        self.forget()
        changed = error.entries
        self._changed |= {(id(one.record.target), one.key): one for one in changed}
        if found == Reason.FIRST_CALL:
            raise CaptureError(
                f"The first call of the step changes {named(changed)}, and its results or state "
                "differ from those of later calls. The next call runs eager; the key is captured "
                "after it.",
                reason=Reason.FIRST_CALL,
            )
        raise CaptureError(
            f"Each call of the step changes {named(changed)}, but a replay would not do so. "
            f"{_advice(changed)}. Until then, every step runs eager.",
            reason=Reason.PYTHON_STATE,
        )

    def _find(
        self,
        before: PythonState,
        snapshot: Snapshot,
        run: Callable[[], Any],
        run_on_other_rows: Callable[[], Any],
    ) -> str:
        """Return ``_CACHE``, ``_OTHER_THREAD`` or the reason why the step must run eager."""
        snapshot.restore()
        first = _copies(leaves_of(run()))
        made = before.changes()
        if not made:
            return _OTHER_THREAD
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
    """Describe the first entries, with class and, if known, file and line."""
    parts = [str(entry) for entry in entries[:_MAX_NAMED]]
    if len(entries) > _MAX_NAMED:
        parts.append(f"{len(entries) - _MAX_NAMED} more")
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


def _advice(changed: Iterable[Entry]) -> str:
    """Return advice for the user whose step changes these entries."""
    if any(isinstance(one.record.target, torch.Generator) for one in changed):
        return "Declare the generator in StepState(generators=[...])"
    return (
        "Keep this state in a tensor that the step writes in place, such as a buffer "
        "(self.h.copy_(...)), or change it outside the step"
    )


class _Unknown:
    """Marker for a value that cannot be compared; unequal to everything."""


def _content(value: Any) -> Any:
    """Copy a value for a later comparison, including the contents of dicts, lists and tuples."""
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
    """Return whether two copies are equal; tensors are compared bitwise."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bits_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return is_same(one, other) or is_same_value(one, other)


def write_noise(tensors: Iterable[torch.Tensor], *, seed: int = 0) -> None:
    """Fill floating-point tensors with noise from new random generators.

    Other tensors keep their contents, because a random index could access invalid memory.
    """
    for number, tensor in enumerate(tensors):
        if tensor.dtype in _NOISY:
            generator = torch.Generator(tensor.device).manual_seed(seed + number)
            tensor.normal_(generator=generator)


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal; NaN equals NaN, and 0.0 differs from -0.0.

    Sparse and complex tensors are compared by value instead.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided or one.is_complex():
        return torch.equal(one, other)
    one, other = one.contiguous(), other.contiguous()
    if one.dim() == 0:
        one, other = one.reshape(1), other.reshape(1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
