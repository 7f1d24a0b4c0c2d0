"""The runner on a device: replays equal eager with any earlier buffer contents."""

from __future__ import annotations

import gc
import warnings

import attrs
import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    BufferOptions,
    Decision,
    GraphRunner,
    MemoryOptions,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.errors import InputError  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
VOCABULARY, WIDTH, SINK = 100, 64, 32
SIZES = (1, 2, 4, 8, 16, 32)
INPUTS = {
    "tokens": StaticInput((None,), "int64"),
    "slots": StaticInput((None,), "int64", fill=SINK),
}


class Decoder:
    """Embedding, a cache written by slot, a mix across rows, and a head."""

    def __init__(self, seed=0):
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=DEVICE) / 8

        self.table, self.first, self.second = (
            normal(VOCABULARY, WIDTH),
            normal(WIDTH, WIDTH),
            normal(WIDTH, WIDTH),
        )
        self.cache = torch.zeros(SINK + 1, WIDTH, device=DEVICE)

    def embed(self, tokens, slots):
        hidden = torch.relu(self.table[tokens] @ self.first)
        self.cache.index_copy_(0, slots, hidden)
        return hidden

    def mix(self, hidden):
        return hidden.cumsum(0)

    def head(self, mixed, slots):
        out = (mixed + self.cache[slots]) @ self.second
        return {"logits": out, "more": (out.argmax(-1), [out.sum(-1)])}

    def __call__(self, tokens, slots):
        return self.head(self.mix(self.embed(tokens, slots)), slots)

    def pieces(self):
        return [graph_piece(self.embed), eager_piece(self.mix), graph_piece(self.head)]


def batch(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, VOCABULARY, (rows,), generator=generator).to(DEVICE),
        "slots": torch.randperm(SINK, generator=generator)[:rows].to(DEVICE),
    }


ALONG_ROWS = RunnerOptions(buffers=BufferOptions(output_batch_dims=0))


def runner_of(step, inputs=INPUTS, **settings):
    settings.setdefault("sizes", SIZES)
    settings.setdefault("policy", OneBucketPolicy())
    options = attrs.evolve(settings.pop("options", RunnerOptions()), device=DEVICE)
    return GraphRunner(step, inputs, backend="cuda", options=options, **settings)


def same(actual, expected):
    # The bucket has another shape than the batch, so other kernels may compute it.
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ceiling", [2, 1, 0])
@pytest.mark.parametrize("outputs", ["owned", "view"])
def test_replay_equals_eager_on_changing_inputs(ceiling, outputs):
    """Every size in FULL, PIECEWISE and eager, with poison in the buffers before each call."""
    mine, theirs = Decoder(), Decoder()
    runner = runner_of(theirs.pieces(), state=[theirs.cache], outputs=outputs)
    report = runner.capture()
    assert report.failed == {}
    assert report.num_graphs == 2 * len(SIZES)
    assert not theirs.cache.any(), "warmup and capture must not show in the state"
    for seed, rows in enumerate((32, 3, 1, 16, 17, 8, 31, 2, 5, 32, 4)):
        runner.lanes[0].lane.buffers.poison()
        given = batch(rows, seed)
        same(runner(**given, ceiling=ceiling), mine(**given))
        same(theirs.cache[:SINK], mine.cache[:SINK])
    mode = {2: "FULL", 1: "PIECEWISE", 0: "NONE"}[ceiling]
    assert runner.stats().steps_by_mode[mode] == 11


def test_owned_results_survive_later_calls():
    """Includes nested results and views, over calls of other keys of the pool."""
    model = Decoder()
    runner = runner_of(model.pieces(), state=[model.cache])
    runner.capture()
    kept = [(runner(**batch(rows, rows)), rows) for rows in (32, 3, 17)]
    copies = [torch.utils._pytree.tree_map(torch.clone, result) for result, _ in kept]
    for rows in (32, 31, 3, 1):
        runner(**batch(rows, rows + 50))
    torch.cuda.synchronize()
    for (result, _), copy in zip(kept, copies, strict=True):
        torch.testing.assert_close(result, copy, rtol=0, atol=0)


def test_random_numbers_come_as_in_eager():
    """At the bucket's size the sequence of a seed is eager's; a capture draws nothing."""
    runner = runner_of(
        lambda x: x + torch.rand_like(x), {"x": StaticInput((None, 64), "float32")}, mode="FULL"
    )
    torch.cuda.manual_seed(7)
    runner.capture()
    x = torch.zeros(16, 64, device=DEVICE)
    first = torch.rand(4, device=DEVICE)
    torch.cuda.manual_seed(7)
    assert torch.equal(first, torch.rand(4, device=DEVICE))
    torch.cuda.manual_seed(5)
    got = torch.stack([runner(x) for _ in range(4)])
    torch.cuda.manual_seed(5)
    want = torch.stack([x + torch.rand_like(x) for _ in range(4)])
    assert torch.equal(got, want)
    assert runner.stats().steps_by_mode["FULL"] == 4


def test_true_row_count_and_outputs_without_a_batch_dimension():
    """The step masks by the row count on the device; results without rows are not cut."""

    def step(x, num_rows):
        real = torch.arange(x.shape[0], device=x.device) < num_rows
        kept = torch.where(real[:, None], x, 0.0)
        return x - kept.sum(0) / num_rows, kept.sum(0)

    runner = runner_of(
        step,
        {"x": StaticInput((None, 8), "float32", fill=3.0)},
        mode="FULL",
        options=RunnerOptions(buffers=BufferOptions(row_count="num_rows")),
    )
    assert runner.capture().failed == {}
    for rows in (32, 5, 17, 3):
        runner.lanes[0].lane.buffers.poison()
        x = torch.randn(rows, 8, device=DEVICE)
        same(runner(x), (x - x.mean(0), x.sum(0)))


def test_undeclared_state_is_put_back():
    counter = torch.zeros(4, device=DEVICE)

    def step(x):
        counter.add_(1)
        return x + counter[0]

    runner = runner_of(step, {"x": StaticInput((None,), "float32")}, lazy=True, mode="FULL")
    for number, rows in enumerate((32, 3, 3, 7)):
        x = torch.randn(rows, device=DEVICE)
        same(runner(x), x + number + 1)
    assert counter.tolist() == [4.0] * 4


def test_streams_of_the_caller_in_both_directions():
    """Inputs are written and results read on one of two streams, without other waits."""
    model = Decoder()
    runner = runner_of(model, state=[model.cache], mode="FULL")
    runner.capture()
    weight = torch.randn(512, 512, device=DEVICE)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for number in range(40):
        rows = (number * 7) % 32 + 1
        given = batch(rows, number)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[number % 2]):
            busy = weight
            for _ in range(20):
                busy = torch.tanh(busy @ weight)
            tokens = given["tokens"] + (busy.sum() * 0).long()
            results.append((given, runner(tokens=tokens, slots=given["slots"])["logits"] * 1))
    torch.cuda.synchronize()
    other = Decoder()
    for given, result in results:
        same(result, other(**given)["logits"])


def test_twenty_failing_captures_leave_memory_flat():
    """After five kinds of failure, random numbers, captures and replays are correct."""
    kind = [0]
    counter, weight = torch.zeros(1, device=DEVICE), torch.randn(32, 32, device=DEVICE) / 8

    def step(x):
        counter.add_(1)
        y = torch.tanh(x @ weight) @ weight
        if torch.cuda.is_current_stream_capturing():
            if kind[0] == 0:
                y.sum().item()
            elif kind[0] == 1:
                raise ValueError("planted")
            elif kind[0] == 2:
                torch.cuda.synchronize()
            elif kind[0] == 3:
                torch.empty(1 << 48, dtype=torch.uint8, device=DEVICE)
            elif kind[0] == 4:
                y.cpu()
        return y

    settings = {"mode": "FULL", "state": [counter], "sizes": (8,), "options": ALONG_ROWS}
    inputs = {"x": StaticInput((None, 32), "float32")}
    reserved = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(20):
            kind[0] = number % 5
            runner = runner_of(step, inputs, **settings)
            assert len(runner.capture().failed) == 1, kind[0]
            assert not torch.cuda.is_current_stream_capturing()
            del runner
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[5:])) == 1, reserved
    assert counter.item() == 0
    torch.cuda.manual_seed(1)
    drawn = torch.rand(3, device=DEVICE)
    torch.cuda.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3, device=DEVICE))
    kind[0] = 9
    runner = runner_of(step, inputs, **settings)
    assert runner.capture().failed == {}
    x = torch.randn(5, 32, device=DEVICE)
    same(runner(x), torch.tanh(x @ weight) @ weight)
    assert runner.stats().steps_by_mode["FULL"] == 1


@pytest.mark.parametrize("limit", ["graphs", "bytes"])
def test_budget_holds_under_many_calls(limit):
    weight = torch.randn(256, 256, device=DEVICE)

    def step(x):
        return torch.relu(x @ weight) @ weight

    inputs = {"x": StaticInput((None, 256), "float32")}
    budget = {"max_graphs": 3} if limit == "graphs" else {"max_bytes": 64 << 20}
    options = RunnerOptions(memory=MemoryOptions(**budget))
    runner = runner_of(step, inputs, mode="FULL", lazy=True, options=options)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 33, (300,), generator=generator).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in sizes:
            x = torch.randn(rows, 256, device=DEVICE)
            same(runner(x), step(x))
            if limit == "graphs":
                assert runner.lanes[0].lifecycle.num_graphs() <= 3
            else:
                assert runner.num_bytes <= 64 << 20
    assert runner.stats().steps_by_mode["FULL"] > 0


def test_timed_steps_give_device_times():
    """Events surround the step on its stream, and times are labelled as the device's."""

    class Timed(OneBucketPolicy):
        heard = ()

        def decide(self, batch, graphs):
            answer = super().decide(batch, graphs)
            return Decision.replay(answer.key, timed=True) if answer.key else answer

        def observe(self, outcome):
            self.heard = (*self.heard, outcome)
            return ()

    policy = Timed()
    model = Decoder()
    runner = runner_of(
        model,
        mode="FULL",
        state=[model.cache],
        policy=policy,
        options=RunnerOptions(sample_every=1),
    )
    runner.capture()
    for number in range(5):
        runner(**batch(8, number))
    runner.drain(wait=True)
    assert len(policy.heard) == 5
    assert {outcome.clock for outcome in policy.heard} == {"device"}
    assert all(outcome.elapsed_us > 0 for outcome in policy.heard)


def test_host_inputs_are_refused_by_name():
    model = Decoder()
    runner = runner_of(model, mode="FULL", state=[model.cache])
    runner.capture()
    given = batch(3, 0)
    with pytest.raises(InputError, match="must be on cuda:0, got cpu"):
        runner(tokens=given["tokens"].cpu(), slots=given["slots"])


def test_step_above_the_sizes_runs_eager():
    model = Decoder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = runner_of(model, mode="FULL", sizes=(4, 8), max_num_tokens=32)
    runner.capture()
    with pytest.warns(EagerStepWarning, match="above_largest_size"):
        runner(**batch(9, 0))
    assert runner.stats().steps_by_mode["NONE"] == 1
