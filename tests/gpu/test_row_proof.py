"""On a device, padding is proven not to affect rows of a batch; proofs replay noise and fill."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dispatchkit import GraphRunner, StaticInput, StepState, graphed  # noqa: E402
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
WIDTH = 64
SIZES = (2, 4, 8, 32)
ROWS = (3, 5, 7, 20, 4)

DEPENDENT = {
    "mean": lambda x: x - x.mean(0),
    "normalised": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "softmax": lambda x: x.softmax(0),
    "sorted": lambda x: x.sort(0).values,
    "attention": lambda x: torch.softmax(x @ x.T, -1) @ x,
    "scaled": lambda x: x / x.abs().amax(),
    "what is below 0": lambda x: x - torch.relu(-x).mean(0),
    "what is far above 1": lambda x: x - torch.relu(x - 50).clamp(max=1e-2).mean(0),
    "the largest": lambda x: x - 1e-3 * x.amax(0),
    "the smallest": lambda x: x - 1e-3 * x.amin(0),
    "sum alone": lambda x: x.sum(0),
    "divided by rows": lambda x: x / x.shape[0],
    "positions": lambda x: x * torch.linspace(0, 1, x.shape[0], device=x.device)[:, None],
}
OTHER_ROWS = {
    "pruned": lambda x: x[:4],
    "best": lambda x: x.topk(min(4, x.shape[0]), dim=0).values,
    "flat": lambda x: x.reshape(-1),
    "pairs": lambda x: x @ x.T,
}


def make(step, inputs=None, dtype="float32", **settings):
    inputs = inputs or {"x": StaticInput((None, WIDTH), dtype)}
    settings = {"sizes": SIZES, "mode": "FULL", "backend": CudaBackend(0), **settings}
    runner = GraphRunner(step, inputs, **settings)
    assert runner.capture().failed == {}
    return runner


def batch(rows, dtype=torch.float32):
    return torch.randn(rows, WIDTH, device=DEVICE).to(dtype)


def same(got, want, tolerance=1e-3):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_that_depend_on_padding_replay_at_full_buckets_alone(name):
    """Other steps run eager and are counted; the warning states the next step."""
    step = DEPENDENT[name]
    runner = make(step)
    with pytest.warns(EagerStepWarning, match="rows_depend"):  # noqa: PT031
        for rows in ROWS:
            x = batch(rows)
            same(runner(x), step(x))
    assert runner.stats().eager_by_reason == {"rows_depend": 4}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_outputs_with_other_rows_than_the_batch_are_never_cut_from_padding(name):
    """Full buckets replay; others run eager and are counted; the warning states the next step."""
    step = OTHER_ROWS[name]
    runner = make(step)
    with pytest.warns(EagerStepWarning, match="rows_not_the_bucket"):  # noqa: PT031
        for rows in ROWS:
            x = batch(rows)
            same(runner(x), step(x))
    assert runner.stats().eager_by_reason == {"rows_not_the_bucket": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_encoder_is_proven(dtype):
    """Kernels of a different size round differently, which is not a dependence."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval().to(DEVICE, dtype)

    def step(x):
        return model(x[:, None].expand(-1, 16, -1) * 1)

    runner = make(step, dtype=dtype)
    for rows in ROWS:
        x = batch(rows, dtype)
        with torch.no_grad():
            same(runner(x), step(x), 1e-2 if dtype is torch.float32 else 1e-1)
    assert runner.stats().eager_by_reason == {}


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.PaddedDrawsWarning")
def test_noise_stays_within_what_a_step_may_be_given():
    """An invalid index or a probability above 1 would end the process."""
    table = torch.arange(10.0, device=DEVICE)
    for part in (torch.bernoulli, lambda x: table[(x * 9).long()]):
        runner = make(part)
        for rows in ROWS:
            runner(torch.rand(rows, WIDTH, device=DEVICE))
        assert runner.stats().eager_by_reason == {}
    torch.cuda.synchronize()


def test_draws_of_a_fixed_size_are_those_of_eager():
    """No numbers are drawn for padding, so there is no warning, which would be an error here."""

    def step(x):
        return x + torch.rand(WIDTH, device=DEVICE)

    runner = make(step)
    torch.cuda.manual_seed(3)
    got = [runner(torch.ones(rows, WIDTH, device=DEVICE)) for rows in ROWS]
    torch.cuda.manual_seed(3)
    same(got, [step(torch.ones(rows, WIDTH, device=DEVICE)) for rows in ROWS])


def test_sums_by_atomics_are_no_difference():
    """Each row adds to its own places, in a varying order."""
    places = torch.randint(0, WIDTH, (WIDTH,), device=DEVICE)

    def step(x):
        return torch.zeros_like(x).index_add_(1, places, x)

    runner = make(step)
    for rows in ROWS:
        x = batch(rows)
        same(runner(x), step(x))
    assert runner.stats().eager_by_reason == {}


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.PaddedDrawsWarning")
def test_equal_draws_are_no_difference():
    runner = make(lambda x: nn.functional.dropout(x, 0.5))
    torch.manual_seed(5)
    before = torch.cuda.get_rng_state(0)
    make(lambda x: nn.functional.dropout(x, 0.5))
    assert torch.equal(torch.cuda.get_rng_state(0), before)
    for rows in ROWS:
        runner(batch(rows))
    assert runner.stats().eager_by_reason == {}
    mixing = make(lambda x: nn.functional.dropout(x - x.mean(0), 0.5))
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        mixing(batch(3))


@pytest.mark.parametrize("host", [False, True], ids=["by a node", "host inputs"])
@pytest.mark.parametrize("copy_node", [True, False])
def test_slots_of_a_cache_are_left_as_they_were(host, copy_node):
    """Writes of a proof to a call's slots are put back, in scratch memory as in state."""
    cache, other = torch.zeros(40, WIDTH, device=DEVICE), torch.zeros(40, WIDTH, device=DEVICE)

    def step(slots, x, cache=cache):
        cache.index_add_(0, slots, x)
        return cache[slots] * 2

    inputs = {
        "slots": StaticInput((None,), "int64", fill=39, host=host),
        "x": StaticInput((None, WIDTH), "float32"),
    }
    backend = CudaBackend(0, copy_node=copy_node)
    runner = make(step, inputs, state=StepState(scratch=[cache]), backend=backend)
    for rows in (3, 5, 8, 20, 3):
        slots, x = torch.randperm(39)[:rows], batch(rows)
        want = step(slots.to(DEVICE), x, other)
        same(runner(slots if host else slots.to(DEVICE), x), want)
        same(cache[:39], other[:39])
    assert runner.stats().eager_by_reason == {}


def test_integers_are_those_of_the_first_padded_call():
    """Captured ahead, all rows are fill; a call of fill proves nothing yet."""
    table = torch.randn(50, WIDTH, device=DEVICE)

    def centred(ids):
        y = table[ids]
        return y - y.mean(0)

    runner = make(centred, {"ids": StaticInput((None,), "int64")})
    runner(torch.zeros(3, dtype=torch.int64, device=DEVICE))
    with pytest.warns(EagerStepWarning, match="rows_depend"):  # noqa: PT031
        for rows in (3, 5, 3):
            ids = torch.randint(0, 50, (rows,), device=DEVICE)
            same(runner(ids), centred(ids))
    assert runner.stats().eager_by_reason == {"rows_depend": 3}


def test_a_call_of_zeros_proves_nothing():
    """Servers warm up with zeros, for which results would happen to be equal."""
    step = DEPENDENT["attention"]
    fast = graphed(step, sizes=[4])
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        fast(torch.zeros(3, WIDTH, device=DEVICE))
    for scale in (1, 0.1):
        x = batch(3) * scale
        same(fast(x), step(x), 1e-5)
