"""Check mode: compare replays with eager runs, and overwrite outdated views.

A checked step runs twice, with the same state and the same random numbers. The results and state of
both runs are compared, and those of the eager run are kept. A graph whose replay differs is not
used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from dispatchkit.errors import ConfigError, format_value
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.fingerprint import Facts, changed, moved
from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.structure import flatten, is_same_value
from dispatchkit.execute.replay.check_state import (
    State,
    StateCheck,
    comparable,
    is_coarse,
    is_comparable,
    tolerance,
)
from dispatchkit.execute.slots import SavedRows
from dispatchkit.execute.step.state import Snapshot
from dispatchkit.keys.checks import whole_number
from dispatchkit.options import FIRST

# Different kernels may run at the size of the bucket and at the size of the batch, so results may
# be rounded differently. The errors that check mode must detect (outdated values, wrong rows) are
# much larger.
RELATIVE, ABSOLUTE = 1e-2, 1e-3


class CheckWarning(RuntimeWarning):
    """A graph is no longer used: a replay differed from an eager run, or a tensor was replaced."""


class Checker:
    """Compares replays with eager runs.

    Args:
        every: Compare every n-th replay or, with ``FIRST``, the first unpadded and the first padded
            replay of each graph.
        snapshot: Function that returns a snapshot of the state known to change in a step.
        state: Function that returns the storages known to change in a step, by name.
        facts: Function that returns the current addresses and values that the step uses.
        save_rows: Function that saves the rows of a step's sessions, if there are slots.

    Raises:
        ConfigError: ``every`` is neither ``FIRST`` nor a whole number of at least 1.
    """

    def __init__(
        self,
        every: Any,
        snapshot: Callable[[], Snapshot],
        state: Callable[[], State],
        facts: Callable[[InputBuffers], Facts],
        save_rows: Callable[[Sequence[Any] | None, int], SavedRows] | None = None,
    ) -> None:
        self._is_first_alone = every == FIRST
        if self._is_first_alone:
            every = 1
        number = whole_number(every)
        if number is None or number < 1:
            raise ConfigError("check", every, "0 (off), a whole number of at least 1, or 'first'")
        self._every, self._snapshot, self._facts = number, snapshot, facts
        self._state = StateCheck(state, RELATIVE, ABSOLUTE)
        self._save_rows = save_rows
        #: Whether the state that eager steps change is recorded; requires comparing every replay.
        self.notes_eager: bool = number == 1 and not self._is_first_alone
        # Captured keys compared so far: unpadded, padded.
        self._compared: tuple[WeakSet[CapturedKey], ...] = (WeakSet(), WeakSet())
        self._count = 0
        self._returned_views: list[torch.Tensor] = []

    def count(self, step: CapturedKey, num_tokens: int) -> bool:
        """Count the next replay, and return whether it must be compared."""
        is_padded = num_tokens != step.key.num_tokens
        if self._is_first_alone:
            if step in self._compared[is_padded]:
                return False
            self._compared[is_padded].add(step)
        self._count += 1
        return self._count % self._every == 0

    def compare(
        self,
        step: CapturedKey,
        num_tokens: int,
        replay: Callable[[], Any],
        eager: Callable[[], Any],
        tensors: Sequence[Any] | None,
    ) -> tuple[Any, str]:
        """Replay a step, run it eager from the same state, and compare the two runs.

        A graph that also draws random numbers for padding rows draws different numbers than an
        eager run. In that case, only the graph runs.

        Args:
            step: Captured key. Its outputs in the lane's memory are overwritten first, which
                reveals outputs that the graph does not write.
            num_tokens: Number of rows in the batch.
            replay: Function that replays the graph and returns a copy of the results. If the step
                runs eager instead, nothing is compared.
            eager: Function that runs the step eager.
            tensors: Inputs of the step; None for an in-place step.

        Returns:
            A result, and a description of the difference, which may be empty. The result is that of
            the eager run, or that of the replay if nothing was compared.
        """
        step.lane.order()
        before = self._snapshot()
        rows = None if self._save_rows is None else self._save_rows(tensors, num_tokens)
        for leaf in step.leaves:
            if isinstance(leaf, torch.Tensor) and leaf in step.lane.outputs:
                leaf.fill_(_poison(leaf.dtype))
        hits = step.hits
        got = replay()
        if step.hits == hits:  # the step ran eager, because a guard or the launch failed
            return got, ""
        # If the capture was not watched, only the first replay shows whether the graph draws random
        # numbers.
        is_padded = num_tokens != step.key.num_tokens
        if is_padded and any(one.has_random_state for one in step.graphs):
            return got, ""
        replayed = self._state.now()
        replayed_rows = {} if rows is None else rows.now()
        before.restore()
        if rows is not None:
            rows.restore()
        # Do not record this eager run here, because difference() below records it.
        notes, self.notes_eager = self.notes_eager, False
        try:
            want = eager()
        finally:
            self.notes_eager = notes
        difference = self._state.difference(before, replayed, is_padded=is_padded)
        try:
            if rows is not None:
                _assert_rows_close(replayed_rows, rows.now())
            _assert_close(got, want)
        except (AssertionError, TypeError) as error:
            difference = f"{str(error).strip()} {difference}".replace("\n", " ").strip()
        if difference:
            then = step.facts
            why = "" if then is None else changed(then, self._facts(step.input_path.buffers))
            return want, f"{difference} Since the capture: {why}." if why else difference
        return want, self._moved(step)

    def note_eager(self, run: Callable[[], Any]) -> Any:
        """Run an eager step, and record the state that its rows change."""
        before = self._state.now()
        result = run()
        self._state.note(before)
        return result

    def _moved(self, step: CapturedKey) -> str:
        """Describe inputs, parameters and buffers that moved since the capture; empty if none."""
        where = (
            "" if step.facts is None else moved(step.facts, self._facts(step.input_path.buffers))
        )
        if not where:
            return ""
        return f"The results are still equal, but tensors were replaced after the capture: {where}."

    def copy_views(self, leaves: Sequence[Any]) -> list[Any]:
        """Return copies of views, and overwrite the copies of the previous call.

        An outdated view then contains NaN, or the largest number of its dtype, instead of plausible
        values from another call. With ``FIRST``, the views themselves are returned.
        """
        if self._is_first_alone:
            return list(leaves)
        for leaf in self._returned_views:
            leaf.fill_(_poison(leaf.dtype))
        copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._returned_views = [leaf for leaf in copies if isinstance(leaf, torch.Tensor)]
        return copies


def _assert_close(got: Any, want: Any) -> None:
    """Raise AssertionError with a description if two results differ."""
    ours, structure = flatten(got)
    theirs, other_structure = flatten(want)
    if structure != other_structure:
        raise AssertionError(
            f"The replay returned {structure}, but the eager run returned {other_structure}."
        )
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            _assert_tensors_close(one, other, f"Output {index}: " if len(ours) > 1 else "")
        elif not _is_close(one, other):
            raise AssertionError(
                f"Output {index} is {format_value(one)} in the replay, but {format_value(other)} "
                "in the eager run."
            )


def _assert_rows_close(
    replayed: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> None:
    """Raise AssertionError with a description if rows of sessions differ."""
    for name, rows in replayed.items():
        _assert_tensors_close(rows, wanted[name], f"{name}: ")


def _is_close(one: Any, other: Any) -> bool:
    """Return whether two values are equal, or are floats that are close enough."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or one != one != other
    return is_same_value(one, other)


def _assert_tensors_close(one: torch.Tensor, other: torch.Tensor, where: str) -> None:
    relative = RELATIVE
    if is_coarse(one) and is_coarse(other):
        if not is_comparable(one.dtype, one.device):
            return
        relative = tolerance(one.dtype, RELATIVE)
        one, other = comparable(one), comparable(other)
    torch.testing.assert_close(
        one,
        other,
        rtol=relative,
        atol=ABSOLUTE,
        equal_nan=True,
        check_stride=False,
        msg=lambda text: where + text,
    )


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max
