"""RunnerTests, the test kit for a GraphRunner with your own policy, backend or step.

    class TestMyPolicyRuns(RunnerTests):
        def make_policy(self):
            return MyPolicy()

The kits for policies and backends test each component separately. This kit runs steps through both
components and compares every result with an eager run of the step. Override the methods for your
components: the policy (default: ``vllm``), the backend (default: the tape, which needs no GPU), the
configuration, or the step with its inputs.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from dispatchkit.backends.base import GraphBackend
from dispatchkit.dispatch import Policy
from dispatchkit.errors import counted
from dispatchkit.keys import CUDAGraphMode, DispatchConfig, RuntimeMode
from dispatchkit.options import RunnerOptions


class RunnerTests:
    """Test kit for a GraphRunner; subclass it and override methods for your components.

    Attributes:
        seed: Seed of the random batches; the same seed gives the same batches.
        num_steps: Number of steps in each test of random batches.
        tolerance: Relative and absolute tolerance between a replay and an eager run.
    """

    seed: int = 0
    num_steps: int = 25
    tolerance: float = 1e-5

    # -- components -----------------------------------------------------------------------

    def make_policy(self) -> Policy | str:
        """Return a fresh policy, or the name of an installed policy."""
        return "vllm"

    def make_backend(self) -> GraphBackend:
        """Return a new backend."""
        pytest.importorskip("torch")
        from dispatchkit.backends.tape import TapeBackend

        return TapeBackend()

    def make_config(self) -> DispatchConfig:
        """Return the configuration of the runner."""
        return DispatchConfig(sizes=(1, 2, 4, 8), max_num_tokens=8, max_num_seqs=8)

    def make_step(self) -> Any:
        """Return a fresh step: a function of the inputs, or a list of pieces."""
        from dispatchkit.testing.sample_step import SampleStep

        return SampleStep(self.make_backend().torch_device).pieces()

    def make_inputs(self) -> Mapping[str, Any]:
        """Return the static inputs of the step by name."""
        from dispatchkit.execute import StaticInput

        return {
            "tokens": StaticInput((None,), "int64", fill=0),
            "values": StaticInput((None, 4), "float32", fill=-3.0),
        }

    def make_batch(self, rng: random.Random, num_tokens: int, device: str) -> dict[str, Any]:
        """Return the inputs of one call with ``num_tokens`` rows."""
        torch = pytest.importorskip("torch")
        tokens = [rng.randrange(16) for _ in range(num_tokens)]
        values = [[rng.uniform(-2, 2) for _ in range(4)] for _ in range(num_tokens)]
        return {
            "tokens": torch.tensor(tokens, dtype=torch.int64, device=device),
            "values": torch.tensor(values, device=device).reshape(num_tokens, 4),
        }

    # -- results --------------------------------------------------------------------------

    def test_results_are_those_of_the_step_itself(self) -> None:
        """Replays match eager runs at each capture size, and one token below and above it."""
        with self._pair() as pair:
            sizes = pair.runner.config.sizes
            edges = sorted({n + off for n in sizes for off in (-1, 0, 1)})
            for num_tokens in [n for n in edges if 0 < n <= pair.runner.config.max_num_tokens]:
                pair.call(num_tokens, uniform=0)
                pair.call(num_tokens, uniform=1)
            replays = sum(pair.runner.stats().hits.values())
            assert replays, (
                "No step replayed a graph, so replays were not tested. Steps ran eager for these "
                f"reasons: {pair.runner.stats().eager_by_reason}"
            )

    def test_large_batch_leaves_nothing_to_a_smaller_one(self) -> None:
        """Padding rows are filled again after a larger batch has used them.

        Otherwise, a step that reads across rows or writes by index would use rows of an earlier
        batch.
        """
        with self._pair() as pair:
            for num_tokens in (pair.largest, 1, pair.largest, 2, 1, pair.largest - 1, 1):
                pair.call(max(1, num_tokens))

    def test_result_keeps_its_values_over_later_calls(self) -> None:
        """Later steps do not change the result of an earlier step."""
        with self._pair() as pair:
            torch = pytest.importorskip("torch")
            tree = torch.utils._pytree  # noqa: SLF001 - torch has no public equivalent
            kept = []
            for num_tokens in (3, 2, 3, 1):
                result = pair.call(num_tokens)
                kept.append((result, tree.tree_map(_clone, result)))
            for result, before in kept:
                pair.compare(result, before, "A later step changed an earlier result.")

    def test_random_traffic_gives_eager_results(self) -> None:
        """Capturing, evicting, disabling or enabling graphs between steps changes no result."""
        with self._pair() as pair:
            rng, runner = pair.rng, pair.runner
            for _ in range(self.num_steps):
                keys = list(runner.registry)
                match rng.randrange(6) if keys else 5:
                    case 0 if runner.controls.has(key := rng.choice(keys)):
                        runner.evict(key)
                    case 1:
                        runner.controls.set_enabled(rng.random() < 0.5, key=rng.choice(keys))
                    case 2:
                        runner.capture()
                num_tokens = rng.randint(1, runner.config.max_num_tokens)
                pair.call(num_tokens, ceiling=rng.randrange(3))

    def test_threads_get_the_results_of_one(self) -> None:
        """Callers on several threads each get the result of their own batch."""
        with self._pair() as pair:
            rngs = [random.Random(self.seed + number) for number in range(4)]
            errors: list[BaseException] = []

            def work(rng: random.Random) -> None:
                try:
                    for _ in range(self.num_steps // 4):
                        pair.call(rng.randint(1, pair.largest), rng=rng)
                except BaseException as error:  # noqa: BLE001 - reported in the main thread
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(rng,)) for rng in rngs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors, f"A step on a separate thread failed: {errors[0]!r}"

    # -- reasons --------------------------------------------------------------------------

    def test_every_step_is_counted_once_and_every_eager_one_with_a_reason(self) -> None:
        """Operators act on the counters, so each step is counted once, with a reason if eager."""
        with self._pair() as pair:
            for _ in range(self.num_steps):
                num_tokens = pair.rng.randint(1, pair.runner.config.max_num_tokens)
                pair.call(num_tokens, ceiling=pair.rng.randrange(3))
            stats = pair.runner.stats()
            assert stats.steps == self.num_steps, (
                f"{self.num_steps} steps ran, but {stats.steps} were counted."
            )
            eager = stats.steps_by_mode.get(RuntimeMode.NONE.name, 0)
            reasons = stats.eager_by_reason
            assert sum(reasons.values()) == eager, (
                f"{eager} steps ran eager, but these reasons were counted: {reasons}."
            )
            assert "" not in reasons, f"Steps that ran eager without a reason: {reasons['']}."

    # -- failures -------------------------------------------------------------------------

    def test_capture_that_fails_costs_no_result(self) -> None:
        """If captures fail, all results still match eager runs, and the failures are counted."""
        with self._pair(fail_captures=lambda number: number % 2 == 0) as pair:
            for _ in range(self.num_steps):
                pair.call(pair.rng.randint(1, pair.largest))
            stats = pair.runner.stats()
            if pair.backend.num_captures >= 2:
                assert stats.capture_failures > 0, "A capture failed, but no failure was counted."

    def test_replay_that_fails_runs_the_step_once(self) -> None:
        """If a launch fails, the step runs eager exactly once."""
        with self._pair() as pair:
            for number in range(self.num_steps):
                pair.backend.refuse_launches = number % 5 == 4
                pair.call(pair.rng.randint(1, pair.largest))
            stats = pair.runner.stats()
            assert stats.steps == self.num_steps, (
                f"{self.num_steps} steps ran, but {stats.steps} were counted."
            )

    def test_graphs_given_up_leave_no_memory(self) -> None:
        """Memory does not grow if all graphs are repeatedly captured and released."""
        with self._pair() as pair:
            held = []
            for _ in range(4):
                pair.runner.capture()
                pair.call(2)
                held.append(pair.runner.num_bytes)
                pair.runner.clear()
            assert max(held[1:]) <= held[0], f"Memory grew; bytes after each capture: {held}"

    # -- internals ------------------------------------------------------------------------

    @contextmanager
    def _pair(self, fail_captures: Callable[[int], bool] = lambda number: False) -> Iterator[_Pair]:
        torch = pytest.importorskip("torch")
        from dispatchkit.execute import EagerStepWarning, GraphRunner

        backend = _FaultyBackend(self.make_backend(), fail_captures)
        options = RunnerOptions(config=self.make_config())
        without_graphs = attrs.evolve(
            options, config=attrs.evolve(options.config, mode=CUDAGraphMode.NONE)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            runner = GraphRunner(
                self.make_step(),
                self.make_inputs(),
                policy=self.make_policy(),
                backend=backend,
                options=options,
            )
            plain = GraphRunner(
                self.make_step(),
                self.make_inputs(),
                policy=_EagerPolicy(),
                backend=backend,
                options=without_graphs,
            )
            runner.capture()
            yield _Pair(self, torch, runner, plain, backend)
            backend.synchronize()
        faults = runner.dispatcher.num_policy_errors
        assert faults == 0, (
            f"The dispatcher counted {counted(faults, 'fault')} of the policy (an exception, or a "
            "decision that violates a hard constraint). The RuntimeWarning of this test describes "
            "the first fault."
        )


def _clone(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


class _EagerPolicy:
    """A policy without graphs, so every step runs eager."""

    name = "eager"

    def declare(self, config: DispatchConfig) -> list[Any]:
        return []

    def decide(self, batch: Any, graphs: Any) -> None:
        return None


class _Pair:
    """A runner under test, and a runner without graphs for comparison."""

    def __init__(
        self, tests: RunnerTests, torch: Any, runner: Any, plain: Any, backend: _FaultyBackend
    ) -> None:
        self.tests, self.torch, self.runner, self.plain = tests, torch, runner, plain
        self.backend = backend
        self.rng = random.Random(tests.seed)
        self.largest = runner.config.sizes[-1]
        self._lock = threading.Lock()

    def call(
        self,
        num_tokens: int,
        *,
        uniform: int | None = None,
        ceiling: int = 2,
        rng: random.Random | None = None,
    ) -> Any:
        """Run a batch through both runners, compare the results, and return that of ``runner``."""
        rng = self.rng if rng is None else rng
        uniform = rng.randrange(2) if uniform is None else uniform
        batch = self.tests.make_batch(rng, num_tokens, self.backend.torch_device)
        facts = {"num_reqs": num_tokens, "uniform": uniform, "ceiling": ceiling}
        result = self.runner(**batch, **facts)
        with self._lock:
            expected = self.plain(**batch)
        problem = f"The result of a step with {counted(num_tokens, 'token')} differs from eager."
        self.compare(result, expected, problem)
        return result

    def compare(self, result: Any, expected: Any, problem: str) -> None:
        """Check that two results agree within the tolerance."""
        self.backend.synchronize()
        self.torch.testing.assert_close(
            result,
            expected,
            rtol=self.tests.tolerance,
            atol=self.tests.tolerance,
            equal_nan=True,
            msg=lambda text: f"{problem} {text}",
        )


class _FaultyBackend:
    """A backend wrapper whose captures and launches fail on demand.

    Captures in segments do not fail.
    """

    def __init__(self, real: GraphBackend, fail_captures: Callable[[int], bool]) -> None:
        self._real, self._fail = real, fail_captures
        self.num_captures = 0
        self.refuse_launches = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def direct_launch(self, graph: Any) -> None:
        """Return None, because a direct launch of the graph cannot be made to fail."""

    def capture(self, run: Callable[[], Any], **options: Any) -> Any:
        """Capture the callable, or fail inside the capture."""
        self.num_captures += 1
        fails = self._fail(self.num_captures)

        def run_or_fail() -> Any:
            result = run()
            if fails:
                raise RuntimeError("This capture fails on purpose.")
            return result

        return _FaultyGraph(self._real.capture(run_or_fail, **options), self)


class _FaultyGraph:
    """A graph whose launches fail on demand."""

    def __init__(self, real: Any, backend: _FaultyBackend) -> None:
        self._real, self._backend = real, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def replay(self) -> None:
        """Launch the graph, unless launches are refused."""
        if self._backend.refuse_launches:
            raise RuntimeError("This launch is refused on purpose.")
        self._real.replay()
