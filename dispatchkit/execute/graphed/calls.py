"""GraphedCalls: finds the form of each call of a graphed target, and runs the call."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import attrs
import torch

from dispatchkit.dispatch import Lanes, Reason
from dispatchkit.errors import ConfigError, InputError, counted, format_value
from dispatchkit.execute.graphed.batch import guess_batch_dims
from dispatchkit.execute.graphed.call_cache import MAX_CACHED_CALLS, CallCache
from dispatchkit.execute.graphed.forms import Form
from dispatchkit.execute.graphed.gradients import HeldWeights
from dispatchkit.execute.graphed.plain import PlainSteps
from dispatchkit.execute.graphed.varying import Family, Shapes
from dispatchkit.execute.io.input_errors import unsupported_kind
from dispatchkit.execute.io.inputs import RESERVED_NAMES
from dispatchkit.execute.io.tree import tree_flatten
from dispatchkit.execute.lanes.lane_set import StepFuture
from dispatchkit.execute.memory import GraphMemory, MemoryGroup
from dispatchkit.execute.replay.plans import AGAIN
from dispatchkit.execute.runner import GraphRunner
from dispatchkit.execute.step.guard import address_reader
from dispatchkit.execute.step.reasons import EagerStepWarning
from dispatchkit.keys.checks import whole_number
from dispatchkit.keys.records import changed_settings
from dispatchkit.observe.counters import RunnerStats
from dispatchkit.once import Once, warn_at_call

_is_grad_enabled: Callable[[], bool] = torch._C.is_grad_enabled

#: Default of ``batch_dims``; None would mean that no tensor is batched.
DERIVED = "derived"

#: Maximum number of forms with graphs; calls of further forms run eager.
MAX_FORMS = 16

#: Reasons that cause no warning, because the call has nothing to replay.
_SILENT = frozenset({Reason.EMPTY_BATCH})

_TRAINING = (
    "The module is in training mode and gradients are enabled, which replays do not support. For "
    "inference, call model.eval()."
)
_REQUIRES_GRAD = (
    "Tensors of the call require gradients ({}), which replays do not support. If gradients are "
    "not needed, detach the tensors, or make the call under torch.no_grad()."
)
_HOLDS_WEIGHTS = (
    "The function holds weights that require gradients, so its results {} gradients too. If "
    "gradients are not needed, make the call under torch.no_grad()."
)
_PADDING_CHANGES = (
    "Calls differ in sizes other than the batch size, and {}. Graphs are therefore captured for "
    f"each exact size, up to {MAX_FORMS} forms of calls. To let sizes share graphs, pass a mask "
    "that hides padding, or use GraphRunner(..., axes=[Axis(...)]) with fill values that do not "
    "change results."
)

_layout_of: Callable[[Any], Any] = attrgetter("layout")


@attrs.frozen
class GraphedStats:
    """Counters of the calls of a graphed module or function.

    Attributes:
        calls: Number of calls.
        plain: Number of calls that ran eager without a runner, by reason.
        runners: Counters of each runner, by a description of its form. A form whose capacity or
            buckets changed has had several runners, each with its own entry.
    """

    calls: int
    plain: dict[str, int]
    runners: dict[str, RunnerStats]

    @property
    def steps_by_mode(self) -> dict[str, int]:
        """Number of steps of all runners by runtime mode; eager calls count as NONE."""
        total = Counter({"NONE": sum(self.plain.values())})
        for one in self.runners.values():
            total.update(one.steps_by_mode)
        return dict(total)

    def __str__(self) -> str:
        replayed = sum(count for mode, count in self.steps_by_mode.items() if mode != "NONE")
        lines = [f"{counted(self.calls, 'call')}, {replayed} replayed"]
        lines += [
            f"eager without a runner, {reason}: {count}" for reason, count in self.plain.items()
        ]
        for form, one in self.runners.items():
            eager = "".join(f", eager {why} {n}" for why, n in one.eager_by_reason.items())
            steps = sum(count for mode, count in one.steps_by_mode.items() if mode != "NONE")
            lines.append(f"{form}: {one.captures} captured, {steps} replayed{eager}")
        return "\n".join(lines)


@attrs.frozen
class _GradientProbe:
    """A marker for a call that runs eager to show whether calls of its kind need gradients.

    Attributes:
        kind: Kind of the call: nesting of its arguments, values that are not tensors, and the
            number of dimensions of each tensor.
    """

    kind: Hashable


@attrs.frozen
class _Route:
    """The form and sizes of calls with the same cache key.

    Attributes:
        form: Form of the calls.
        sizes: Size of the calls along each axis, by name.
        num_rows: Number of rows in the batch.
        kind: Kind of the calls, as in ``_GradientProbe``.
        names: Keywords of the calls, in the order of the form's inputs.
        types: Types of the tensors; a cache key does not contain them.
        layouts: Layouts of the tensors; a cache key does not contain them.
    """

    form: Form
    sizes: Mapping[str, int]
    num_rows: int
    kind: Hashable
    names: tuple[str, ...]
    types: tuple[type, ...]
    layouts: tuple[torch.layout, ...]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the tensors of a call have the types and layouts of the route."""
        return (*map(type, tensors),) == self.types and (*map(_layout_of, tensors),) == self.layouts


#: Result of analyzing a call: the reason why it runs eager, or the way to run it.
_Analysis = str | _GradientProbe | PlainSteps | _Route
#: Route of a call, current runner of the form, and tensors of the call.
_RoutedCall = tuple[_Route, GraphRunner, Sequence[torch.Tensor]]


class GraphedCalls:
    """The calls of one module or function, with a runner for each form.

    Args:
        target: Module or function to run.
        batch_dims: One batch dimension for all tensors, or a dictionary by tensor name, in which
            None marks an unbatched tensor. ``DERIVED`` derives the dimensions from calls.
        settings: Arguments of the runners, by name.

    Attributes:
        target: The given module or function.
        module: The target if it is a module, else None.
        settings: The given arguments of the runners.
        memory: The ``GraphMemory`` of all runners, which share its budget and, if possible, a pool.
        batch_dims: The given batch dimensions.
        grows: Whether no capture sizes were given, so that the sizes of each form grow with its
            largest batch.
    """

    target: Callable[..., Any]
    settings: dict[str, Any]

    def __init__(
        self,
        target: Callable[..., Any],
        batch_dims: int | Mapping[str, int | None] | str | None,
        settings: dict[str, Any],
    ) -> None:
        if not callable(target):
            hint = "Pass a torch.nn.Module or a callable."
            raise ConfigError("module_or_function", target, "a module or a function", hint)
        self.target, self.settings = target, settings
        self._of_runners = _sharing_memory(settings)
        self.memory: GraphMemory = self._of_runners["lanes"].memory.memory
        self.module: torch.nn.Module | None = (
            target if isinstance(target, torch.nn.Module) else None
        )
        given = {*settings, *changed_settings(settings["options"].config)}
        self.grows: bool = given.isdisjoint({"sizes", "max_num_tokens"})
        self.batch_dims = batch_dims
        self._families: dict[Any, Family] = {}
        self._forms: dict[Any, Form] = {}
        # Form and axis sizes of calls, by their properties other than the batch size.
        self._routes: dict[Any, tuple[Form, Mapping[str, int]]] = {}
        self._dims: dict[Any, list[int | None]] = {}
        self._cache: CallCache[_Analysis] = CallCache()
        self._lock = threading.RLock()
        self._plain: Counter[str] = Counter()
        self._calls = 0
        self._once = Once()
        self._weights = HeldWeights(target)
        self._record_address()
        try:
            self._signature: inspect.Signature | None = inspect.signature(
                target.forward if isinstance(target, torch.nn.Module) else target
            )
        except (TypeError, ValueError):
            self._signature = None  # a builtin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call through the runner of its form, or run it eager and count the reason."""
        self._calls += 1
        has_grad, is_training = _is_grad_enabled(), getattr(self.module, "training", False)
        cache = self._cache
        cached = cache.get_guarded(args, kwargs, has_grad, is_training)
        is_sure = cached is not None
        if cached is None:
            cached = cache.get(args, kwargs, has_grad, is_training)
        routed: _RoutedCall | None = None
        if isinstance(cached, PlainSteps):
            result = cached.run(self.target, args, kwargs)
            if result is not AGAIN:
                return result
        elif isinstance(cached, str):
            self._plain[cached] += 1
            return self.target(*args, **kwargs)
        elif isinstance(cached, _GradientProbe):
            return self._run_probe(cached, args, kwargs)
        elif cached is not None:
            routed = self._reuse_route(cached, args, kwargs, has_grad, is_sure)
        if routed is None:
            analyzed = self._analyze(args, kwargs)
            if isinstance(analyzed, str):
                cache.put(args, kwargs, has_grad, is_training, analyzed)
                return self._run_eager(analyzed, args, kwargs)
            if isinstance(analyzed, _GradientProbe):
                cache.put(args, kwargs, has_grad, is_training, analyzed)
                return self._run_probe(analyzed, args, kwargs)
            routed, cached = analyzed, None
        route, runner, tensors = routed
        eager = runner.lanes[0].eager
        num_eager = eager.num_runs
        result = route.form.run(runner, tensors, route.sizes, args, kwargs)
        if eager.num_runs != num_eager and not route.sizes:
            plain = PlainSteps(route.form, runner, route.num_rows, route.names, has_grad)
            cache.put(args, kwargs, has_grad, is_training, plain)
        elif cached is None and len(tensors) == len(args) + len(kwargs):
            cache.put(args, kwargs, has_grad, is_training, route)
        return result

    def submit(self, *args: Any, **kwargs: Any) -> StepFuture:
        """Queue a call on one of the lanes and return immediately.

        Raises:
            InputError: The call cannot run through graphs; the message contains the reason.
        """
        route, runner, tensors = self._route_or_raise(args, kwargs)
        self._calls += 1
        return runner.submit(*tensors, **route.sizes)

    def capture(self, *args: Any, **kwargs: Any) -> int:
        """Capture all sizes for the form of a call in advance; return the number of new graphs.

        Raises:
            InputError: The call cannot run through graphs; the message contains the reason.
        """
        route, runner, _ = self._route_or_raise(args, kwargs, for_result=False)
        form = route.form
        num_graphs = runner.capture().num_graphs
        form.fix_buckets()
        if not num_graphs and not form.has_graphs():
            warn_at_call(
                f"No graph was captured for calls with {form}, so they run eager. To see the "
                f"reason for each size, print .graphed.runners[{self.runners.index(runner)}] of "
                f"the graphed {self._noun}.",
                EagerStepWarning,
            )
        return num_graphs

    def __str__(self) -> str:
        name = getattr(self.target, "__qualname__", type(self.target).__name__)
        problems = dict.fromkeys(
            entry.reason
            for runner in self.runners
            for entry in runner.registry.entries.values()
            if entry.reason
        )
        return "\n".join([f"Graphs of {name}", str(self.stats()), *problems])

    def invalidate(self) -> None:
        """Release all graphs because memory that they read was replaced."""
        with self._lock:
            for form in self._forms.values():
                if form.runner is not None:
                    form.runner.invalidate()

    def stats(self) -> GraphedStats:
        """Return the counters of all calls."""
        with self._lock:
            runners: dict[str, RunnerStats] = {}
            for form in self._forms.values():
                for words, one in form.stats().items():
                    # Two forms may have the same description, for example if calls of one form pass
                    # a value by position, and calls of the other by name.
                    count = sum(1 for name in runners if name.partition(" #")[0] == words)
                    runners[f"{words} #{count + 1}" if count else words] = one
            plain = {str(reason): count for reason, count in dict(self._plain).items()}
            return GraphedStats(self._calls, plain, runners)

    @property
    def _noun(self) -> str:
        """The kind of target, for messages."""
        return "function" if self.module is None else "module"

    @property
    def runners(self) -> tuple[GraphRunner, ...]:
        """The runner of each form, in the order of first calls."""
        with self._lock:
            made = tuple(form.runner for form in self._forms.values())
        return tuple(runner for runner in made if runner is not None)

    # -- internals ----------------------------------------------------------------------

    def _reuse_route(
        self,
        route: _Route,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        has_grad: bool,
        is_sure: bool,
    ) -> _RoutedCall | None:
        """Return a call with a cached route, or None if the call must be analyzed."""
        tensors = (*args, *[kwargs[name] for name in route.names]) if kwargs else args
        if not (is_sure or route.fits(tensors)) or self._read_address() != self._address:
            return None
        if self.module is None and has_grad and self._weights.need_gradients(route.kind):
            return None
        with self._lock:
            return route, route.form.runner_for(route.num_rows, route.sizes), tensors

    def _analyze(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, for_result: bool = True
    ) -> str | _GradientProbe | _RoutedCall:
        """Return the route, runner and tensors of a call, or the reason why it runs eager.

        Args:
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
            for_result: Whether the caller uses the result, which may require gradients.
        """
        if len(kwargs) > 1:
            kwargs = dict(sorted(kwargs.items()))  # keyword order does not matter
        leaves: Sequence[Any] = (*args, *kwargs.values())
        nesting: Any = (len(args), tuple(kwargs))
        tensors = leaves
        constants: tuple[Any, ...] = ()
        if not all(isinstance(one, torch.Tensor) for one in leaves):
            leaves, spec = tree_flatten((args, kwargs))
            nesting = repr(spec)
            tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
            constants = tuple(
                # Floats in hexadecimal, because 0.0 equals -0.0 and NaN does not equal itself.
                (at, type(one), one.hex() if isinstance(one, float) else one)
                for at, one in enumerate(leaves)
                if not isinstance(one, torch.Tensor)
            )
        if torch.is_grad_enabled() and (
            getattr(self.module, "training", False) or any(one.requires_grad for one in tensors)
        ):
            return Reason.GRADIENTS
        if self._read_address() != self._address:
            self._record_address()
            self.invalidate()
        kind = (nesting, constants, tuple(one.dim() for one in tensors))
        try:
            hash(kind)
        except TypeError:
            return Reason.UNHASHABLE_VALUE
        if (
            for_result
            and self.module is None
            and torch.is_grad_enabled()
            and self._weights.need_gradients(kind)
        ):
            return _GradientProbe(kind)
        dims = self._dims.get(kind)
        try:
            rows = None if dims is None else _rows(tensors, dims)
        except RuntimeError:  # a nested tensor has no shape
            rows = None
        if dims is None or rows is None:
            if any(map(unsupported_kind, tensors)):
                return Reason.TENSOR_KIND
            derived = self._batch_dims_of(args, kwargs, tensors, dims)
            if isinstance(derived, str):
                return derived
            with self._lock:
                dims = self._dims[kind] = derived
                self._cache.clear()  # earlier calls may now have a different form
            rows = next(
                one.shape[dim] for one, dim in zip(tensors, dims, strict=True) if dim is not None
            )
        if rows == 0:
            return Reason.EMPTY_BATCH
        key = (
            kind,
            tuple(dims),
            tuple(
                (
                    type(one),
                    one.layout,
                    one.dtype,
                    one.device,
                    one.shape if dim is None else _without(one.shape, dim),
                )
                for one, dim in zip(tensors, dims, strict=True)
            ),
        )
        with self._lock:
            form_and_sizes = self._routes.get(key)
            if form_and_sizes is None:
                found = self._find_form(key, args, kwargs, tensors, dims)
                if isinstance(found, str):
                    return found
                form_and_sizes = found
            form, sizes = form_and_sizes
            runner = form.runner_for(rows, sizes)
        types, layouts = tuple(map(type, tensors)), tuple(map(_layout_of, tensors))
        route = _Route(form, sizes, rows, kind, tuple(kwargs), types, layouts)
        return route, runner, tensors

    def _find_form(
        self,
        key: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        dims: Sequence[int | None],
    ) -> str | tuple[Form, Mapping[str, int]]:
        """Return the form and axis sizes of a call with new shapes, or why it runs eager."""
        if any(map(unsupported_kind, tensors)):
            return Reason.TENSOR_KIND
        if len({one.device for one in tensors}) > 1:
            return Reason.SEVERAL_DEVICES
        shapes: Shapes = tuple(
            tuple(None if axis == dim else size for axis, size in enumerate(one.shape))
            for one, dim in zip(tensors, dims, strict=True)
        )
        name = (*key[:2], tuple((one.dtype, one.device) for one in tensors))
        family = self._families.setdefault(name, Family())
        sizes = family.sizes(shapes)
        if sizes is None and family.may_vary(shapes):
            first = self._forms[name, family.first]
            if first.is_pure():
                with torch.no_grad():
                    problem = family.try_axes(shapes, tensors, first.run_on)
                if problem:
                    warn_at_call(_PADDING_CHANGES.format(problem), EagerStepWarning)
                sizes = family.sizes(shapes)
        axes = None if sizes is None else family.axes
        form_name = (name, shapes if axes is None else axes.shapes)
        form = self._forms.get(form_name)
        if form is None:
            if len(self._forms) >= MAX_FORMS:
                return Reason.TOO_MANY_FORMS
            form = self._forms[form_name] = Form(
                self.target,
                self._of_runners,
                self.grows,
                args,
                kwargs,
                shapes if axes is None else axes.shapes,
                [0] * len(tensors) if axes is None else family.fills,
                self._names(args, kwargs, len(tensors)),
                [
                    name
                    for name, value in self._arguments(args, kwargs)
                    for _ in tree_flatten(value)[0]
                ],
            )
            family.note_first(shapes)
            self._cache.clear()
        if len(self._routes) >= MAX_CACHED_CALLS:
            self._routes.clear()
        found = self._routes[key] = form, sizes or {}
        return found

    def _route_or_raise(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, for_result: bool = True
    ) -> _RoutedCall:
        found = self._analyze(args, kwargs, for_result=for_result)
        if isinstance(found, _GradientProbe):
            found = Reason.GRADIENTS
        if isinstance(found, str):
            next_step = self._next_step(found, args, kwargs)
            raise InputError(
                found,
                f"The call cannot run through graphs (reason: {found}). {next_step} To run the "
                f"call eager, call the {self._noun} directly.",
            )
        return found

    def _batch_dims_of(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        known: Sequence[int | None] | None,
    ) -> str | list[int | None]:
        """Return the batch dimension of each tensor, or why the call runs eager.

        Raises:
            ConfigError: The declared ``batch_dims`` do not match the call.
        """
        if self.batch_dims != DERIVED:
            return self._declared_dims(args, kwargs, tensors)
        module = self.module
        time_first = isinstance(module, torch.nn.RNNBase) and not module.batch_first
        dims = guess_batch_dims(tensors, known, time_first=time_first)
        return dims if any(dim is not None for dim in dims) else Reason.NO_BATCH

    def _declared_dims(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> str | list[int | None]:
        declared = self.batch_dims
        names = self._names(args, kwargs, len(tensors))
        if isinstance(declared, Mapping):
            odd = sorted(set(declared) - set(names))
            if odd:
                hint = "Correct the names, or remove them from batch_dims."
                raise ConfigError(
                    "batch_dims",
                    odd,
                    f"keyed by names of tensors in the call ({', '.join(names)})",
                    hint,
                )
            dims = [declared.get(name) for name in names]
        else:
            dims = [declared if one.dim() else None for one in tensors]  # type: ignore[misc]
        for name, one, dim in zip(names, tensors, dims, strict=True):
            if dim is not None and (whole_number(dim) is None or not 0 <= dim < one.dim()):
                is_named = isinstance(declared, Mapping)
                hint = "To declare tensors separately, pass a dictionary keyed by tensor name."
                dims_of = {0: "None", 1: "0 or None"}
                allowed = dims_of.get(one.dim(), f"a number from 0 to {one.dim() - 1}, or None,")
                raise ConfigError(
                    f"batch_dims[{name!r}]" if is_named else "batch_dims",
                    dim,
                    f"{allowed} for tensor {name!r} of shape {tuple(one.shape)}",
                    "" if is_named else hint,
                )
        return dims if any(dim is not None for dim in dims) else Reason.NO_BATCH

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the arguments of a call with their parameter names."""
        pairs: list[tuple[str, Any]] = [(f"arg{index}", one) for index, one in enumerate(args)]
        if self._signature is not None:
            names = [
                one.name
                for one in self._signature.parameters.values()
                if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
            ]
            pairs[: len(names)] = [
                (name, one) for name, (_, one) in zip(names, pairs, strict=False)
            ]
        return [*pairs, *kwargs.items()]

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[str]:
        """Return a name for each tensor of a call: the parameter name, possibly numbered."""
        found: list[str] = []
        for name, value in self._arguments(args, kwargs):
            tensors = [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]
            alone = len(tensors) == 1
            base = f"{name}_" if name in RESERVED_NAMES else name
            found += [base if alone else f"{base}_{index}" for index in range(len(tensors))]
        if len(found) != count or len(set(found)) != count:  # the names are ambiguous
            return [f"input_{index}" for index in range(count)]
        return found

    def _run_eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._plain[reason] += 1
        name = reason, getattr(self.module, "training", False)
        if reason not in _SILENT and self._once.first(name):
            next_step = self._next_step(reason, args, kwargs)
            if next_step == _TRAINING:
                next_step += " In a training loop, this is expected."
            self._warn_without_graphs(reason, next_step)
        return self.target(*args, **kwargs)

    def _next_step(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        kwargs = dict(sorted(kwargs.items()))
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        named = list(zip(self._names(args, kwargs, len(tensors)), tensors, strict=True))
        if reason == Reason.GRADIENTS:
            if getattr(self.module, "training", False):
                return _TRAINING
            found = [name for name, one in named if one.requires_grad]
            if not found:
                return _HOLDS_WEIGHTS.format("may require")
            return _REQUIRES_GRAD.format(_some(found))
        if reason == Reason.NO_BATCH:
            found = [name for name, one in named if one.dim()]
            if not found:
                return (
                    "The call has no tensor with dimensions. Pass a tensor with a batch dimension."
                )
            return (
                f"batch_dims declares no batch dimension for the tensors of the call "
                f"({_some(found)}). Declare at least one, for example with "
                f"graphed(batch_dims={{{found[0]!r}: 0}})."
            )
        if reason == Reason.TENSOR_KIND:
            name, kind = next(
                (name, kind) for name, one in named if (kind := unsupported_kind(one))
            )
            return (
                f"Tensor {name} is {kind}. Pass a plain strided tensor, and convert it inside the "
                f"graphed {self._noun} if necessary."
            )
        if reason == Reason.UNHASHABLE_VALUE:
            kinds = {type(one).__name__ for one in leaves if not _is_hashable(one)}
            return (
                f"The call contains a value that is not hashable ({_some(kinds)}). Pass numbers, "
                "strings, tuples or tensors."
            )
        if reason == Reason.EMPTY_BATCH:
            return "The batch has no rows. Pass at least one row."
        if reason == Reason.SEVERAL_DEVICES:
            devices = " and ".join(sorted({str(one.device) for one in tensors}))
            return f"The tensors of the call are on {devices}. Move them to one device."
        return self._describe_forms()

    def _describe_forms(self) -> str:
        """Describe how the forms of calls differ, and how to reduce their number."""
        with self._lock:
            forms = list(self._forms.values())
        shapes: dict[str, set[str]] = {}
        values: dict[tuple[int, str], set[str]] = {}
        for form in forms:
            for name, text in form.shapes():
                shapes.setdefault(name, set()).add(text)
            for place, value in zip(enumerate(form.arguments), form.constants, strict=True):
                values.setdefault(place, set()).add(format_value(value))
        varied = [
            f"tensor {name} differs between calls ({_some(found)})"
            for name, found in shapes.items()
            if len(found) > 1
        ]
        hints = []
        if varied:
            hints.append("To let sizes share graphs, use GraphRunner(..., axes=[Axis(...)]).")
        if any(len(found) > 1 for found in values.values()):
            (_, name), found = max(values.items(), key=lambda item: len(item[1]))
            varied.append(f"argument {name!r} differs between calls ({_some(found)})")
            hints.append("If this argument is a number, pass it as a tensor.")
        reached = f"The maximum of {counted(len(forms), 'form')} of calls has been reached"
        if not varied:
            return (
                f"{reached}: calls differ in the names or nesting of their arguments. Pass the "
                "arguments in the same way in all calls."
            )
        return f"{reached}: {'; '.join(varied)}. {' '.join(hints)}"

    def _warn_without_graphs(self, reason: str, next_step: str) -> None:
        warn_at_call(
            f"Calls run without graphs (reason: {reason}). {next_step} This warning is issued "
            "once per reason; .graphed.stats() counts these calls.",
            EagerStepWarning,
        )

    def _run_probe(
        self, probe: _GradientProbe, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call eager, and record whether its result requires gradients."""
        result = self.target(*args, **kwargs)
        if not self._weights.note(probe.kind, result):
            self._plain[Reason.FIRST_CALL] += 1
            self._cache.clear()  # calls of this kind may have graphs from now on
            return result
        self._plain[Reason.GRADIENTS] += 1
        if self._once.first("held weights"):
            self._warn_without_graphs(Reason.GRADIENTS, _HOLDS_WEIGHTS.format("require"))
        return result

    def _record_address(self) -> None:
        """Record an address that changes when the module is moved."""
        self._read_address = int if self.module is None else address_reader(self.module)
        self._address = self._read_address()


def _sharing_memory(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of each runner, including the shared memory.

    Raises:
        ConfigError: ``memory`` is invalid, or ``lanes`` also has a memory.
    """
    lanes, options = settings.get("lanes", 1), settings["options"]
    lanes = lanes if isinstance(lanes, Lanes) else Lanes(lanes)
    given = settings.get("memory")
    if given is not None and lanes.memory is not None:
        hint = "Pass the memory only once, as memory=... or lanes=Lanes(memory=...)."
        raise ConfigError("memory", given, "omitted if lanes contains a memory", hint)
    group = MemoryGroup.of(lanes.memory if given is None else given)
    if group is None:
        limits = options.memory
        group = GraphMemory(max_bytes=limits.max_bytes).group("graphed")
        options = attrs.evolve(options, memory=attrs.evolve(limits, max_bytes=None))
    lanes = attrs.evolve(lanes, memory=group)
    others = {name: value for name, value in settings.items() if name != "memory"}
    return {**others, "lanes": lanes, "options": options}


def _rows(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> int | None:
    """Return the common batch size of all batched tensors, or None if sizes differ."""
    rows = None
    for one, dim in zip(tensors, dims, strict=True):
        if dim is not None:
            size = one.shape[dim]
            if rows is None:
                rows = size
            elif size != rows:
                return None
    return rows


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], -1, *shape[dim + 1 :])


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _some(found: Iterable[str]) -> str:
    """Return the first three values as text, with the number of further values."""
    ordered = sorted(found)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
