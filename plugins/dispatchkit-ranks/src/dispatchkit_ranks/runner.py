"""RankedRunner: a GraphRunner whose steps are decided together with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dispatchkit.errors import ConfigError, InputError, NoGraphError, RankError
from dispatchkit.execute import flatten, pad_input
from dispatchkit.keys import ALLOWED_MODES, GraphKey, RuntimeMode

from dispatchkit_ranks.dispatcher import RankedDispatcher
from dispatchkit_ranks.facts import ALL_ON, AgreedBatch
from dispatchkit_ranks.protocol import Ranks

if TYPE_CHECKING:
    from dispatchkit.execute import AxisCut, GraphRunner, StaticInput


class RankedRunner:
    """Run steps with the same mode and padded size on all ranks.

    Every rank makes one at the same point, calls ``capture``, and then calls it once in
    every step, or ``idle`` where it has no batch.

    Args:
        runner: Runs this rank's steps. Not lazy.
        ranks: The agreement.
        inputs: The runner's static inputs: what rows are padded with where another rank's
            batch is larger.
        options: Those of ``RankedDispatcher``.

    Attributes:
        runner: The runner.
        ranked: Decides; its ``step``, ``epoch`` and ``withheld`` say how it stands.

    Raises:
        ConfigError: The runner is lazy, or its policy learns on every rank.
        RankError: The ranks are set up differently, or one is missing.
    """

    def __init__(
        self,
        runner: GraphRunner,
        ranks: Ranks,
        inputs: Mapping[str, StaticInput],
        **options: Any,
    ) -> None:
        if not any(spec.batch_dim is not None for spec in inputs.values()):
            error = ConfigError("inputs", list(inputs), "with at least one batched input")
            ranks.fail(error)
            raise error
        self.runner = runner
        self._inputs = dict(inputs)
        self._fill: dict[str, torch.Tensor] = {}
        self._names: tuple[str, ...] = tuple(axis.name for axis in runner.config.axes)
        self._guard = runner.lanes[0].work.guard
        self._made_under = self._guard.now()
        self.ranked: RankedDispatcher = RankedDispatcher(runner.dispatcher, ranks, **options)

    def capture(self, keys: Iterable[GraphKey] | None = None) -> dict[GraphKey, dict[int, str]]:
        """Capture on all ranks in the same order; a key that fails on one is used by none.

        Returns:
            The keys that are not used: the ranks (by index) that cannot run them, and why.
        """
        self._made_under = self._guard.now()
        return self.ranked.capture(self._capture_one, keys)

    def renew(self) -> None:
        """Go on with what a ``swap`` of the runner has put in force; see ``RankedDispatcher``.

        All ranks swap and call it at the same point.

        Raises:
            ConfigError: The policy learns on every rank.
            RankError: What is in force is not the same on all ranks, or one does not come.
        """
        self.ranked.renew()

    def __call__(
        self,
        *,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
        switches: int = ALL_ON,
        **tensors: torch.Tensor,
    ) -> Any:
        """Run one step with the other ranks.

        Args:
            num_reqs: Requests in this rank's batch; 0 where they are not known.
            uniform: Query class of this rank's batch.
            loras: Active adapters.
            ceiling: Code of the modes that this rank's batch allows.
            switches: Bits of the switches that this rank has on.
            tensors: Inputs by name; where there are axes, this rank's values of them too.

        Returns:
            What the step returns for this rank's rows. Outputs are cut along dimension 0,
            where that has the agreed size, and along axes as far as a capture has measured
            which dimensions follow one.

        Raises:
            InputError: An input is missing, unknown, has no rows or is another tensor than was
                declared. Nothing has been exchanged.
            DescriptorError: A fact is outside the limits. Nothing has been exchanged.
            NoGraphError: The ranks allow no common mode; every rank raises it.
            RankError: A rank is late, gone or has raised; or another rank's axes are larger, and
                no capture here has measured how the outputs are to be cut (``not_measured``).
            ReplayError: The graph that was agreed on could not be replayed here. The agreement
                has ended, as after any error of the step itself: the other ranks may be in its
                collectives, and are told to stop.
        """
        own = self._num_rows(tensors)
        ceiling = self._ceiling(ceiling)
        if self._names:
            return self._run_with_axes(tensors, own, num_reqs, uniform, loras, ceiling, switches)
        # Before anybody waits for this rank.
        for name, given in tensors.items():
            if not isinstance(given, torch.Tensor):
                raise InputError(name, f"Input {name!r} must be a tensor to be padded.")
        self.runner.decisions.check_inputs(tensors)
        agreed = self.ranked.agree(own, num_reqs, uniform, loras, ceiling, switches)
        rows = agreed.num_tokens
        if rows == own:
            return self._run(agreed, lambda _: tensors)
        result = self._run(agreed, lambda _: self._padded(tensors, own, rows))
        return _cut_rows(result, own, rows)

    def idle(self, ceiling: int = 2) -> bool:
        """Join a step without a batch: run rows of fill if any other rank has a batch.

        Returns:
            Whether a dummy batch was run; False if all ranks are idle.
        """
        agreed = self.ranked.agree(0, ceiling=self._ceiling(ceiling))
        rows = agreed.num_tokens
        if not rows:
            return False
        if self._names:
            axes = zip(self.runner.config.axes, agreed.axes, strict=True)
            values = {
                axis.name: axis.buckets[0] if value is None else value for axis, value in axes
            }
            self._run(agreed, lambda _: self._padded_with_axes({}, rows, values) | values)
        else:
            self._run(agreed, lambda _: self._padded({}, 0, rows))
        return True

    # -- inside -------------------------------------------------------------------------

    def _ceiling(self, ceiling: int) -> int:
        """Return the modes that this rank allows: eager alone under another autocast, say.

        Graphs that have a value built in that was replaced here are no rank's any more.
        """
        self.runner.decisions.drop_replaced()
        if self._guard.now() == self._made_under:
            return ceiling
        # Where that is excluded, or is no code at all, the agreement says so.
        has_eager = 0 <= ceiling < len(ALLOWED_MODES) and RuntimeMode.NONE in ALLOWED_MODES[ceiling]
        return int(RuntimeMode.NONE) if has_eager else ceiling

    def _run(
        self,
        agreed: AgreedBatch,
        inputs: Callable[[GraphKey | None], Mapping[str, Any]],
        cut: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Run what all ranks run, or tell them that this one does not.

        Args:
            agreed: What all run.
            inputs: Makes the inputs for the key that was decided on, None for eager.
            cut: Makes of the result what is returned.
        """
        try:
            decision = self.runner.decisions.decide(*agreed[:5])
            result = self.runner.decisions.run(decision, inputs(decision.key))
            return result if cut is None else cut(result)
        except NoGraphError:
            raise  # every rank raises it
        except Exception as error:
            self.ranked.ranks.fail(error)
            raise

    def _capture_one(self, key: GraphKey) -> None:
        if self.runner.controls.has(key):
            self.runner.evict(key)  # another rank lost its own: all warm up and capture again
        self.runner.capture([key])

    def _num_rows(self, tensors: Mapping[str, torch.Tensor]) -> int:
        for name, spec in self._inputs.items():
            if spec.batch_dim is None:
                continue
            tensor = tensors.get(name)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() <= spec.batch_dim:
                raise InputError(name, f"Input {name!r} is missing, or is not a batched tensor.")
            rows: int = tensor.shape[spec.batch_dim]
            if rows == 0:
                raise InputError(name, f"Input {name!r} has no rows; an idle rank calls idle().")
            return rows
        raise InputError("", "There is no batched input.")

    def _padded(
        self, tensors: Mapping[str, torch.Tensor], own: int, rows: int
    ) -> dict[str, torch.Tensor]:
        """Return inputs of the agreed size; what is given comes first, fill follows."""
        padded = {}
        for name, spec in self._inputs.items():
            given = tensors.get(name)
            dim = spec.batch_dim
            if dim is None:
                padded[name] = self._fill_rows(name, 0) if given is None else given
                continue
            fill = self._fill_rows(name, rows).narrow(dim, 0, rows - own)
            # Always new memory: a step may keep, or write to, what it is given.
            padded[name] = fill.clone() if given is None else torch.cat([given, fill], dim)
        return padded

    def _run_with_axes(
        self, given: dict[str, Any], own: int, num_reqs: int, uniform: int, loras: int, *rest: int
    ) -> Any:
        missing = [name for name in self._names if name not in given]
        if missing:
            raise InputError(missing[0], f"Axis {missing[0]!r} has no value in this call.")
        values = {name: given.pop(name) for name in self._names}
        variant = self.runner.config.variant(loras, **values)
        for name, shape in self._shapes(own, values).items():
            tensor: Any = given.get(name)
            is_tensor = isinstance(tensor, torch.Tensor)
            if not is_tensor or tensor.shape != shape:  # before anybody waits for this rank
                found = tuple(tensor.shape) if is_tensor else type(tensor).__name__
                raise InputError(
                    name, f"Input {name!r} must be a tensor of {tuple(shape)} here, got {found}."
                )
        self.runner.decisions.check_inputs(given | values)
        agreed = self.ranked.agree(own, num_reqs, uniform, variant, *rest)
        # An exact axis of which ranks have different values: eager, each with its own.
        wanted = {
            name: values[name] if value is None else value
            for name, value in zip(self._names, agreed.axes, strict=True)
        }
        rows = agreed.num_tokens
        cuts: tuple[AxisCut, ...] = ()

        def inputs(key: GraphKey | None) -> Mapping[str, Any]:
            nonlocal cuts
            if wanted != values:
                cuts = self._cuts(key, values, wanted)
            return self._padded_with_axes(given, rows, wanted) | wanted

        def cut(result: Any) -> Any:
            return self._cut_axes(result, cuts, values, wanted) if cuts else result

        result = self._run(agreed, inputs, cut)
        return result if rows == own else _cut_rows(result, own, rows)

    def _padded_with_axes(
        self, given: Mapping[str, torch.Tensor], rows: int, values: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return inputs of the agreed rows and values, fill behind what is given."""
        device = torch.device(self.runner.backend.torch_device)
        padded: dict[str, Any] = {}
        for name, shape in self._shapes(rows, values).items():
            spec, tensor = self._inputs[name], given.get(name)
            if tensor is None:
                padded[name] = torch.full(shape, spec.fill_value, dtype=spec.dtype, device=device)
            elif tensor.shape == shape:
                padded[name] = tensor
            else:
                # Of its own type, so that a wrong one is refused and not converted.
                padded[name] = pad_input(tensor, spec, shape)
        return padded | {name: one for name, one in given.items() if name not in padded}

    def _shapes(self, rows: int, values: Mapping[str, int]) -> dict[str, torch.Size]:
        """Return the shape of each input at a number of rows and a value of each axis."""
        return {name: spec.at(values).sized(rows) for name, spec in self._inputs.items()}

    def _cuts(
        self, key: GraphKey | None, values: Mapping[str, int], wanted: Mapping[str, int]
    ) -> tuple[AxisCut, ...]:
        """Return how results at the agreed values are cut to this rank's, before any is made.

        Raises:
            RankError: No capture has measured it.
        """
        cuts = self.runner.decisions.known_axis_cuts(tuple(wanted.values()), key)
        if cuts is not None:
            return cuts
        differ = ", ".join(
            f"{name}={values[name]} to {wanted[name]}"
            for name in self._names
            if values[name] != wanted[name]
        )
        raise RankError(
            f"This step must be padded from {differ}, and its outputs cut back, but no capture on "
            "this rank has measured which output dimensions follow the axis. Call capture() on "
            "all ranks first, and fix the captures that fail; or use the same values on all "
            "ranks, or make the axis exact.",
            step=self.ranked.step,
            reason="not_measured",
        )

    def _cut_axes(
        self,
        result: Any,
        cuts: tuple[AxisCut, ...],
        values: Mapping[str, int],
        wanted: Mapping[str, int],
    ) -> Any:
        leaves, structure = flatten(result)
        for number, dim, index, more in cuts:
            name = self._names[index]
            if values[name] == wanted[name]:
                continue
            leaf: Any = leaves[number] if number < len(leaves) else None
            shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
            if dim >= len(shape) or shape[dim] != wanted[name] + more:
                raise RankError(
                    f"Output {number} was expected to have {wanted[name] + more} as dimension "
                    f"{dim} at {name}={wanted[name]}, as in captures, and is {shape}: it cannot be "
                    f"cut to {name}={values[name]}. "
                    "Make the axis exact, or give all ranks the same values.",
                    step=self.ranked.step,
                    reason="not_measured",
                )
            leaves[number] = leaf.narrow(dim, 0, max(0, values[name] + more))
        return structure.build(leaves)

    def _fill_rows(self, name: str, rows: int) -> torch.Tensor:
        """Return at least ``rows`` rows of an input's fill value."""
        spec = self._inputs[name]
        kept = self._fill.get(name)
        if kept is None or (spec.batch_dim is not None and kept.shape[spec.batch_dim] < rows):
            most = max(rows, self.runner.config.max_num_tokens)
            device = torch.device(self.runner.backend.torch_device)
            kept = self._fill[name] = spec.full(most, device)
        return kept


def _cut_rows(result: Any, own: int, rows: int) -> Any:
    """Return a result for this rank's rows; an object of which nothing is cut is itself."""
    leaves, structure = flatten(result)
    found = [_cut(leaf, own, rows) for leaf in leaves]
    is_cut = any(one is not other for one, other in zip(found, leaves, strict=True))
    return structure.build(found) if is_cut else result


def _cut(leaf: Any, own: int, rows: int) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows:
        return leaf[:own]
    return leaf
