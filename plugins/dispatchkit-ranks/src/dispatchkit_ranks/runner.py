"""A runner that decides each step together with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dispatchkit.errors import ConfigError, InputError, NoGraphError, RankError, format_value
from dispatchkit.execute import GraphRunner, flatten, pad_input
from dispatchkit.keys import ALLOWED_MODES, GraphKey, RuntimeMode, check_instance

from dispatchkit_ranks.dispatcher import RankedDispatcher
from dispatchkit_ranks.facts import ALL_ON, AgreedBatch
from dispatchkit_ranks.protocol import Ranks

if TYPE_CHECKING:
    from dispatchkit.execute import AxisCut, GraphRunner, StaticInput


class RankedRunner:
    """A runner that uses the same mode and padded size on all ranks.

    All ranks must create this object at the same point, and then call ``capture``. In every step,
    each rank calls the runner once, or calls ``idle`` if the rank has no batch.

    Args:
        runner: The runner of this rank, created with ``lazy=False``.
        ranks: The ranks that decide together, such as a ``RankAgreement``.
        inputs: The runner's static inputs; their fill values pad this rank's batch if another rank
            has a larger batch.
        options: Further arguments of ``RankedDispatcher``.

    Attributes:
        runner: The runner of this rank.
        ranked: The dispatcher, with the attributes ``step``, ``epoch`` and ``withheld``.

    Raises:
        ConfigError: The runner is lazy or may split batches, its policy learns on every rank, or an
            argument is invalid.
        RankError: The ranks have different settings, or a rank is missing.
    """

    def __init__(
        self,
        runner: GraphRunner,
        ranks: Ranks,
        inputs: Mapping[str, StaticInput],
        **options: Any,
    ) -> None:
        check_instance(runner, GraphRunner, "runner")
        if not any(spec.batch_dim is not None for spec in inputs.values()):
            error = ConfigError(
                "inputs",
                list(inputs),
                "a dict with at least one batched input",
                "Declare an input with None in its shape.",
            )
            ranks.fail(error)
            raise error
        self.runner = runner
        self._inputs = dict(inputs)
        self._fill: dict[str, torch.Tensor] = {}
        self._names: tuple[str, ...] = tuple(axis.name for axis in runner.config.axes)
        self._guard = runner.lanes[0].work.guard
        self._captured_under = self._guard.now()
        self.ranked: RankedDispatcher = RankedDispatcher(runner.dispatcher, ranks, **options)

    def capture(self, keys: Iterable[GraphKey] | None = None) -> dict[GraphKey, dict[int, str]]:
        """Capture on all ranks in the same order; keys that fail on any rank are not used.

        Returns:
            The keys that are not used, with the reason by rank index.
        """
        self._captured_under = self._guard.now()
        return self.ranked.capture(self._capture_one, keys)

    def renew(self) -> None:
        """Continue after a ``swap`` of the runner; see ``RankedDispatcher.renew``.

        All ranks must swap and call this at the same point.

        Raises:
            ConfigError: As for the constructor.
            RankError: The policies or configurations differ, or a rank did not call this method.
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
        """Run one step together with the other ranks.

        Args:
            num_reqs: Number of requests in this rank's batch; 0 if unknown.
            uniform: Query class of this rank's batch, see ``Dispatcher.dispatch``.
            loras: Number of active adapters.
            ceiling: The modes that this rank's batch allows, see ``Dispatcher.dispatch``.
            switches: Bits of the switches that are on for this rank.
            tensors: Inputs by name; with axes, also this rank's value of each axis.

        Returns:
            The result of the step for this rank's rows. Outputs whose dimension 0 has the agreed
            number of rows are trimmed to this rank's rows. Dimensions that follow an axis, as
            measured by a capture, are trimmed to this rank's value of the axis.

        Raises:
            InputError: An input is missing, unknown, has no rows or does not match its
                declaration. Nothing has been exchanged.
            DescriptorError: A property of the batch is outside the limits. Nothing has been
                exchanged.
            NoGraphError: The ranks allow no common mode; every rank raises this error.
            RankError: A rank is late, has left or has raised an error. Also raised, with reason
                ``not_measured``, if another rank has a larger axis value and the outputs cannot be
                trimmed to this rank's value.
            ReplayError: The agreed graph could not be replayed. This error, like any error of the
                step, ends the agreement, because other ranks may be in a collective of the step.
        """
        own = self._num_rows(tensors)
        ceiling = self._ceiling(ceiling)
        if self._names:
            return self._run_with_axes(tensors, own, num_reqs, uniform, loras, ceiling, switches)
        # Validate before other ranks wait for this rank.
        for name, given in tensors.items():
            if not isinstance(given, torch.Tensor):
                raise InputError(
                    name, f"Input {name!r} must be a tensor, got {format_value(given)}."
                )
        self.runner.decisions.check_inputs(tensors)
        agreed = self.ranked.agree(own, num_reqs, uniform, loras, ceiling, switches)
        rows = agreed.num_tokens
        if rows == own:
            return self._run(agreed, lambda _: tensors)
        result = self._run(agreed, lambda _: self._padded(tensors, own, rows))
        return _cut_rows(result, own, rows)

    def idle(self, ceiling: int = 2) -> bool:
        """Join a step for which this rank has no batch; run dummy rows if another rank has one.

        Args:
            ceiling: The modes that this rank allows, see ``Dispatcher.dispatch``.

        Returns:
            Whether a dummy batch ran; False if all ranks are idle.

        Raises:
            NoGraphError: As for a call.
            RankError: As for a call.
            ReplayError: As for a call.
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

    # -- internals ----------------------------------------------------------------------

    def _ceiling(self, ceiling: int) -> int:
        """Return the code of the modes that this rank allows in this step.

        Allows only eager if the context, such as autocast, differs from the context of the
        capture. Also invalidates this rank's graphs if a value built into them was replaced; other
        ranks then withhold their graphs of the same keys.
        """
        self.runner.decisions.drop_replaced()
        if self._guard.now() == self._captured_under:
            return ceiling
        # If the batch excludes eager, the step raises ReplayError. If ``ceiling`` is not a valid
        # code, ``agree`` raises DescriptorError.
        has_eager = 0 <= ceiling < len(ALLOWED_MODES) and RuntimeMode.NONE in ALLOWED_MODES[ceiling]
        return int(RuntimeMode.NONE) if has_eager else ceiling

    def _run(
        self,
        agreed: AgreedBatch,
        inputs: Callable[[GraphKey | None], Mapping[str, Any]],
        cut: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Run the agreed step; report an error to the other ranks.

        Args:
            agreed: The batch that the ranks agreed on.
            inputs: Function that returns the inputs for the chosen key, or for eager if the key is
                None.
            cut: Function that trims the result to this rank's values of the axes.
        """
        try:
            decision = self.runner.decisions.decide(*agreed[:5])
            result = self.runner.decisions.run(decision, inputs(decision.key))
            return result if cut is None else cut(result)
        except NoGraphError:
            raise  # every rank raises this error
        except Exception as error:
            self.ranked.ranks.fail(error)
            raise

    def _capture_one(self, key: GraphKey) -> None:
        if self.runner.controls.has(key):
            self.runner.evict(key)  # another rank lost this graph, so all ranks capture it
        self.runner.capture([key])

    def _num_rows(self, tensors: Mapping[str, torch.Tensor]) -> int:
        for name, spec in self._inputs.items():
            if spec.batch_dim is None:
                continue
            tensor = tensors.get(name)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() <= spec.batch_dim:
                raise InputError(
                    name,
                    f"Input {name!r} must be a tensor with the batch in dimension "
                    f"{spec.batch_dim}, got {_shape_or_type(tensor)}.",
                )
            rows: int = tensor.shape[spec.batch_dim]
            if rows == 0:
                raise InputError(name, f"Input {name!r} has no rows. On an idle rank, call idle().")
            return rows
        raise InputError("", "The runner has no batched input. Declare one with None in its shape.")

    def _padded(
        self, tensors: Mapping[str, torch.Tensor], own: int, rows: int
    ) -> dict[str, torch.Tensor]:
        """Return inputs of the agreed size, padded with rows of fill values."""
        padded = {}
        for name, spec in self._inputs.items():
            given = tensors.get(name)
            dim = spec.batch_dim
            if dim is None:
                padded[name] = self._fill_rows(name, 0) if given is None else given
                continue
            fill = self._fill_rows(name, rows).narrow(dim, 0, rows - own)
            # Always copy: a step may keep its inputs or write to them.
            padded[name] = fill.clone() if given is None else torch.cat([given, fill], dim)
        return padded

    def _run_with_axes(
        self, given: dict[str, Any], own: int, num_reqs: int, uniform: int, loras: int, *rest: int
    ) -> Any:
        missing = [name for name in self._names if name not in given]
        if missing:
            raise InputError(
                missing[0],
                f"The call has no value for axis {missing[0]!r}. Add the keyword "
                f"argument{'s' * (len(missing) > 1)} {', '.join(missing)}.",
            )
        values = {name: given.pop(name) for name in self._names}
        variant = self.runner.config.variant(loras, **values)
        for name, shape in self._shapes(own, values).items():
            tensor: Any = given.get(name)
            # Validate before other ranks wait for this rank.
            if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
                raise InputError(
                    name,
                    f"Input {name!r} must be a tensor of shape {tuple(shape)}, "
                    f"got {_shape_or_type(tensor)}.",
                )
        self.runner.decisions.check_inputs(given | values)
        agreed = self.ranked.agree(own, num_reqs, uniform, variant, *rest)
        # If the ranks have different values of an exact axis, each rank uses its own value and runs
        # eager.
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
        """Return inputs with the agreed rows and axis values, padded with fill values."""
        device = torch.device(self.runner.backend.torch_device)
        padded: dict[str, Any] = {}
        for name, shape in self._shapes(rows, values).items():
            spec, tensor = self._inputs[name], given.get(name)
            if tensor is None:
                padded[name] = torch.full(shape, spec.fill_value, dtype=spec.dtype, device=device)
            elif tensor.shape == shape:
                padded[name] = tensor
            else:
                # Keep the dtype, because the runner must reject a dtype that does not match the
                # declaration.
                padded[name] = pad_input(tensor, spec, shape)
        return padded | {name: one for name, one in given.items() if name not in padded}

    def _shapes(self, rows: int, values: Mapping[str, int]) -> dict[str, torch.Size]:
        """Return the shape of each input for these rows and axis values."""
        return {name: spec.at(values).sized(rows) for name, spec in self._inputs.items()}

    def _cuts(
        self, key: GraphKey | None, values: Mapping[str, int], wanted: Mapping[str, int]
    ) -> tuple[AxisCut, ...]:
        """Return how to trim the outputs from the agreed axis values to the values of this rank.

        Raises:
            RankError: No capture has measured which output dimensions follow the axes.
        """
        cuts = self.runner.decisions.known_axis_cuts(tuple(wanted.values()), key)
        if cuts is not None:
            return cuts
        names = [name for name in self._names if values[name] != wanted[name]]
        differ = ", ".join(f"{name}={values[name]} to {wanted[name]}" for name in names)
        axes = "axis" if len(names) == 1 else "axes"
        raise RankError(
            f"This step must be padded from {differ} and its outputs trimmed, but no capture on "
            f"this rank has measured which output dimensions depend on the {axes}. Call capture() "
            "on all ranks before the first step and fix captures that fail. Alternatively, use the "
            f"same values on all ranks, or declare the {axes} exact.",
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
                    f"Output {number} cannot be trimmed to {name}={values[name]}. According to a "
                    f"capture, its dimension {dim} has size {wanted[name] + more} at "
                    f"{name}={wanted[name]}, but its shape is {shape}. Declare the axis exact, or "
                    "use the same values on all ranks.",
                    step=self.ranked.step,
                    reason="not_measured",
                )
            leaves[number] = leaf.narrow(dim, 0, max(0, values[name] + more))
        return structure.build(leaves)

    def _fill_rows(self, name: str, rows: int) -> torch.Tensor:
        """Return at least ``rows`` rows of an input's fill value."""
        spec = self._inputs[name]
        cached = self._fill.get(name)
        if cached is None or (spec.batch_dim is not None and cached.shape[spec.batch_dim] < rows):
            most = max(rows, self.runner.config.max_num_tokens)
            device = torch.device(self.runner.backend.torch_device)
            cached = self._fill[name] = spec.full(most, device)
        return cached


def _cut_rows(result: Any, own: int, rows: int) -> Any:
    """Return a result trimmed to this rank's rows; the same object if nothing is trimmed."""
    leaves, structure = flatten(result)
    found = [_cut(leaf, own, rows) for leaf in leaves]
    is_cut = any(one is not other for one, other in zip(found, leaves, strict=True))
    return structure.build(found) if is_cut else result


def _cut(leaf: Any, own: int, rows: int) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows:
        return leaf[:own]
    return leaf


def _shape_or_type(value: object) -> str:
    """Return the shape of a tensor, or the type of another value, for an error message."""
    if isinstance(value, torch.Tensor):
        return f"shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__
