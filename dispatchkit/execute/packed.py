"""PackedRunner: pack items of different lengths into steps.

Texts, images and clips differ in length, and padding each item to the longest one can waste most of
the batch. A packed step instead runs on the concatenated tokens of several items and receives the
offset of each item. A packer assigns the items to steps (see ``dispatch/packing``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch.utils._pytree import tree_unflatten

from dispatchkit.dispatch.packing import Packer, PackingLimits, pack_items
from dispatchkit.errors import ConfigError, InputError, counted
from dispatchkit.execute.io.outputs import describe_value
from dispatchkit.execute.io.static_input import StaticInput
from dispatchkit.execute.io.tree import tree_flatten
from dispatchkit.execute.runner import GraphRunner
from dispatchkit.keys.checks import check_instance

Results = Literal["token", "item"]

#: Inputs that are computed if the step declares them. ``offsets``: the offset of each item, and the
#: end of the last item. ``lengths``: the length of each item. ``item_of_token``: for each token,
#: the index of its item within the step. ``positions``: the position of each token within its item.
COMPUTED_INPUTS: Final = ("offsets", "lengths", "item_of_token", "positions")


class PackedRunner:
    """A runner that packs items of different lengths into steps.

    Args:
        runner: Runner of the packed steps. Its rows are tokens, and its only axis counts the items
            of a step. If the step declares inputs named ``offsets``, ``lengths``, ``item_of_token``
            or ``positions``, they are computed from the items. Outputs must be ``owned``, because
            later steps would overwrite views.
        packer: The packer, which groups the items of a call into steps.
        items: Name of the axis that counts items.
        results: Whether a row of an output belongs to a token (``"token"``) or to an item
            (``"item"``): one value for all outputs, or a sequence with a value for each output.

    Raises:
        ConfigError: The runner is not a GraphRunner (a RankedRunner is not supported), does not
            return owned outputs, or does not have ``items`` as its only axis. The error is also
            raised if the rows of an input are neither tokens nor items, if no input has tokens as
            rows, or if ``results`` is invalid.

    Thread safety: as for the runner.
    """

    def __init__(
        self,
        runner: GraphRunner,
        packer: Packer,
        *,
        items: str = "items",
        results: Results | Sequence[Results] = "token",
    ) -> None:
        check_instance(
            runner,
            GraphRunner,
            "runner",
            "Pass GraphRunner(step, ...). A RankedRunner is not supported, because its ranks would "
            "run different numbers of steps. Pack the items with pack_items(), call the "
            "RankedRunner once per bin, and call idle() on ranks that have fewer bins.",
        )
        axes = {axis.name: axis for axis in runner.config.axes}
        if set(axes) != {items}:
            allowed = "the name of the runner's only axis"
            if len(axes) == 1:
                hint = f"Pass items={next(iter(axes))!r}."
            else:
                found = f"the axes {', '.join(sorted(axes))}" if axes else "no axes"
                hint = f"The runner has {found}. Create it with axes=[Axis({items!r}, buckets)]."
            raise ConfigError("items", items, allowed, hint)
        if runner.spec.outputs != "owned":
            hint = "Create the runner with outputs='owned'."
            raise ConfigError("outputs", runner.spec.outputs, "'owned' for packed items", hint)
        given: Any = results
        kinds = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        if not kinds or not all(kind in ("token", "item") for kind in kinds):
            allowed = "'token' or 'item', or a sequence with one of them for each output"
            raise ConfigError("results", results, allowed)
        self.runner: GraphRunner = runner
        self._packer, self._items = packer, items
        self._results: Results | tuple[Results, ...] = (
            results if isinstance(results, str) else kinds
        )
        self._limits = PackingLimits(runner.config.sizes, axes[items].buckets[-1])
        specs: Mapping[str, StaticInput] = runner.spec.static_inputs
        self._specs = specs
        self._made = {name: spec for name, spec in specs.items() if name in COMPUTED_INPUTS}
        self._of_tokens = [
            name
            for name, spec in specs.items()
            if spec.batch_dim == 0 and name not in COMPUTED_INPUTS
        ]
        self._of_items = [
            name
            for name, spec in specs.items()
            if items in spec.shape[:1] and name not in COMPUTED_INPUTS
        ]
        others = set(specs) - set(self._made) - {*self._of_tokens, *self._of_items}
        if others or not self._of_tokens:
            names, last = ", ".join(COMPUTED_INPUTS[:-1]), COMPUTED_INPUTS[-1]
            problem = (
                f"At least one input must be a token input ({names} and {last} do not count), got "
                f"{sorted(specs)}."
            )
            raise ConfigError(
                "inputs",
                sorted(others) or sorted(specs),
                f"token inputs, item inputs or named {names} or {last}",
                "Declare token inputs as StaticInput((None, ...)), and item inputs as "
                f"StaticInput(({items!r}, ...)).",
                message="" if others else problem,
            )
        self._device = torch.device(runner.backend.torch_device)

    def __call__(self, **inputs: Sequence[Any]) -> list[Any]:
        """Run the step on all items; return the results of each item, in order.

        Args:
            inputs: For each input with tokens as rows, a sequence with one tensor per item.
                Dimension 0 of a tensor has the length of the item. For each input with items as
                rows, a sequence with one value per item. Omit computed inputs.

        Returns:
            The results of each item, in the structure that the step returns.

        Raises:
            InputError: An input is missing, unknown or not a sequence; two inputs have different
                numbers of items; an item is not a tensor or array, has no tokens, or has different
                numbers of tokens in two inputs.
            PolicyError: The packer raised or returned invalid bins.
            ConfigError: ``results`` does not match the outputs of the step.
        """
        lengths = self._checked(inputs)
        if not lengths:
            return []
        bins = pack_items(self._packer, lengths, self._limits)
        calls = [self._arguments(one, lengths, inputs) for one in bins]
        if len(self.runner.lanes) > 1:
            handles = [self.runner.submit(**call) for call in calls]
            outputs = [handle.result() for handle in handles]
        else:
            outputs = [self.runner(**call) for call in calls]
        found: list[Any] = [None] * len(lengths)
        for one, output in zip(bins, outputs, strict=True):
            parts = self._by_item(output, [lengths[item] for item in one])
            for item, part in zip(one, parts, strict=True):
                found[item] = part
        return found

    def _checked(self, inputs: Mapping[str, Sequence[Any]]) -> list[int]:
        """Validate the inputs of a call, and return the length of each item."""
        wanted = [*self._of_tokens, *self._of_items]
        each = ", each" if len(wanted) > 1 else ""
        for name in (*wanted, *inputs):
            if name in self._made:
                raise InputError(name, f"Input {name!r} is computed from the items; omit it.")
            if name not in inputs or name not in wanted:
                problem = "Missing" if name in wanted else "Unknown"
                raise InputError(
                    name,
                    f"{problem} input {name!r}. Pass {', '.join(wanted)}{each} as a sequence "
                    "with one value per item.",
                )
        num_items = {name: _num_items(name, values) for name, values in inputs.items()}
        if len(set(num_items.values())) > 1:
            raise InputError(
                wanted[0], f"All inputs must have the same number of items, got {num_items}."
            )
        lead = self._of_tokens[0]
        lengths = [_length(lead, item, value) for item, value in enumerate(inputs[lead])]
        for name in self._of_tokens:
            for item, value in enumerate(inputs[name]):
                length = _length(name, item, value)
                if not length:
                    raise InputError(
                        name,
                        f"Item {item} has no tokens in {name!r}. Omit the item from all inputs.",
                    )
                if length != lengths[item]:
                    raise InputError(
                        name,
                        f"Item {item} has {counted(length, 'token')} in {name!r}, but "
                        f"{lengths[item]} in {lead!r}. Pass the same number in all inputs that are "
                        "indexed by token.",
                    )
        return lengths

    def _arguments(
        self, one: Sequence[int], lengths: Sequence[int], inputs: Mapping[str, Sequence[Any]]
    ) -> dict[str, Any]:
        own = torch.tensor([lengths[item] for item in one], dtype=torch.int64)
        ends = own.cumsum(0)
        call: dict[str, Any] = {self._items: len(one)}
        for name in self._of_tokens:
            call[name] = torch.cat([torch.as_tensor(inputs[name][item]) for item in one])
        for name in self._of_items:
            call[name] = torch.stack([torch.as_tensor(inputs[name][item]) for item in one])
        item_of_token = torch.repeat_interleave(torch.arange(len(one)), own)
        made = {
            "offsets": torch.cat([ends.new_zeros(1), ends]),
            "lengths": own,
            "item_of_token": item_of_token,
            "positions": torch.arange(int(ends[-1])) - (ends - own)[item_of_token],
        }
        for name, spec in self._made.items():
            call[name] = made[name].to(spec.dtype)
        return {
            name: value
            if name == self._items or self._specs[name].host
            else value.to(self._device, non_blocking=True)
            for name, value in call.items()
        }

    def _by_item(self, output: Any, lengths: Sequence[int]) -> list[Any]:
        """Split the outputs of a step, and return the results of each item."""
        leaves, spec = tree_flatten(output)
        kinds = self._results
        if isinstance(kinds, str):
            kinds = (kinds,) * len(leaves)
        num_rows = {"token": sum(lengths), "item": len(lengths)}
        shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
        wrong = len(kinds) != len(leaves) or any(
            not shape or shape[0] != num_rows[kind]
            for shape, kind in zip(shapes, kinds, strict=False)
        )
        if wrong:
            shown = ", ".join(str(tuple(shape)) for shape in shapes)
            of_shapes = f" of shape{'s' * (len(shapes) > 1)} {shown}" if shapes else ""
            raise ConfigError(
                "results",
                self._results,
                "'token' or 'item' for each output, matching the size of its dimension 0",
                f"A step with {counted(num_rows['token'], 'token')} and "
                f"{counted(num_rows['item'], 'item')} returned "
                f"{counted(len(leaves), 'output')}{of_shapes}.",
            )
        parts = [
            leaf.split(list(lengths)) if kind == "token" else leaf.unbind(0)
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
        return [
            tree_unflatten([part[item] for part in parts], spec) for item in range(len(lengths))
        ]


def _num_items(name: str, values: Any) -> int:
    try:
        return len(values)
    except TypeError:
        raise InputError(
            name,
            f"Input {name!r} must be a sequence with one value per item, got "
            f"{describe_value(values)}.",
        ) from None


def _length(name: str, item: int, value: Any) -> int:
    shape = getattr(value, "shape", ())
    if not shape:
        raise InputError(
            name,
            f"Item {item} of input {name!r} must be a tensor or array with one row per token, got "
            f"{describe_value(value)}.",
        )
    return int(shape[0])
