"""Cases for steps with graph breaks; test_breaks.py here and in gpu/ runs them."""

from __future__ import annotations

import gc
import itertools
import queue
import sys
import warnings

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dispatchkit import (
    BatchDescriptor,
    BufferOptions,
    CaptureOptions,
    GraphKey,
    GraphRunner,
    RunnerOptions,
    RuntimeMode,
    StaticInput,
    declare_support,
    eager_region,
    graph_break,
    graphed,
)
from dispatchkit.demo.decoder import Decoder, DecoderShape, KVCache
from dispatchkit.errors import ConfigError, ReplayError
from dispatchkit.execute import EagerStepWarning, eager_piece, graph_piece
from dispatchkit.execute.capture.eager_call import EagerCall
from dispatchkit.testing import OneBucketPolicy

WIDTH = 8
SHAPE = DecoderShape(num_layers=3, num_heads=2, head_dim=8, cache_len=12, num_slots=4, vocab=40)


@torch.library.custom_op("break_cases::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halve.register_fake
def _(x):
    return torch.empty_like(x)


UNSAFE = torch.library.Library("break_unsafe", "DEF")
UNSAFE.define("double(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
UNSAFE.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
UNSAFE.define("largest(Tensor x) -> int", tags=(torch.Tag.cudagraph_unsafe,))
UNSAFE.impl("largest", lambda x: int(x.amax()), "CompositeExplicitAutograd")


def calls_of(captured):
    return [part for part in captured.pieces.parts if isinstance(part, EagerCall)]


def in_capture():
    """Return whether a capture in segments is running, including between its segments."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "capture_segments":
        frame = frame.f_back
    return frame is not None


def program(layers, weights):
    """Return a step made of captured and eager layers and graph breaks."""
    rolled = eager_region(lambda x, number: torch.sin(x) + number)
    both = eager_region(lambda x: (x * 2, x.abs()))
    # nested: the inner region is part of the outer one
    outer = eager_region(lambda x: rolled(x, 1) * 2)

    @eager_region
    def into(out, x):
        out.copy_(x.cos())

    def step(x):
        first = x
        for number, kind in enumerate(layers):
            if kind == "matmul":
                x = x @ weights[number % len(weights)]
            elif kind == "eager":
                x = rolled(x, number)
            elif kind == "two":
                x = sum(both(x))
            elif kind == "into":
                out = torch.empty_like(x)
                into(out, x)
                x = out + x
            elif kind == "nested":
                x = outer(x)
            elif kind == "break":
                graph_break()
            else:
                x = x + first  # combines values from before and after all breaks
        return x

    return step


def pieces_of(decoder, cache):
    """Return the demo's decoder split by hand at attention."""

    def first(tokens, positions):
        hidden, angles = decoder.embed(tokens, positions)
        return hidden, angles, *decoder.block(0).before_attention(hidden, angles)

    def attention(layer):
        def attend(carried, positions, slots):
            hidden, angles, *given = carried
            return hidden, angles, decoder.attend(layer, *given, positions, slots, cache)

        return attend

    def after(layer):
        def run(carried):
            hidden, angles, attended = carried
            hidden = decoder.block(layer).after_attention(hidden, attended)
            if layer + 1 == decoder.shape.num_layers:
                return decoder.logits(hidden)
            return hidden, angles, *decoder.block(layer + 1).before_attention(hidden, angles)

        return run

    layers = range(decoder.shape.num_layers)
    pairs = [(eager_piece(attention(layer)), graph_piece(after(layer))) for layer in layers]
    return [graph_piece(first), *itertools.chain(*pairs)]


class BreakCases:
    """Subclasses define a fixture ``backend``."""

    def make(self, backend, step, *, sizes=(2, 4, 8), mode="PIECEWISE", **settings):
        settings.setdefault("inputs", {"x": StaticInput((None, WIDTH), "float32")})
        settings.setdefault("policy", OneBucketPolicy())
        inputs = settings.pop("inputs")
        return GraphRunner(step, inputs, sizes=sizes, mode=mode, backend=backend, **settings)

    def graph_of(self, runner, size):
        key = GraphKey(RuntimeMode.PIECEWISE, BatchDescriptor(size))
        return runner.registry.get(key).graph

    def rows(self, backend, number, seed=0):
        generator = torch.Generator().manual_seed(seed + number)
        return torch.rand(number, WIDTH, generator=generator).to(backend.torch_device)

    def weights(self, backend):
        generator = torch.Generator().manual_seed(7)
        return [
            (torch.randn(WIDTH, WIDTH, generator=generator) / 4).to(backend.torch_device)
            for _ in range(3)
        ]

    def check(self, backend, runner, step, numbers=(1, 2, 3, 8, 5, 1)):
        """Check that every step replays and equals eager."""
        for seed, number in enumerate(numbers):
            x = self.rows(backend, number, seed)
            torch.testing.assert_close(runner(x), step(x), rtol=1e-4, atol=1e-5)
        assert runner.stats().steps_by_mode["PIECEWISE"] == len(numbers), str(runner)

    def test_programs_with_breaks_anywhere_equal_eager(self, backend, layers):
        step = program(layers, self.weights(backend))
        runner = self.make(backend, step)
        report = runner.capture()
        assert not report.failed, report
        self.check(backend, runner, step)

    @pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
    def test_the_decoder_gives_the_numbers_of_pieces_cut_by_hand(self, backend, mode):
        """The cache must be equal too. The segments of a size share a pool."""
        device = backend.torch_device
        decoder, caches = Decoder(SHAPE, device=device), [KVCache(SHAPE, device) for _ in range(2)]
        inputs = {
            "tokens": StaticInput((None,), "int64", fill=0),
            "positions": StaticInput((None,), "int64", fill=0),
            "slots": StaticInput((None,), "int64", fill=SHAPE.sink_slot),
        }
        forms = decoder.step(caches[0]), pieces_of(decoder, caches[1])
        runners = [
            self.make(backend, step, inputs=inputs, mode=mode, state=cache.tensors)
            for step, cache in zip(forms, caches, strict=True)
        ]
        for runner in runners:
            assert not runner.capture().failed
        for number, uniform in ((5, 0), (3, 0), (4, 1), (8, 0), (1, 1)):
            ints = torch.arange(number, device=device)
            given = {"tokens": ints * 3 % 40, "positions": ints // 4, "slots": ints % 4}
            one, other = (runner(**given, uniform=uniform) for runner in runners)
            assert torch.equal(one, other)
        for mine, pieces in zip(*(cache.real_rows() for cache in caches), strict=True):
            assert torch.equal(mine, pieces)
        stats = [runner.stats() for runner in runners]
        assert stats[0].steps_by_mode == stats[1].steps_by_mode
        graph = self.graph_of(runners[0], 8)
        assert len(calls_of(graph)) == SHAPE.num_layers
        assert len(graph.pieces.segments) == SHAPE.num_layers + 1
        assert all(one.operations > 0 for one in graph.pieces.segments)

    def test_a_result_that_varies_is_found_each_time(self, backend):
        """A step whose results differ in kind or shape runs eager, from the state before it."""
        device, kind = backend.torch_device, {"now": "same"}
        state = torch.zeros(1, device=device)

        @eager_region
        def vary(x):
            found = {
                "type": x.double,
                "strides": lambda: x.t().contiguous().t(),
                "number": lambda: (x, x),
                "value": lambda: None,
                "shape": lambda: torch.cat((x, x)),
            }
            return found.get(kind["now"], lambda: x * 1)()

        def step(x):
            state.add_(1)
            x = vary(x)
            x = x[0] if isinstance(x, tuple) else x
            return None if x is None else x.float()[:4] + state

        runner = self.make(backend, step, sizes=(4,), state=[state])
        assert not runner.capture().failed
        x, done = self.rows(backend, 4), 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            for number, now in enumerate(("same", "type", "same", "strides", "number", "value")):
                kind["now"] = now
                before = state.item()
                got = runner(x)
                assert state.item() == before + 1, f"{now}: not put back"
                assert (got is None) == (now == "value")
                if got is not None:
                    torch.testing.assert_close(got, x + before + 1)
                done += now != "same"
                assert sum(runner.stats().differing_calls.values()) == done, (number, now)
            kind["now"] = "shape"
            runner(x)
        stats = runner.stats()
        line = list(stats.differing_calls)
        assert len(line) == 1
        assert "break_cases.py:" in line[0]
        assert stats.eager_by_reason == {"call_differs": 5}

    def test_what_cannot_be_put_back_is_refused_when_it_is_captured(self, backend):
        """Accepted if the call returns nothing that may vary."""
        cache = torch.zeros(1 << 10, device=backend.torch_device)
        returns = eager_region(lambda x: x + cache.add_(1)[0])
        little = CaptureOptions(state_limit_bytes=64, prove_rows=False)

        @eager_region
        def into(out, x):
            out.copy_(x + cache.add_(1)[0])

        def writes(x):
            out = torch.empty_like(x)
            into(out, x)
            return out * 2

        options = RunnerOptions(capture=little)
        refused = self.make(
            backend, lambda x: returns(x) * 2, sizes=(4,), state=[cache], options=options
        )
        report = refused.capture()
        assert "call_differs" in str(report.failed)
        assert "break_cases.py" in str(report.failed)
        taken = self.make(backend, writes, sizes=(4,), state=[cache], options=options)
        assert not taken.capture().failed
        assert cache[0].item() == 0
        x = self.rows(backend, 4)
        torch.testing.assert_close(taken(x), (x + 1) * 2)
        assert cache[0].item() == 1

    def test_rows_behind_a_batch_are_cleared_after_each_call(self, backend):
        """Values left there (nan, rows of an earlier batch) must not reach other rows.

        This includes a call that writes the values it wrote during the capture (zeros over zeros).
        """

        @eager_region
        def only_first(x, number):
            out = torch.full_like(x, float("nan"))
            out[: number.item()] = x[: number.item()]
            return out

        @eager_region
        def only_first_into(out, x, number):
            out.fill_(float("nan"))
            out[: number.item()] = x[: number.item()]

        def step(x, number):
            x = only_first(x * 2, number)
            out = torch.zeros_like(x)
            only_first_into(out, x, number)
            # A kernel that looks across rows, as a router or a quantizer does.
            return out, (out.amax() - out.amax() == 0) & (x.amax() - x.amax() == 0)

        options = RunnerOptions(buffers=BufferOptions(row_count="number"))
        for inference in (False, True):
            runner = self.make(backend, step, sizes=(8,), options=options)
            with torch.inference_mode(inference):
                assert not runner.capture().failed
                for number in (8, 3, 5, 8, 1):
                    x = self.rows(backend, number)
                    out, is_finite = runner(x)
                    torch.testing.assert_close(out, x * 2)
                    assert is_finite.item(), f"{number} rows"
            assert runner.stats().steps_by_mode["PIECEWISE"] == 5

    def test_what_runs_eager_reads_what_is_there_at_each_replay(self, backend):
        """A context that is replaced for each step must not be part of a graph."""
        context = {"scale": 1.0}

        class Model:
            def __init__(self):
                self.scale = 1.0

            @eager_region
            def attend(self, x):
                assert x.sum().item() == x.sum().item()  # the host may read
                return x * self.scale * context["scale"]

            def __call__(self, x):
                return self.attend(x + 1) - 1

        model = Model()
        runner = self.make(backend, model)
        assert not runner.capture().failed
        for scale in range(1, 25):
            context["scale"], model.scale = scale * 1.0, 1.0 / (1 + scale % 3)
            x = self.rows(backend, 1 + scale % 8, scale)
            torch.testing.assert_close(runner(x), model(x))
        assert runner.stats().steps_by_mode["PIECEWISE"] == 24

    def test_a_dictionary_that_a_region_is_given_is_the_callers(self, backend):
        """Values and tensors that an engine writes into it for a step are visible at the replay."""
        facts = {"scale": 1.0, "lengths": [1], "shift": torch.ones(1, device=backend.torch_device)}
        current = queue.SimpleQueue()  # not detected as Python state
        current.put(facts)

        @eager_region
        def attend(out, x, facts, more):
            out.copy_(x * facts["scale"] * len(facts["lengths"]) + facts["shift"] * more[1])

        def step(x):
            out, facts = torch.empty_like(x), current.get()
            current.put(facts)
            attend(out, x, facts, more=(facts, x))
            return out + 1

        for inference in (False, True):
            with torch.inference_mode(inference):
                runner = self.make(backend, step, sizes=(4,))
                assert not runner.capture().failed
                for scale in (2.0, 3.0):
                    facts["scale"] = scale
                    facts["lengths"].append(1)
                    x = self.rows(backend, 3)
                    torch.testing.assert_close(runner(x), step(x))
                assert runner.stats().steps_by_mode["PIECEWISE"] == 2

    def test_what_crosses_a_break_is_held(self, backend):
        """One call fills memory that no graph writes; another reads it."""
        seen = queue.SimpleQueue()  # not detected as Python state

        @eager_region
        def write(out, x):
            seen.put(StorageWeakRef(out.untyped_storage()))
            out.copy_(x)

        @eager_region
        def read(result, out):
            result.copy_(out * 2)

        def step(x):
            out, result = torch.empty_like(x), torch.empty_like(x)  # a segment without work
            graph_break()
            write(out, x)
            read(result, out)
            return result + 1

        runner = self.make(backend, step)
        while not seen.empty():
            seen.get()
        assert not runner.capture().failed
        gc.collect()
        found = [seen.get() for _ in range(seen.qsize())]  # includes replays of the proof
        alive = {one.cdata for one in found if not one.expired()}
        assert len(alive) == 3, f"{len(alive)} of 3 graphs hold what their calls fill"
        noise = [self.rows(backend, 64, seed) for seed in range(50)]  # reuses free memory
        self.check(backend, runner, step)
        del noise

    def test_operators_run_eager_where_that_is_asked_for(self, backend):
        """Declared operators always; operators tagged unsafe if the runner is configured so."""
        declare_support("break_cases::halve", "NEVER")

        def step(x):
            return torch.ops.break_unsafe.double(halve(x + 1)) + 3

        try:
            counts = {}
            for unsafe in (False, True):
                options = RunnerOptions(capture=CaptureOptions(break_on_unsafe=unsafe))
                runner = self.make(backend, step, options=options)
                assert not runner.capture().failed
                self.check(backend, runner, step)
                counts[unsafe] = len(calls_of(self.graph_of(runner, 8)))
        finally:
            declare_support("break_cases::halve", "ALWAYS")
        assert counts == {False: 1, True: 2}

    def test_what_the_host_reads_outside_of_a_region_is_refused_with_its_line(self, backend):
        """Read by a method of tensors, and by an operator that would have run eager."""

        def reads(x):
            return x * eager_region(torch.cos)(x).amax().item()

        def counts(x):
            return x * torch.ops.break_unsafe.largest(x)

        for step in (reads, counts):
            options = RunnerOptions(capture=CaptureOptions(break_on_unsafe=True))
            runner = self.make(backend, step, sizes=(4,), options=options)
            failed = str(runner.capture().failed)
            assert "host_sync" in failed
            assert "break_cases.py:" in failed

    def test_a_block_is_refused_and_says_what_to_do(self, backend):
        def step(x):
            with eager_region():
                x = x * 2
            return x

        failed = str(self.make(backend, step, sizes=(4,)).capture().failed)
        assert "break_cases.py:" in failed
        assert "@eager_region" in failed

    def test_autocast_around_a_call_is_on_at_each_replay(self, backend):
        """Autocast applies although no Python of the step runs at a replay."""
        kind = torch.device(backend.torch_device).type
        weight = self.weights(backend)[0]
        product = eager_region(lambda x: x @ weight)

        def step(x):
            with torch.autocast(kind, torch.bfloat16):
                x = product(x + 1)
            return x.float()

        runner = self.make(backend, step)
        assert not runner.capture().failed
        for number in (8, 3):
            x = self.rows(backend, number)
            torch.testing.assert_close(runner(x), step(x), rtol=2e-2, atol=2e-2)
        assert runner.stats().eager_by_reason == {}

    @pytest.mark.parametrize("place", ["segment", "call", "replay"])
    def test_what_fails_leaves_state_and_other_keys_as_before(self, backend, place):
        """State equals eager's, the other key replays, and the failed key can be captured."""
        state, fails = torch.zeros(1, device=backend.torch_device), queue.SimpleQueue()

        def fail_in(here):
            if here == place and not fails.empty() and (in_capture() or here == "replay"):
                raise ValueError("planned")

        @eager_region
        def call(x):
            fail_in("call")
            fail_in("replay")
            return x + 1

        def step(x):
            state.add_(1)
            x = call(x)
            fail_in("segment")
            return x + state

        runner = self.make(backend, step, sizes=(2, 4), state=[state])
        small, large = sorted(runner.registry, key=lambda key: key.num_tokens)
        assert not runner.capture([small]).failed
        x = self.rows(backend, 2)
        fails.put(place)
        if place == "replay":
            with pytest.raises(ValueError, match="planned"):
                runner(x)
        else:
            assert "planned" in str(runner.capture([large]).failed)
        assert state.item() == 0
        fails.get()
        torch.testing.assert_close(runner(x), x + 2)
        assert state.item() == 1
        assert runner.stats().steps_by_mode["PIECEWISE"] == 1
        assert not runner.capture([large], again=True).failed
        assert state.item() == 1

    def test_graphed_captures_in_segments(self, backend):
        """The module has a region that reads on the host; sizes come with the calls."""
        device = backend.torch_device

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2)

            @eager_region
            def clip(self, x):
                return x.clamp(max=max(1.0, x[:1].amax().item()) * 100)

            def forward(self, x):
                return self.last(self.clip(self.first(x)))

        torch.manual_seed(0)
        model = Model().to(device).eval().requires_grad_(False)
        fast = graphed(model, pieces=True, backend=backend)
        for number in (8, 3, 8, 5, 1):
            x = self.rows(backend, number)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert fast.graphed.stats().steps_by_mode["PIECEWISE"] >= 4
        with pytest.raises(ConfigError, match="pieces"):
            graphed(model, pieces=True, mode="FULL")

    def test_a_difference_after_an_effect_that_cannot_be_undone_raises(self, backend):
        """The call returns nothing in the capture, and a tensor later."""
        state, now = torch.zeros(1, device=backend.torch_device), {"result": None}
        call = eager_region(lambda x: now["result"])

        def step(x):
            state.add_(1)
            call(x)
            return x + state

        runner = self.make(backend, step, sizes=(2,), state=[state])
        assert not runner.capture().failed
        now["result"] = 3
        with pytest.raises(ReplayError, match=r"break_cases\.py"):
            runner(self.rows(backend, 2))
