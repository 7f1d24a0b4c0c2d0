"""RankedRunner: a GraphRunner that decides each step together with other ranks."""

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

    Every rank creates one at the same point, calls ``capture``, and then calls the runner once
    in every step, or ``idle`` if it has no batch.

    Args:
        runner: Runs this rank's steps. Not lazy.
        ranks: The agreement.
        inputs: The runner's static inputs; their fill values pad the rows when another rank's
            batch is larger.
        options: Options of ``RankedDispatcher``.

    Attributes:
        runner: The runner.
        ranked: Decides; read its state from ``step``, ``epoch`` and ``withheld``.

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
        """Capture on all ranks in the same order; no rank uses a key that fails on any rank.

        Returns:
            The keys that are not used, with the ranks (by index) that cannot run them and why.
        """
        self._made_under = self._guard.now()
        return self.ranked.capture(self._capture_one, keys)

    def renew(self) -> None:
        """Continue after a ``swap`` of the runner; see ``RankedDispatcher``.

        All ranks swap and call it at the same point.

        Raises:
            ConfigError: The policy learns on every rank.
            RankError: Policy or configuration differ between ranks, or a rank does not arrive.
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
            num_reqs: Requests in this rank's batch; 0 if unknown.
            uniform: Query class of this rank's batch.
            loras: Active adapters.
            ceiling: Code of the modes that this rank's batch allows.
            switches: Bits of the switches that are on for this rank.
            tensors: Inputs by name; with axes, this rank's values of them as well.

        Returns:
            The step's result for this rank's rows. Outputs are cut along dimension 0 if that
            has the agreed size, and along axes if a capture has measured which dimensions
            follow them.

        Raises:
            InputError: An input is missing, unknown, has no rows or does not match its
                declaration. Nothing has been exchanged.
            DescriptorError: A fact is outside the limits. Nothing has been exchanged.
            NoGraphError: The ranks allow no common mode; every rank raises it.
            RankError: A rank is late, gone or has raised; or another rank's axes are larger, and
                no capture here has measured how to cut the outputs (``not_measured``).
            ReplayError: The agreed graph could not be replayed here. The agreement has ended,
                as after any error of the step itself: the other ranks may be in its
                collectives, and stop with an error.
        """
        own = self._num_rows(tensors)
        ceiling = self._ceiling(ceiling)
        if self._names:
            return self._run_with_axes(tensors, own, num_reqs, uniform, loras, ceiling, switches)
        # Check before any rank waits for this one.
        for name, given in tensors.items():
            if not isinstance(given, torch.Tensor):
                raise InputError(name, f"Input {name!r} must be a tensor, got {given!r:.60}.")
        self.runner.decisions.check_inputs(tensors)
        agreed = self.ranked.agree(own, num_reqs, uniform, loras, ceiling, switches)
        rows = agreed.num_tokens
        if rows == own:
            return self._run(agreed, lambda _: tensors)
        result = self._run(agreed, lambda _: self._padded(tensors, own, rows))
        return _cut_rows(result, own, rows)

    def idle(self, ceiling: int = 2) -> bool:
        """Join a step without a batch: run dummy rows if any other rank has a batch.

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
        """Return the modes that this rank allows: only eager under another autocast, for example.

        Graphs that contain a value that was replaced here are no longer used by any rank.
        """
        self.runner.decisions.drop_replaced()
        if self._guard.now() == self._made_under:
            return ceiling
        # If that mode is excluded, or is not a valid code, the agreement reports it.
        has_eager = 0 <= ceiling < len(ALLOWED_MODES) and RuntimeMode.NONE in ALLOWED_MODES[ceiling]
        return int(RuntimeMode.NONE) if has_eager else ceiling

    def _run(
        self,
        agreed: AgreedBatch,
        inputs: Callable[[GraphKey | None], Mapping[str, Any]],
        cut: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Run the agreed step, or report to the other ranks that this rank does not.

        Args:
            agreed: The facts that all ranks run the step under.
            inputs: Returns the inputs for the chosen key, or for eager if it is None.
            cut: Cuts the result to this rank's rows.
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
            self.runner.evict(key)  # another rank lost the key: all warm up and capture again
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
        """Return inputs of the agreed size: the given rows, then rows of fill values."""
        padded = {}
        for name, spec in self._inputs.items():
            given = tensors.get(name)
            dim = spec.batch_dim
            if dim is None:
                padded[name] = self._fill_rows(name, 0) if given is None else given
                continue
            fill = self._fill_rows(name, rows).narrow(dim, 0, rows - own)
            # Always new memory: a step may keep its inputs or write to them.
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
            if not is_tensor or tensor.shape != shape:  # before any rank waits for this one
                found = tuple(tensor.shape) if is_tensor else type(tensor).__name__
                raise InputError(
                    name, f"Input {name!r} must be a tensor of {tuple(shape)} here, got {found}."
                )
        self.runner.decisions.check_inputs(given | values)
        agreed = self.ranked.agree(own, num_reqs, uniform, variant, *rest)
        # Ranks have different values of an exact axis: eager, each with its own.
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
        """Return inputs of the agreed rows and values: the given part, then fill values."""
        device = torch.device(self.runner.backend.torch_device)
        padded: dict[str, Any] = {}
        for name, shape in self._shapes(rows, values).items():
            spec, tensor = self._inputs[name], given.get(name)
            if tensor is None:
                padded[name] = torch.full(shape, spec.fill_value, dtype=spec.dtype, device=device)
            elif tensor.shape == shape:
                padded[name] = tensor
            else:
                # Keep the given dtype, so that a wrong one is rejected and not converted.
                padded[name] = pad_input(tensor, spec, shape)
        return padded | {name: one for name, one in given.items() if name not in padded}

    def _shapes(self, rows: int, values: Mapping[str, int]) -> dict[str, torch.Size]:
        """Return the shape of each input for a number of rows and a value of each axis."""
        return {name: spec.at(values).sized(rows) for name, spec in self._inputs.items()}

    def _cuts(
        self, key: GraphKey | None, values: Mapping[str, int], wanted: Mapping[str, int]
    ) -> tuple[AxisCut, ...]:
        """Return how to cut results from the agreed values to this rank's, before the step runs.

        Raises:
            RankError: No capture has measured how outputs follow the axes.
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
                    f"Dimension {dim} of output {number} must be {wanted[name] + more} at "
                    f"{name}={wanted[name]}, as in captures, but the output's shape is {shape}, "
                    f"so it cannot be cut to {name}={values[name]}. "
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
    """Return a result cut to this rank's rows; an object with nothing to cut is returned as is."""
    leaves, structure = flatten(result)
    found = [_cut(leaf, own, rows) for leaf in leaves]
    is_cut = any(one is not other for one, other in zip(found, leaves, strict=True))
    return structure.build(found) if is_cut else result


def _cut(leaf: Any, own: int, rows: int) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows:
        return leaf[:own]
    return leaf
