"""Proof of rows: check that a graph computes the same rows as an eager run of a smaller batch.

A graph computes its whole bucket, and the caller receives the first rows. These rows equal those of
an eager run under two conditions. No row may depend on later rows or on the number of rows, and row
i of each output must belong to row i of the batch. Therefore each new graph is replayed twice on
the same three rows of noise. The other rows contain noise in the first replay, and fill values in
the second. Both replays must return bitwise equal results for the three rows, unless repeated
replays of the same rows differ as well. The step also runs eager on one row and on three rows. Its
results must have the layout of the graph's results, and must equal them within rounding.

Comparing the two replays detects dependencies that a comparison with eager misses. A few more rows
often change a mean or an attention weight by less than the difference between two kernels. The
comparison with eager detects dependencies that replays miss: in ``x / x.shape[0]``, the number of
rows is built into the graph. Three rows leave most of the bucket to padding, and leave a block of
two or four rows partly filled. The eager results are valid for all sizes, so most graphs cost only
two replays.

Some steps depend on padding only if the padding is negative, above 1 or larger than all other rows.
Noise therefore has both signs, and differs in magnitude between the first three rows and later
rows. Noise is limited to 0..1 if numbers outside this range may be invalid. This is the case if an
operation of the warmup samples from given probabilities, asserts, is not part of torch, or converts
floating-point numbers to integers (numbers below 1 become index 0, which is valid). Noise is also
limited if numbers outside 0..1 lead to a non-finite result of an eager run or a replay, for example
through a logarithm or an overflow.

An input whose fill value hides positions is treated as a mask that is added to scores. The mask is
set to zero, so all positions are visible. If the mask contained noise, a step that hides every
position with a nonzero mask value would hide all positions.

Integer and bool inputs are not randomized, because a random slot could overwrite the row of a
session. They contain fill values, and each graph is proven again with the integers of a padded
call. This is the call that requested the capture, or the first call whose integers differ from the
fill values.

If rows are declared independent, additional replays of a full batch prove this. First one half of
the rows is replaced, then the other half. In both cases, the results of the unchanged half must
stay bitwise equal. Replays with different padding would not detect a mean over the real rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, TypeVar

import attrs
import torch

from dispatchkit.dispatch import Reason
from dispatchkit.errors import counted
from dispatchkit.execute.capture.captured import CapturedKey, LaunchError, RowProof
from dispatchkit.execute.capture.effects import bits_equal
from dispatchkit.execute.capture.pacing import PROOF, WARMUP
from dispatchkit.execute.capture.warmup import Family, Warmups, family_of
from dispatchkit.execute.io.outputs import OutputLayout, cut
from dispatchkit.execute.io.static_input import StaticInput
from dispatchkit.execute.io.structure import Structure, flatten
from dispatchkit.execute.io.transports import transport_of
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.slots import SavedRows, SlotInput
from dispatchkit.execute.step.state import Snapshot, typed
from dispatchkit.keys.batch import GraphKey

_T = TypeVar("_T")

#: Maximum number of padded calls to examine for integers that differ from the fill values.
_OPEN_CALLS: Final = 8
#: Numbers of rows in the eager runs; for a uniform batch, numbers of requests.
_EAGER_ROWS: Final = (1, 3)
#: Number of rows that are compared at each end of a batch.
_KEPT_ROWS: Final = 16
#: Smallest tolerance for the norm of a difference, relative to the norm of the expected results.
_TOLERANCE: Final = 2e-2
#: Tolerated relative difference, as a multiple of the largest ``eps`` that the step computes with.
_ROUNDINGS: Final = 16
#: Smallest tolerance for the absolute difference per element, for sums that cancel.
_FLOOR: Final = 1e-5
#: Factor by which a difference may exceed the difference between repeated replays, which may be
#: nondeterministic (atomics).
_SPREAD: Final = 16
#: Maximum number of repetitions of a replay to detect nondeterminism.
_REPEATS: Final = 16
#: Magnitudes of noise rows in 0..1, used cyclically.
_MAGNITUDES: Final = (0.05, 0.2, 0.5)
#: Magnitudes of noise rows that may be outside 0..1, used cyclically. Negative magnitudes stand
#: for noise of both signs. Every fourth row is close to the previous row.
_FREE_MAGNITUDES: Final = (0.05, -1.0, 3.0, 1.0, -100.0, 1e-3, -1.0, 1.0)
#: Index in ``_FREE_MAGNITUDES`` of the magnitude that is far from all others.
_FAR: Final = 4
#: An input with a fill value of at most this number is a mask that is added to scores.
_HIDES: Final = -1e4
#: First seed of the noise that replaces rows.
_OTHER_SEED: Final = 1000
#: Width of the range of the noise that replaces rows; the range ends at 1.
_NEAR_ONE: Final = 0.1
#: Dtypes of the state that is compared.
_COMPARED: Final = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32}
)
#: The ``eps`` that is assumed if no warmup was watched.
_COARSE: Final = torch.finfo(torch.bfloat16).eps


class RowProver:
    """Proofs, for the graphs of one lane, that padding does not change rows.

    Args:
        warmups: Warmups of the step, which run it eager.
        lane: Lane that the graphs were captured on.
        keeps_outputs: Whether callers may still read the last results of a graph. If so, a proof
            restores these results.
    """

    def __init__(self, warmups: Warmups, lane: Lane, *, keeps_outputs: bool) -> None:
        self._warmups, self._lane, self._keeps_outputs = warmups, lane, keeps_outputs
        # Eager results for noise; None if the run raised. The first rows of noise are the same for
        # all sizes.
        self._references: dict[tuple[Family, int], _Outputs | None] = {}
        # Families (keys that differ only in size) whose noise must be in 0..1.
        self._bounded: set[Family] = set()

    def forget(self) -> None:
        """Discard the eager results, because tensors of the step were replaced."""
        self._references.clear()
        self._bounded.clear()

    def run_references(
        self, key: GraphKey, snapshot: Snapshot, sizes: Iterable[int]
    ) -> tuple[int, Any] | None:
        """Run the step eager on noise, unless the results are known for the key's family.

        Args:
            key: Key to capture.
            snapshot: Snapshot of the state that the step changes. The caller restores it.
            sizes: Numbers of rows at which the step is known to run.

        Returns:
            The number of rows and the outputs of the last eager run that did not raise; None if
            there was none.
        """
        counts = _counts_below(key, sizes)
        if len(self._known(key, counts)) == min(len(counts), len(_EAGER_ROWS)):
            return None
        self._lane.buffers_of(key).reset()
        last = None
        try:
            with self._rows(key, is_free=self._is_free(key)) as rows:
                found: list[_Outputs] = []
                for count in counts:
                    outputs = self._references.get((family_of(key), count))
                    if (family_of(key), count) not in self._references:
                        outputs, returned = self._run_eager(key, rows, snapshot, count)
                        last = last if outputs is None else (count, returned)
                    found += [] if outputs is None else [outputs]
                    if len(found) == len(_EAGER_ROWS):
                        break
                    if self._lane.let_steps_run(WARMUP):
                        self._lane.buffers_of(key).reset()
                        rows.forget()
                is_usable = bool(found) and all(one.is_finite() for one in found)
        finally:
            self._lane.buffers_of(key).reset()
            self._lane.set_rows(key.num_tokens)
        if rows.is_free and not is_usable:
            self._bound(key)
            return self.run_references(key, snapshot, sizes)
        return last

    def _is_free(self, key: GraphKey) -> bool:
        """Return whether noise may be outside 0..1."""
        return self._warmups.accepts_any_number(key) and family_of(key) not in self._bounded

    def _bound(self, key: GraphKey) -> None:
        """Limit noise to 0..1 for a key's family, and discard the family's eager results."""
        family = family_of(key)
        self._bounded.add(family)
        for name in [name for name in self._references if name[0] == family]:
            del self._references[name]

    def prove(self, captured: CapturedKey, snapshot: Snapshot, sizes: Iterable[int]) -> RowProof:
        """Prove, with noise and fill values, that padding does not change the rows of a graph.

        Args:
            captured: Captured key whose outputs can be cut to the rows of a batch.
            snapshot: Snapshot of the state that the step changes. The caller restores it.
            sizes: Numbers of rows at which the step is known to run.

        Raises:
            Exception: Any exception raised by a replay.
        """
        key, layout = captured.key, captured.layout
        eager = self._known(key, _counts_below(key, sizes))
        if not eager:
            return RowProof()  # the step cannot run at a smaller size, so no call is padded
        problems = {count: one.mismatch(layout, count) for count, one in eager.items()}
        if problem := problems[max(eager)]:
            return RowProof(Reason.ROWS_NOT_THE_BUCKET, problem)
        fitting = {count: one for count, one in eager.items() if not problems[count]}
        # Integers may be slots: with fill values, all rows would use the same unused slot.
        has_integers = any(map(_is_from_call, self._lane.buffers_of(key).inputs))
        draws_alike = False
        if not (has_integers and self._warmups.may_write_scratch()):
            with self._trial(captured, snapshot, is_free=self._is_free(key)) as trial:
                found = self._find(trial, key.descriptor.query_len or 1, fitting)
            if found and trial.has_overflown:
                self._bound(key)
                self.run_references(key, snapshot, sizes)
                return self.prove(captured, snapshot, sizes)
            if found:
                return RowProof(Reason.ROWS_DEPEND, found)
            draws_alike = trial.draws_alike
        return RowProof(
            draws_alike=draws_alike,
            min_rows=1 if len(fitting) == len(eager) else min(fitting),
            open_calls=_OPEN_CALLS if has_integers else 0,
        )

    def prove_with_call(
        self, captured: CapturedKey, snapshot: Snapshot, known: RowProof, sample: Sequence[Any]
    ) -> RowProof:
        """Prove, with the integers of a call, that padding does not change its rows.

        Args:
            captured: Captured key.
            snapshot: Snapshot of the state and scratch that the step changes.
            known: Earlier proof of the graph, returned if the call adds nothing to it.
            sample: Inputs of the call in declared order.

        Raises:
            Exception: Any exception raised by a replay.
        """
        is_free = self._is_free(captured.key)
        with self._trial(captured, snapshot, sample, is_free=is_free) as trial:
            count = trial.rows.num_given
            if not trial.rows.is_varied or not known.min_rows <= count < captured.key.num_tokens:
                return known
            # With inputs other than fill values, operations may write to different memory.
            with self._warmups.contents_watched_once(captured.key, snapshot, is_varied=True):
                eager = self._reference(captured.key, trial.rows, snapshot, count)
            if eager is None:
                return known
            if found := eager.mismatch(captured.layout, count):
                return RowProof(Reason.ROWS_NOT_THE_BUCKET, found)
            is_usable = not is_free or eager.is_finite()
            found = self._find(trial, count, {count: eager}) if is_usable else ""
        if not is_usable or (found and trial.has_overflown):
            self._bound(captured.key)
            return self.prove_with_call(captured, snapshot, known, sample)
        if found:
            return RowProof(Reason.ROWS_DEPEND, found)
        return attrs.evolve(known, open_calls=0)

    def prove_independent(
        self,
        captured: CapturedKey,
        snapshot: Snapshot,
        known: RowProof,
        sample: Sequence[Any] | None = None,
    ) -> RowProof:
        """Prove that the rows of a full batch are independent of each other.

        Args:
            captured: Captured key.
            snapshot: Snapshot of the state that the step changes, and of scratch if there is a
                sample.
            known: Earlier proof of the graph, to which the result is added.
            sample: Inputs of a part of a split batch; only their integers are used.

        Raises:
            Exception: Any exception raised by a replay.
        """
        own = captured.key.descriptor
        if own.uniform or own.max_query_len is not None or captured.layout.open_output is not None:
            return known  # the graph never serves a part
        with self._trial(captured, snapshot, sample) as trial:
            is_open = trial.rows.has_integers and not trial.rows.is_varied
            if sample is not None and is_open:
                return known
            found = ""
            if not (is_open and self._warmups.may_write_scratch()):
                found = self._coupling(trial)
        open_parts = _OPEN_CALLS if is_open and not found else 0
        return attrs.evolve(known, coupling=found, open_parts=open_parts)

    def _coupling(self, trial: _Trial) -> str:
        """Describe why a graph cannot serve part of a split batch; empty if it can."""
        captured, size = trial.captured, trial.captured.key.num_tokens
        generator = torch.Generator().manual_seed(size)
        is_one = torch.zeros(size, dtype=torch.bool)
        is_one[torch.randperm(size, generator=generator)[: size // 2]] = True
        # Only rows of the call are compared, because the rows after them may share a slot.
        last = (trial.rows.num_given or size) - 1
        is_one[0], is_one[last] = True, last == 0  # ensures that each half has a compared row
        one, other = _ends_of(is_one[: last + 1]), _ends_of(~is_one[: last + 1])
        kept = torch.cat((one, other))
        before = trial.whole(kept)
        if captured.draws or any(graph.has_random_state for graph in captured.graphs):
            return "the step draws random numbers, and would draw them again for each part"
        if trial.changes_again():
            return "the step changes state, and would change it again for each part"
        in_one = torch.arange(len(kept)) < len(one)
        for changed, is_same in ((~is_one, in_one), (is_one, ~in_one)):
            after = trial.whole(kept, changed=changed)
            index = self._spread(trial, kept, is_same, before, after)
            if index is not None:
                return f"rows of output {index} depend on other rows of the batch"
        if self._lane.row_count is not None and size > 1:
            after = trial.whole(kept, num_real=size - 1)
            index = self._spread(trial, kept, kept < size - 1, before, after)
            if index is not None:
                return f"output {index} depends on the number of rows in the batch"
        return ""

    def _spread(
        self,
        trial: _Trial,
        kept: torch.Tensor,
        is_same: torch.Tensor,
        before: list[Any],
        after: list[Any],
    ) -> int | None:
        """Return the index of the first output with a row that wrongly changed, or None.

        Args:
            trial: Trial that repeats the replay.
            kept: Indices of the copied rows.
            is_same: Whether each copied row must stay the same.
            before: Copied rows of the first replay.
            after: Copied rows of the replay with other contents in some rows, or with another row
                count.
        """
        layout = trial.captured.layout
        repeats = _Repeats(lambda: (trial.whole(kept),))
        rounding = self._rounding(trial)
        for index, one, other in _pairs(before, after):
            dim = layout.leaves[index].batch_dim
            if dim is None:
                continue
            places = is_same.nonzero()[:, 0].to(one.device)
            one, other = one.index_select(dim, places), other.index_select(dim, places)
            again = ((whole[index].index_select(dim, places),) for (whole,) in repeats)
            if not _is_chance(one, other, again, rounding):
                return index
        return None

    @contextmanager
    def _trial(
        self,
        captured: CapturedKey,
        snapshot: Snapshot,
        sample: Sequence[Any] | None = None,
        *,
        is_free: bool = False,
    ) -> Iterator[_Trial]:
        # Steps that ran between operators of the capture may have left rows in the buffers.
        self._lane.buffers_of(captured.key).reset()
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._keeps_outputs:
            leaves = (one for one in captured.leaves if isinstance(one, torch.Tensor))
            results = [(leaf, leaf.clone()) for leaf in leaves if leaf in self._lane.outputs]
        try:
            with self._rows(captured.key, sample, is_free=is_free) as rows:
                yield _Trial(captured, snapshot, self._lane, rows, self._warmups)
        finally:
            for leaf, before in results:
                leaf.copy_(before)

    @contextmanager
    def _rows(
        self, key: GraphKey, sample: Sequence[Any] | None = None, *, is_free: bool
    ) -> Iterator[_Rows]:
        """Yield dummy rows for a key, and restore unbatched inputs on exit."""
        slots, number = self._warmups.slots, _head_of(key)

        def wait() -> None:
            self._lane.backend.current_stream().synchronize()

        with nullcontext() if slots is None else slots.lent(number, wait) as lent:
            rows = _Rows(self._lane, key, sample, is_free=is_free, lent=lent)
            try:
                yield rows
            finally:
                rows.end()

    def _find(self, trial: _Trial, unit: int, eager: dict[int, _Outputs]) -> str:
        """Describe a dependency on padding or a difference from eager; empty if there is none."""
        noisy = trial.with_noise_after(eager)
        most = next((count for count in eager if count > unit), unit)
        filled = trial.with_fill_after(most)
        trial.draws_alike = self._draws_alike(trial, eager)
        state = _state(self._warmups, trial.rows)
        behind = noisy[most]
        index = self._depends_on_tail(trial, most, behind, filled)
        if index is None and trial.write_far_noise(most):
            behind = trial.with_noise_after([most])[most]
            index = self._depends_on_tail(trial, most, behind, filled)
        if index is not None:
            trial.has_overflown = trial.rows.is_free and _has_overflown(behind, filled)
            rows = counted(most, "row")
            return f"output {index} of a batch of {rows} depends on the padding rows"
        if any(graph.has_random_state for graph in trial.captured.graphs):
            return ""  # unlike eager, the graph also draws for padding rows
        # Flags with fill values may hide all positions; results may then legitimately differ.
        is_of_fill = trial.rows.has_integers and not trial.rows.is_varied
        for count, one in eager.items():
            if is_of_fill and not one.is_finite():
                continue  # compared later, when a call has other flags
            found = self._differs(trial, count, noisy[count], state if count == most else {})
            if found:
                wanted = trial.kept(one.leaves, count)
                trial.has_overflown = trial.rows.is_free and _has_overflown(noisy[count], wanted)
                rows = counted(count, "row")
                return f"{found} differs from eager for {rows}, whatever the padding contains"
        return ""

    def _draws_alike(self, trial: _Trial, eager: Mapping[int, _Outputs]) -> bool:
        """Return whether the step draws the same random numbers for any number of rows.

        Call this method after a replay, which advances generators as an eager run of a full batch
        does.
        """
        if not trial.captured.draws:
            return True
        key, rows, snapshot = trial.captured.key, trial.rows, trial.snapshot
        after = snapshot.generator_states()
        for count, one in eager.items():
            if one.drawn_from != snapshot.saved_generator_states:
                # The known eager run began in a different generator state.
                found = self._reference(key, rows, snapshot, count, anew=True)
            else:
                found = one
            if found is None or found.drawn != after:
                return False
        return True

    def _depends_on_tail(
        self, trial: _Trial, count: int, noisy: list[Any], filled: list[Any]
    ) -> int | None:
        """Return the index of the first output whose rows depend on later rows, or None."""
        repeats = _Repeats(
            lambda: (trial.with_noise_after([count])[count], trial.with_fill_after(count))
        )
        rounding = self._rounding(trial)
        for index, one, other in _pairs(noisy, filled):
            again = ((noise[index], fill[index]) for noise, fill in repeats)
            if not _is_chance(one, other, again, rounding):
                return index
        return None

    def _rounding(self, trial: _Trial) -> float:
        rounding = self._warmups.rounding(trial.captured.key)
        return _COARSE if rounding is None else rounding

    # -- eager --------------------------------------------------------------------------

    def _known(self, key: GraphKey, counts: Iterable[int]) -> dict[int, _Outputs]:
        """Return the known eager results for noise, by number of rows."""
        family = family_of(key)
        found = ((count, self._references.get((family, count))) for count in counts)
        known = ((count, one) for count, one in found if one is not None)
        return dict(itertools.islice(known, len(_EAGER_ROWS)))

    def _reference(
        self, key: GraphKey, rows: _Rows, snapshot: Snapshot, count: int, *, anew: bool = False
    ) -> _Outputs | None:
        """Return the eager results for the first rows; None if the run raises."""
        name = family_of(key), count
        if not (anew or rows.is_varied) and name in self._references:
            return self._references[name]
        return self._run_eager(key, rows, snapshot, count)[0]

    def _run_eager(
        self, key: GraphKey, rows: _Rows, snapshot: Snapshot, count: int
    ) -> tuple[_Outputs | None, Any]:
        """Run the step eager on the first rows; return a copy of its outputs, and the originals."""
        rows.write(count)
        snapshot.restore()
        rows.restore_slots()
        self._lane.set_rows(count)
        found, outputs = None, None
        with suppress(Exception):  # an eager call of this size would raise too
            outputs = self._warmups.run_at(key, count)
            found = _Outputs.of(outputs, _state(self._warmups, rows), snapshot)
        if not rows.is_varied:
            self._references[family_of(key), count] = found
        return found, outputs

    def _differs(
        self, trial: _Trial, count: int, got: list[Any], state: Mapping[str, torch.Tensor]
    ) -> str:
        """Return the name of the first output or state that differs from eager; empty if equal."""
        key, rows, snapshot = trial.captured.key, trial.rows, trial.snapshot
        eager = self._reference(key, rows, snapshot, count)
        found = self._difference(trial, got, state, eager, count)
        if not found:
            return ""
        # The known results may have been computed with different weights or a different state.
        again = self._reference(key, rows, snapshot, count, anew=True)
        return self._difference(trial, got, state, again, count)

    def _difference(
        self,
        trial: _Trial,
        got: list[Any],
        state: Mapping[str, torch.Tensor],
        eager: _Outputs | None,
        count: int,
    ) -> str:
        if eager is None:
            return ""
        rounding = self._rounding(trial)
        for index, one, other in _pairs(got, trial.kept(eager.leaves, count)):
            if not _is_near(one, other, rounding):
                return f"output {index}"
        for name, replayed in state.items():
            want, before = eager.state.get(name), trial.before(name)
            if want is None or before is None:
                continue
            # Elements that eager leaves unchanged are not compared: padding rows may write to them.
            changed = want != before
            if not _is_near(replayed[changed], want[changed], rounding):
                return name
        return ""


@attrs.frozen(eq=False)
class _Outputs:
    """The copied results of an eager run.

    Attributes:
        leaves: Flattened outputs.
        structure: Structure of the outputs.
        state: Changed state, by name.
        drawn_from: States of the generators before the run.
        drawn: States of the generators after the run.
    """

    leaves: list[Any]
    structure: Structure
    state: Mapping[str, torch.Tensor]
    drawn_from: bytes
    drawn: bytes

    @classmethod
    def of(cls, outputs: Any, state: Mapping[str, torch.Tensor], snapshot: Snapshot) -> _Outputs:
        leaves, structure = flatten(outputs)
        copies = [
            leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        return cls(
            copies, structure, state, snapshot.saved_generator_states, snapshot.generator_states()
        )

    def is_finite(self) -> bool:
        """Return whether all floating-point outputs are finite."""
        tensors = (leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))
        with_fractions = (one for one in tensors if one.is_floating_point())
        return all(bool(_numbers(one).isfinite().all()) for one in with_fractions)

    def mismatch(self, layout: OutputLayout, count: int) -> str:
        """Describe the first mismatch with a layout for ``count`` rows; empty if there is none."""
        found = layout.mismatch(self.leaves, self.structure, count)
        return f"in an eager run of {counted(count, 'row')}, {found}" if found else ""


class _Rows:
    """Dummy rows in the static inputs of a key.

    Args:
        lane: Lane of the key.
        key: Key whose graph reads the rows.
        sample: Inputs of a call; only its integer and bool inputs are used.
        is_free: Whether noise may be outside 0..1.
        lent: Slots that the first rows write, so that the written state can be compared; None
            without slots.

    Attributes:
        is_free: Whether noise may be outside 0..1.
        lent: Slots that the first rows write; None without slots.
        far_from: Index of a row whose magnitude is far from the magnitudes of all earlier rows, or
            None.
        head: Number of leading rows that are the same for all sizes.
        has_integers: Whether any input other than slots contains integers or flags.
        is_varied: Whether integers or flags of the call differ from the fill values.
        num_given: Number of rows in the call.
    """

    def __init__(
        self,
        lane: Lane,
        key: GraphKey,
        sample: Sequence[Any] | None = None,
        *,
        is_free: bool,
        lent: SavedRows | None = None,
    ) -> None:
        self.is_free, self.lent = is_free, lent
        self.far_from: int | None = None
        self._magnitudes: dict[tuple[int, int | None, torch.device], tuple[torch.Tensor, ...]] = {}
        buffers = self._buffers = lane.buffers_of(key)
        self._num_rows, self._held = key.num_tokens, 0
        self.head: int = _head_of(key)
        host = dict(buffers.host_rows(self._num_rows))
        places = buffers.views(self._num_rows)
        self._places = [
            (spec, host.get(index, places[index])) for index, spec in enumerate(buffers.inputs)
        ]
        self._whole = [
            (place, place.clone()) for spec, place in self._places if spec.batch_dim is None
        ]
        self.has_integers: bool = any(_is_from_call(spec) for spec, _ in self._places)
        self._given: list[tuple[StaticInput, torch.Tensor, torch.Tensor]] = []
        self.num_given = 0
        if sample is not None:
            for (spec, place), given in zip(
                self._places, buffers.inputs.to_tensors(sample), strict=True
            ):
                if spec.batch_dim is not None:
                    self.num_given = given.shape[spec.batch_dim]
                if _is_from_call(spec):
                    self._given.append((spec, place, given))
        self.is_varied: bool = any(
            bool((given != spec.fill_value).any()) for spec, _, given in self._given
        )

    def write(self, num_noisy: int) -> None:
        """Write noise, and the integers of the call.

        Args:
            num_noisy: Number of rows that must contain noise; existing noise is not rewritten.
        """
        if num_noisy <= self._held and not self.is_varied:
            return
        buffers = self._buffers
        if buffers.staging is not None:
            buffers.staging.wait()
        for seed, (spec, place) in enumerate(self._places):
            if _is_added_mask(spec):
                place.zero_()
            elif _has_fractions(spec):
                _write_noise(place, spec.batch_dim, seed, self)
            elif spec.batch_dim is None:
                place.fill_(spec.fill_value)
            elif self.lent is not None and isinstance(spec, SlotInput):
                index = self.lent.index[: self._num_rows]
                place[: len(index)] = index
        for spec, place, given in self._given:
            if spec.batch_dim is None:
                place.copy_(given)
                continue
            place.fill_(spec.fill_value)
            place.narrow(spec.batch_dim, 0, self.num_given).copy_(given)
        buffers.mark_written(self._num_rows)
        self._held = self._num_rows

    def change(self, is_changed: torch.Tensor) -> None:
        """In some rows, replace floats with noise close to 1, and integers with fill values."""
        self._held = 0
        places = is_changed.nonzero()[:, 0]
        for seed, (spec, place) in enumerate(self._places):
            if spec.batch_dim is None:
                continue
            rows = place.movedim(spec.batch_dim, 0)
            shape, device = (len(places), *rows.shape[1:]), place.device
            made = torch.full(shape, spec.fill_value, dtype=place.dtype, device=device)
            if _is_added_mask(spec):
                made.zero_()
            elif _has_fractions(spec):
                generator = torch.Generator(device).manual_seed(_OTHER_SEED + seed)
                noise = torch.rand(shape, generator=generator, device=device)
                made.copy_(1 - _NEAR_ONE * noise)
            rows.index_copy_(0, places.to(device), made)

    def magnitudes(self, count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the range of each row's noise, and whether the row is close to the previous one.

        Args:
            count: Number of rows.
            device: Device of the noise.

        Returns:
            Three tensors of shape (count,), the same for every input on the device: the start of
            the range, its width (negative for noise of both signs), and whether the row is close to
            the previous one.
        """
        name = count, self.far_from, device
        found = self._magnitudes.get(name)
        if found is None:
            kinds = torch.arange(count, device=device)
            if self.far_from is not None:
                kinds[self.far_from :] += _FAR - self.far_from
            given = _FREE_MAGNITUDES if self.is_free else _MAGNITUDES
            kinds %= len(given)
            scale = torch.tensor(given, device=device)[kinds]
            start, width = (-scale).clamp(min=0), torch.where(scale < 0, 2 * scale, scale)
            found = self._magnitudes[name] = start, width, kinds % 4 == 3
        return found

    def restore_slots(self) -> None:
        """Restore the state of the lent slots."""
        if self.lent is not None:
            self.lent.restore()

    def forget(self) -> None:
        """Make the next ``write`` write all rows again."""
        self._held = 0

    def mark_filled_after(self, count: int) -> None:
        """Record that the rows after the first ``count`` rows contain fill values."""
        self._held = min(self._held, count)

    def end(self) -> None:
        """Restore unbatched inputs; batched inputs are filled before their next use."""
        for place, before in self._whole:
            place.copy_(before)


class _Trial:
    """Replays of one graph on dummy rows.

    Args:
        captured: Captured key of the graph.
        snapshot: Snapshot that is restored before each replay.
        lane: Lane of the graph.
        rows: Dummy rows in the static inputs.
        warmups: Warmups, which record the state that the step changes.

    Attributes:
        has_overflown: Whether noise in the padding rows made a result non-finite.
        draws_alike: Whether the step draws the same random numbers for any number of rows.
    """

    has_overflown: bool
    draws_alike: bool

    def __init__(
        self,
        captured: CapturedKey,
        snapshot: Snapshot,
        lane: Lane,
        rows: _Rows,
        warmups: Warmups,
    ) -> None:
        self.captured, self.snapshot, self.rows = captured, snapshot, rows
        self.has_overflown = self.draws_alike = False
        self._lane, self._warmups = lane, warmups

    def before(self, name: str) -> torch.Tensor | None:
        """Return the contents of the named state before the trial; None if unknown."""
        lent = self.rows.lent
        if lent is not None and name in lent.saved:
            return lent.saved[name]
        found = self._warmups.state().get(name)
        return None if found is None else self.snapshot.saved(*found)

    def with_noise_after(self, counts: Iterable[int]) -> dict[int, list[Any]]:
        """Replay with noise after the first n rows, for each n in counts.

        Returns:
            The outputs for the first n rows, by n.
        """
        size = self.captured.key.num_tokens
        if self._lane.row_count is None and not self.rows.is_varied:
            leaves = self._replay(size, size)  # one replay is enough: the graph reads no row count
            return self._done({count: self.kept(leaves, count) for count in counts})
        return {count: self._done(self.kept(self._replay(count, size), count)) for count in counts}

    def write_far_noise(self, count: int) -> bool:
        """Make later replays use far larger noise after the first ``count`` rows.

        Do nothing if noise is limited to 0..1, or if a row after them already has such noise.

        Returns:
            Whether the noise was changed.
        """
        size, number = self.captured.key.num_tokens, len(_FREE_MAGNITUDES)
        if not self.rows.is_free or any(row % number == _FAR for row in range(count, size)):
            return False
        self.rows.far_from = count
        self.rows.forget()
        return True

    def with_fill_after(self, count: int) -> list[Any]:
        """Replay with fill values after the first ``count`` rows; return these rows' outputs."""
        return self._done(self.kept(self._replay(count, count), count))

    def whole(
        self,
        kept: torch.Tensor,
        *,
        changed: torch.Tensor | None = None,
        num_real: int | None = None,
    ) -> list[Any]:
        """Replay a full batch; return copies of some rows of all outputs.

        Args:
            kept: Indices of the rows to copy.
            changed: Boolean mask over the rows of the batch; True for rows to replace before the
                replay. By default, no row is replaced.
            num_real: Row count passed to the graph; by default the size of the batch.

        Returns:
            A copy for each leaf; None for leaves without a batch dimension.
        """
        size = self.captured.key.num_tokens
        self.rows.forget()
        leaves = self._replay(num_real or size, size, changed)
        found: list[Any] = []
        for one, leaf in zip(self.captured.layout.leaves, leaves, strict=True):
            dim = one.batch_dim
            is_rows = isinstance(leaf, torch.Tensor) and dim is not None
            found.append(leaf.index_select(dim, kept.to(leaf.device)) if is_rows else None)
        return self._done(found)

    def _done(self, copies: _T) -> _T:
        """Let steps run after the results of a replay were copied; return the copies."""
        if self._lane.let_steps_run(PROOF):
            self._lane.buffers_of(self.captured.key).reset()
            self.rows.forget()
        return copies

    def changes_again(self) -> bool:
        """Return whether another replay of the same rows changes state again."""
        if not self._warmups.writes() or not self._warmups.may_restore():
            return False
        # All rows after those of the call use the fill value as their slot. If their other inputs
        # are fill values too, they write equal values to the slot. With noise, the result would
        # depend on the order of writes.
        count = self.rows.num_given or self.captured.key.num_tokens
        self._replay(count, count)
        once = self.snapshot.contents()
        self._replay(count, count, restores=False)
        twice = self.snapshot.contents()
        return not all(map(torch.equal, once, twice))

    def kept(self, leaves: Sequence[Any], count: int) -> list[Any]:
        """Return copies of the first and last rows of each output; None for state and constants."""
        captured, most = self.captured, max(_KEPT_ROWS, self.rows.head)
        found: list[Any] = []
        rows = cut(captured.layout, leaves, count, {})
        for one, leaf, is_result in zip(captured.layout.leaves, rows, captured.clones, strict=True):
            dim = one.batch_dim
            if not is_result:
                found.append(None)
            elif dim is None or count <= 2 * most:
                found.append(leaf.clone())
            else:
                ends = leaf.narrow(dim, 0, most), leaf.narrow(dim, count - most, most)
                found.append(torch.cat(ends, dim))
        return found

    def _replay(
        self,
        num_real: int,
        num_loaded: int,
        changed: torch.Tensor | None = None,
        *,
        restores: bool = True,
    ) -> Sequence[Any]:
        """Replay from the saved state; the returned outputs are valid until the next replay."""
        captured, path = self.captured, self.captured.input_path
        self.rows.write(num_loaded)
        if changed is not None:
            self.rows.change(changed)
        if restores:
            self.snapshot.restore()
            self.rows.restore_slots()
        transport_of(path, num_loaded).load_in_place()
        self.rows.mark_filled_after(num_loaded)
        self._lane.set_rows(num_real)
        if path.staging is not None and captured.pieces is not None:
            path.staging.queue_copy(captured.key.num_tokens)
        try:
            leaves = captured.launch(num_real)
        except LaunchError as error:
            raise error.cause from None
        if path.staging is not None and self._lane.last_stream is not None:
            path.staging.record_launch(self._lane.last_stream)
        return leaves


def _head_of(key: GraphKey) -> int:
    """Return the number of leading dummy rows that are the same for all keys of a family."""
    return max(_EAGER_ROWS) * (key.descriptor.query_len or 1)


def _counts_below(key: GraphKey, sizes: Iterable[int]) -> list[int]:
    """Return the numbers of rows to try in eager runs, in order; all are below the key's size.

    Args:
        key: Key to capture.
        sizes: Numbers of rows at which the step is known to run.
    """
    unit = key.descriptor.query_len or 1
    most = key.num_tokens - unit
    if most < unit:
        return []
    counts = [unit * count for count in _EAGER_ROWS if unit * count <= most]
    return counts + sorted(size for size in sizes if size < key.num_tokens)


def _state(warmups: Warmups, rows: _Rows) -> dict[str, torch.Tensor]:
    """Return copies of the session rows that the dummy rows write, and of declared state.

    Declared state is included if it is small and no integer selects its rows. Undeclared state is
    excluded, because it may be a workspace that depends on the bucket instead of the batch.
    """
    lent = {} if rows.lent is None else rows.lent.now()
    found = {name: one for name, one in lent.items() if one.dtype in _COMPARED}
    if rows.has_integers or not warmups.may_restore():
        return found
    return found | {
        name: typed(storage, dtype).clone()
        for name, (storage, dtype) in warmups.state().items()
        if name.startswith("state ") and dtype in _COMPARED
    }


def _ends_of(is_meant: torch.Tensor) -> torch.Tensor:
    """Return the indices of the first and last selected rows, which are compared."""
    rows = is_meant.nonzero()[:, 0]
    if len(rows) <= 2 * _KEPT_ROWS:
        return rows
    return torch.cat((rows[:_KEPT_ROWS], rows[-_KEPT_ROWS:]))


def _has_fractions(spec: StaticInput) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _is_from_call(spec: StaticInput) -> bool:
    """Return whether an input is taken from a call (integers and flags, except slots)."""
    return not _has_fractions(spec) and not isinstance(spec, SlotInput)


def _is_added_mask(spec: StaticInput) -> bool:
    return spec.dtype.is_floating_point and spec.fill_value <= _HIDES


def _write_noise(place: torch.Tensor, batch_dim: int | None, seed: int, how: _Rows) -> None:
    """Fill an input with noise from a new random generator.

    Rows differ in magnitude. Small rows keep attention weights from vanishing relative to the
    largest weight. Unless noise is limited to 0..1, every fourth row is slightly larger than the
    previous row, for steps that compare rows or compute a maximum.
    """
    is_free, head = how.is_free, how.head
    generator = torch.Generator(place.device).manual_seed(seed)
    parts = (2,) if place.is_complex() else ()

    def noise(*shape: int) -> torch.Tensor:
        return torch.rand((*shape, *parts), generator=generator, device=place.device)

    def write(target: torch.Tensor, made: torch.Tensor) -> None:
        target.copy_(torch.view_as_complex(made) if parts else made)

    if batch_dim is None:
        made = noise(*place.shape)
        # A single number may be a divisor or a temperature, so it is positive.
        write(place, 2 * made - 1 if is_free and place.numel() > 1 else made)
        return
    rows = place.movedim(batch_dim, 0)
    made = noise(head, *rows.shape[1:])[: len(rows)]
    if len(rows) > head:
        made = torch.cat((made, noise(len(rows) - head, *rows.shape[1:])))
    columns = [-1, *[1] * (made.dim() - 1)]
    start, width, is_near = (one.view(columns) for one in how.magnitudes(len(rows), place.device))
    made = torch.addcmul(start, made, width)
    write(rows, torch.where(is_near, torch.add(torch.roll(made, 1, 0), made, alpha=0.1), made))


def _has_overflown(noisy: list[Any], filled: list[Any]) -> bool:
    """Return whether an element is not finite in ``noisy``, but finite in ``filled``."""
    for _, one, other in _pairs(noisy, filled):
        is_finite = _numbers(one).isfinite()
        if bool((~is_finite & _numbers(other).isfinite()).any()):
            return True
    return False


def _pairs(one: list[Any], other: list[Any]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the index and both copies of each tensor result."""
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            yield index, left, right


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as float64; complex numbers become pairs."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg().to(torch.complex128))
    return tensor.double()


def _finite(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the finite numbers of two tensors; None if they are at different positions."""
    left, right = _numbers(one), _numbers(other)
    places = left.isfinite()
    if not torch.equal(places, right.isfinite()):
        return None
    return left[places], right[places]


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference between two results; 0 if they are bitwise equal."""
    if bits_equal(one, other):
        return 0.0
    numbers = _finite(one, other)
    if numbers is None:
        return float("inf")
    return float((numbers[0] - numbers[1]).abs().max()) if numbers[0].numel() else 0.0


class _Repeats:
    """Repeated replays, which run on demand and are cached."""

    def __init__(self, replay: Callable[[], tuple[list[Any], ...]]) -> None:
        self._replay = replay
        self._made: list[tuple[list[Any], ...]] = []

    def __iter__(self) -> Iterator[tuple[list[Any], ...]]:
        for number in range(_REPEATS):
            if number == len(self._made):
                self._made.append(self._replay())
            yield self._made[number]


def _is_chance(
    one: torch.Tensor,
    other: torch.Tensor,
    again: Iterable[tuple[torch.Tensor, ...]],
    rounding: float,
) -> bool:
    """Return whether repeated replays can explain the difference between two results.

    Args:
        one: First result.
        other: Second result.
        again: Results of repeated replays of the same rows.
        rounding: Largest ``eps`` that the step computes with. The order of additions cannot cause
            differences beyond rounding, so such differences are compared with only one repeated
            replay.
    """
    difference, spread = _difference(one, other), 0.0
    if not difference:
        return True
    is_near = _is_near(one, other, rounding)
    for replayed in again:
        spread = max(spread, *map(_difference, (one, other), replayed))
        if difference <= _SPREAD * spread:
            return True
        if not is_near:
            return False
    return False


def _is_near(got: torch.Tensor, want: torch.Tensor, rounding: float) -> bool:
    """Return whether two results differ only by rounding.

    Integers are compared only if the step computes nothing but integers. Otherwise rounding may
    change an integer, for example the index of the largest of nearly equal numbers.
    """
    if not (want.is_floating_point() or want.is_complex()):
        return bool(rounding) or torch.equal(got, want)
    left, right = _numbers(got), _numbers(want)
    if _is_within(left, right, rounding):
        return True
    numbers = _finite(got, want)
    return numbers is not None and _is_within(*numbers, rounding)


def _is_within(got: torch.Tensor, want: torch.Tensor, rounding: float) -> bool:
    """Return whether numbers are equal within rounding; False for NaN."""
    tolerance = max(_TOLERANCE, _ROUNDINGS * rounding)
    floor = max(_FLOOR, rounding) * want.numel() ** 0.5
    return bool((got - want).norm() <= tolerance * want.norm() + floor)
