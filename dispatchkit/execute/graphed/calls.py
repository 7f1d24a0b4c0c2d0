"""Find the form of each call of a graphed module or function, and run it."""

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
from dispatchkit.errors import ConfigError, InputError
from dispatchkit.execute.graphed.batch import guess_batch_dims
from dispatchkit.execute.graphed.forms import Form
from dispatchkit.execute.graphed.gradients import HeldWeights
from dispatchkit.execute.graphed.looks import MAX_LOOKS, Looks
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

#: The default of ``batch_dims``, nothing declared (None means that nothing is batched).
DERIVED = "derived"

#: Most forms with graphs; calls of further forms run eager.
MAX_FORMS = 16

#: Reasons of calls without graphs that are not warned about, since there is nothing to replay.
_SILENT = frozenset({Reason.EMPTY_BATCH})

#: What to do about calls that run eager.
_NEXT_STEPS: Mapping[str, str] = {
    Reason.NO_BATCH: (
        "No tensor of the call has a batch dimension; batch_dims= of graphed declares one."
    ),
    Reason.SEVERAL_DEVICES: "Move all tensors of the call to one device.",
    Reason.TENSOR_KIND: "Pass dense tensors, and convert them inside the graphed function.",
    Reason.UNHASHABLE_VALUE: "Pass numbers, strings, tuples or tensors.",
}
_TRAINING = (
    "The module is in training mode and gradients are enabled, which replays do not support. For "
    "inference, call model.eval(); in a training loop, there is nothing to do."
)
_REQUIRES_GRAD = (
    "A tensor of the call requires gradients, which replays do not support. If gradients are not "
    "needed, detach it or call under torch.no_grad()."
)
_PADDING_CHANGES = (
    "Calls differ in sizes other than the batch, and {}. So each exact size needs its own graphs, "
    f"for at most {MAX_FORMS} forms of calls. A mask that hides padding would let sizes share "
    "graphs, as would GraphRunner(..., axes=[Axis(...)]) with inputs whose fill is harmless."
)

_layout_of: Callable[[Any], Any] = attrgetter("layout")


@attrs.frozen
class GraphedStats:
    """Counters of the calls of a graphed module or function.

    Attributes:
        calls: Number of calls.
        plain: Calls that ran eager without a runner, by reason.
        runners: The counters of each form's runner, by a description of the form; a form whose
            sizes grew had one runner per capacity.
    """

    calls: int
    plain: dict[str, int]
    runners: dict[str, RunnerStats]

    @property
    def steps_by_mode(self) -> dict[str, int]:
        """Steps of all runners by runtime mode; eager calls count as NONE."""
        total = Counter({"NONE": sum(self.plain.values())})
        for one in self.runners.values():
            total.update(one.steps_by_mode)
        return dict(total)

    def __str__(self) -> str:
        replayed = sum(count for mode, count in self.steps_by_mode.items() if mode != "NONE")
        lines = [f"{self.calls} calls, {replayed} replayed"]
        lines += [f"plain, {reason}: {count}" for reason, count in self.plain.items()]
        for form, one in self.runners.items():
            eager = "".join(f", eager {why} {n}" for why, n in one.eager_by_reason.items())
            steps = sum(count for mode, count in one.steps_by_mode.items() if mode != "NONE")
            lines.append(f"{form}: {one.captures} captured, {steps} replayed{eager}")
        return "\n".join(lines)


@attrs.frozen
class _ByResult:
    """A call that runs eager; its result shows whether others of the kind must, too.

    Attributes:
        kind: The kind of call.
    """

    kind: Hashable


@attrs.frozen
class _Route:
    """How calls of one look are run.

    Attributes:
        form: Their form.
        sizes: The size of each axis.
        num_rows: Rows of the batch.
        kind: The kind of the calls.
        names: Their keywords, in the order of the form's inputs.
        types: Types of their tensors, which a look omits.
        layouts: Layouts of their tensors.
    """

    form: Form
    sizes: Mapping[str, int]
    num_rows: int
    kind: Hashable
    names: tuple[str, ...]
    types: tuple[type, ...]
    layouts: tuple[torch.layout, ...]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the tensors of a call of the look have the same types and layouts."""
        return (*map(type, tensors),) == self.types and (*map(_layout_of, tensors),) == self.layouts


#: What is known about calls of one look.
_Known = str | _ByResult | PlainSteps | _Route
#: The target of a call, its current runner, and the call's tensors.
_Found = tuple[_Route, GraphRunner, Sequence[torch.Tensor]]


class GraphedCalls:
    """The calls of one module or function, with a runner for each form.

    Args:
        target: The module or function.
        batch_dims: Batch dimension by parameter name, or one for all; derived by default.
        settings: Settings of the runners.

    Attributes:
        target: The module or function.
        module: The target if it is a module, else None.
        settings: Settings of the runners.
        memory: Memory that the runners share: a pool wherever possible, a budget and an account.
        batch_dims: As given.
        grows: Sizes are not declared, so each form's sizes grow with its largest batch.
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
            raise ConfigError("module_or_function", target, "a module or a function")
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
        # Forms by the shapes of calls, apart from the batch, with the sizes of axes.
        self._routes: dict[Any, tuple[Form, Mapping[str, int]]] = {}
        self._dims: dict[Any, list[int | None]] = {}
        # Why calls run eager, or the runner's steps they are.
        self._looks: Looks[_Known] = Looks()
        self._lock = threading.RLock()
        self._plain: Counter[str] = Counter()
        self._calls = 0
        self._once = Once()
        self._weights = HeldWeights(target)
        self._find_place()
        try:
            self._signature: inspect.Signature | None = inspect.signature(
                target.forward if isinstance(target, torch.nn.Module) else target
            )
        except (TypeError, ValueError):
            self._signature = None  # a builtin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call through its form's runner, or eager with a counted reason."""
        self._calls += 1
        has_grad, is_training = _is_grad_enabled(), getattr(self.module, "training", False)
        looks = self._looks
        known = looks.at_once(args, kwargs, has_grad, is_training)
        is_sure = known is not None
        if known is None:
            known = looks.get(args, kwargs, has_grad, is_training)
        found: _Found | None = None
        if isinstance(known, PlainSteps):
            result = known.run(self.target, args, kwargs)
            if result is not AGAIN:
                return result
        elif isinstance(known, str):
            self._plain[known] += 1
            return self.target(*args, **kwargs)
        elif isinstance(known, _ByResult):
            return self._run_for_gradients(known, args, kwargs)
        elif known is not None:
            found = self._follow(known, args, kwargs, has_grad, is_sure)
        if found is None:
            anew = self._find(args, kwargs)
            if isinstance(anew, str):
                looks.remember(args, kwargs, has_grad, is_training, anew)
                return self._run_plainly(anew, args, kwargs)
            if isinstance(anew, _ByResult):
                looks.remember(args, kwargs, has_grad, is_training, anew)
                return self._run_for_gradients(anew, args, kwargs)
            found, known = anew, None
        route, runner, tensors = found
        eager = runner.lanes[0].eager
        num_eager = eager.num_runs
        result = route.form.run(runner, tensors, route.sizes, args, kwargs)
        if eager.num_runs != num_eager and not route.sizes:
            plain = PlainSteps(route.form, runner, route.num_rows, route.names, has_grad)
            looks.remember(args, kwargs, has_grad, is_training, plain)
        elif known is None and len(tensors) == len(args) + len(kwargs):
            looks.remember(args, kwargs, has_grad, is_training, route)
        return result

    def submit(self, *args: Any, **kwargs: Any) -> StepFuture:
        """Queue a call on one of the lanes and return immediately.

        Raises:
            InputError: Such a call has no graphs; the message gives the reason.
        """
        route, runner, tensors = self._find_or_raise(args, kwargs)
        self._calls += 1
        return runner.submit(*tensors, **route.sizes)

    def capture(self, *args: Any, **kwargs: Any) -> int:
        """Capture all sizes for calls like this one in advance; return the number of graphs.

        Raises:
            InputError: Such a call has no graphs; the message gives the reason.
        """
        route, runner, _ = self._find_or_raise(args, kwargs, for_result=False)
        form = route.form
        num_graphs = runner.capture().num_graphs
        form.fix_buckets()
        if not num_graphs and not form.has_graphs():
            warn_at_call(
                f"Nothing was captured for {form}, so its calls run eager. "
                "print(fast.graphed.runners[-1]) shows the reason for each size.",
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
        """Release all graphs, after memory they read was replaced."""
        with self._lock:
            for form in self._forms.values():
                if form.runner is not None:
                    form.runner.invalidate()

    def stats(self) -> GraphedStats:
        """Return the counters."""
        with self._lock:
            runners: dict[str, RunnerStats] = {}
            for form in self._forms.values():
                for words, one in form.stats().items():
                    # Two forms may have the same description, for example if a value is given by
                    # position or by name.
                    count = sum(1 for name in runners if name.partition(" #")[0] == words)
                    runners[f"{words} #{count + 1}" if count else words] = one
            return GraphedStats(self._calls, dict(self._plain), runners)

    @property
    def runners(self) -> tuple[GraphRunner, ...]:
        """The runner of each form, in the order of first calls."""
        with self._lock:
            made = tuple(form.runner for form in self._forms.values())
        return tuple(runner for runner in made if runner is not None)

    # -- inside -------------------------------------------------------------------------

    def _follow(
        self,
        route: _Route,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        has_grad: bool,
        is_sure: bool,
    ) -> _Found | None:
        """Return the target of a call of a known look, or None if unknown."""
        tensors = (*args, *[kwargs[name] for name in route.names]) if kwargs else args
        if not (is_sure or route.fits(tensors)) or self._place_now() != self._place:
            return None
        if self.module is None and has_grad and self._weights.need_gradients(route.kind):
            return None
        with self._lock:
            return route, route.form.runner_for(route.num_rows, route.sizes), tensors

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, for_result: bool = True
    ) -> str | _ByResult | _Found:
        """Return a call's form, runner, tensors and sizes, or why it has none.

        Args:
            args: The call's arguments.
            kwargs: The call's keyword arguments.
            for_result: The caller uses the result, which may require gradients.
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
                # By its text: zeros of both signs are equal, and NaN is not equal to itself.
                (at, type(one), one.hex() if isinstance(one, float) else one)
                for at, one in enumerate(leaves)
                if not isinstance(one, torch.Tensor)
            )
        if torch.is_grad_enabled() and (
            getattr(self.module, "training", False) or any(one.requires_grad for one in tensors)
        ):
            return Reason.GRADIENTS
        if self._place_now() != self._place:
            self._find_place()
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
            return _ByResult(kind)
        dims = self._dims.get(kind)
        try:
            rows = None if dims is None else _rows(tensors, dims)
        except RuntimeError:  # a nested tensor has no shape
            rows = None
        if dims is None or rows is None:
            if any(map(unsupported_kind, tensors)):
                return Reason.TENSOR_KIND
            derived = self._derive(args, kwargs, tensors, dims)
            if isinstance(derived, str):
                return derived
            with self._lock:
                dims = self._dims[kind] = derived
                self._looks.clear()  # earlier calls may now belong to another form
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
            route = self._routes.get(key)
            if route is None:
                found = self._route(key, args, kwargs, tensors, dims)
                if isinstance(found, str):
                    return found
                route = found
            form, sizes = route
            runner = form.runner_for(rows, sizes)
        types, layouts = tuple(map(type, tensors)), tuple(map(_layout_of, tensors))
        found_route = _Route(form, sizes, rows, kind, tuple(kwargs), types, layouts)
        return found_route, runner, tensors

    def _route(
        self,
        key: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        dims: Sequence[int | None],
    ) -> str | tuple[Form, Mapping[str, int]]:
        """Return the form of a call with new shapes, and the sizes of its axes."""
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
                    self._warn(_PADDING_CHANGES.format(problem))
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
            )
            family.note_first(shapes)
            self._looks.clear()
        if len(self._routes) >= MAX_LOOKS:
            self._routes.clear()
        route = self._routes[key] = form, sizes or {}
        return route

    def _find_or_raise(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, for_result: bool = True
    ) -> _Found:
        found = self._find(args, kwargs, for_result=for_result)
        if isinstance(found, _ByResult):
            found = Reason.GRADIENTS
        if isinstance(found, str):
            raise InputError(
                found, f"Such a call runs without graphs: {found}. Call the function directly."
            )
        return found

    def _derive(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        known: Sequence[int | None] | None,
    ) -> str | list[int | None]:
        """Return the batch dimension of each tensor, declared or derived.

        Raises:
            ConfigError: The declaration does not match the call.
        """
        if self.batch_dims != DERIVED:
            return self._as_declared(args, kwargs, tensors)
        module = self.module
        time_first = isinstance(module, torch.nn.RNNBase) and not module.batch_first
        dims = guess_batch_dims(tensors, known, time_first=time_first)
        return dims if any(dim is not None for dim in dims) else Reason.NO_BATCH

    def _as_declared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> str | list[int | None]:
        declared = self.batch_dims
        names = self._names(args, kwargs, len(tensors))
        if isinstance(declared, Mapping):
            odd = sorted(set(declared) - set(names))
            if odd:
                raise ConfigError("batch_dims", odd, f"names of tensors of the call: {names}")
            dims = [declared.get(name) for name in names]
        else:
            dims = [declared if one.dim() else None for one in tensors]  # type: ignore[misc]
        for name, one, dim in zip(names, tensors, dims, strict=True):
            if dim is not None and (whole_number(dim) is None or not 0 <= dim < one.dim()):
                raise ConfigError(f"batch_dims[{name!r}]", dim, f"0..{one.dim() - 1} or None")
        return dims if any(dim is not None for dim in dims) else Reason.NO_BATCH

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[str]:
        """Return a name for each tensor of a call: its parameter's, possibly numbered."""
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
        found: list[str] = []
        for name, value in (*pairs, *kwargs.items()):
            tensors = [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]
            alone = len(tensors) == 1
            base = f"{name}_" if name in RESERVED_NAMES else name
            found += [base if alone else f"{base}_{index}" for index in range(len(tensors))]
        if len(found) != count or len(set(found)) != count:  # names that coincide
            return [f"input_{index}" for index in range(count)]
        return found

    def _run_plainly(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._plain[reason] += 1
        name = reason, getattr(self.module, "training", False)
        if reason not in _SILENT and self._once.first(name):
            self._warn(f"Calls run without graphs, reason {reason}. {self._next_step(reason)}")
        return self.target(*args, **kwargs)

    def _next_step(self, reason: str) -> str:
        if reason == Reason.GRADIENTS:
            return _TRAINING if getattr(self.module, "training", False) else _REQUIRES_GRAD
        if reason == Reason.TOO_MANY_FORMS:
            return self._what_varied()
        return _NEXT_STEPS[reason]

    def _what_varied(self) -> str:
        """Describe how the forms of calls differ, and how to reduce their number."""
        with self._lock:
            forms = list(self._forms.values())
        shapes: dict[str, set[str]] = {}
        values: dict[int, set[str]] = {}
        for form in forms:
            for name, text in form.shapes():
                shapes.setdefault(name, set()).add(text)
            for at, value in enumerate(form.constants):
                values.setdefault(at, set()).add(f"{value!r:.30}")
        varied = [
            f"{name} came as {_some(found)}" for name, found in shapes.items() if len(found) > 1
        ]
        if any(len(found) > 1 for found in values.values()):
            found = max(values.values(), key=len)
            varied.append(f"a value came as {_some(found)} (pass it as a tensor)")
        return (
            f"{len(forms)} forms of calls have graphs, which is the limit: "
            f"{'; '.join(varied)}. For sizes, declare GraphRunner(..., axes=[Axis(...)])."
        )

    def _warn(self, message: str) -> None:
        warn_at_call(f"{message} Warned once; stats() counts such calls.", EagerStepWarning)

    def _run_for_gradients(
        self, found: _ByResult, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call eager whose result may require gradients due to held weights."""
        result = self.target(*args, **kwargs)
        if not self._weights.note(found.kind, result):
            self._plain[Reason.FIRST_CALL] += 1
            self._looks.clear()  # such calls may have graphs from now on
            return result
        self._plain[Reason.GRADIENTS] += 1
        if self._once.first("held weights"):
            self._warn(
                "Calls run without graphs, reason gradients: the function holds weights that "
                "require gradients, so its results do, too. Call it under torch.no_grad() if "
                "gradients are not needed."
            )
        return result

    def _find_place(self) -> None:
        """Return a bound method of one of a module's tensors that reveals whether it was moved."""
        self._place_now = int if self.module is None else address_reader(self.module)
        self._place = self._place_now()


def _sharing_memory(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of each runner, with the shared memory.

    Raises:
        ConfigError: The given memory is invalid.
    """
    lanes, options = settings.get("lanes", 1), settings["options"]
    lanes = lanes if isinstance(lanes, Lanes) else Lanes(lanes)
    given = settings.get("memory")
    if given is not None and lanes.memory is not None:
        raise ConfigError("memory", given, "given in only one place", "lanes= also has one.")
    group = MemoryGroup.of(lanes.memory if given is None else given)
    if group is None:
        limits = options.memory
        group = GraphMemory(max_bytes=limits.max_bytes).group("graphed")
        options = attrs.evolve(options, memory=attrs.evolve(limits, max_bytes=None))
    lanes = attrs.evolve(lanes, memory=group)
    others = {name: value for name, value in settings.items() if name != "memory"}
    return {**others, "lanes": lanes, "options": options}


def _rows(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> int | None:
    """Return the batch size that all tensors agree on, or None."""
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


def _some(found: Iterable[str]) -> str:
    """Return the text of a few of many values."""
    ordered = sorted(found)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
