"""GraphWrapper on a CUDA device: FULL and PIECEWISE, nested, equal to eager."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit_vllm.wrapper import (  # noqa: E402
    BackendDevice,
    GraphWrapper,
    WrapperOptions,
    set_forward_context,
)

pytestmark = pytest.mark.gpu


class Block(torch.nn.Module):
    """Two captured linear pieces, with an eager softmax over rows between them."""

    def __init__(self, device, width=256):
        super().__init__()
        first, second = (torch.nn.Linear(width, width, device="cuda") for _ in range(2))
        self.pieces = (
            GraphWrapper(
                lambda x: torch.relu(first(x)),
                "PIECEWISE",
                device,
                options=WrapperOptions(weak_ref_output=False),
            ),
            GraphWrapper(lambda x: second(x) + x, "PIECEWISE", device),
        )

        # Wrappers copy nothing, so a graph's inputs must keep their addresses.
        self.between = {size: torch.empty(size, width, device="cuda") for size in (64, 16, 4)}

    def forward(self, x):
        hidden = self.pieces[0](x)
        between = torch.add(torch.softmax(hidden, dim=-1), hidden, out=self.between[len(x)])
        return self.pieces[1](between)


@pytest.fixture(scope="module")
def device():
    return BackendDevice("cuda")


@pytest.mark.parametrize("seed", range(3))
def test_every_mode_equals_eager(device, seed):
    torch.manual_seed(seed)
    block = Block(device).eval()
    whole = GraphWrapper(block, "FULL", device)
    inputs = {size: torch.empty(size, 256, device="cuda") for size in (64, 16, 4)}
    with torch.no_grad():
        for _ in range(4):
            for size, x in inputs.items():
                x.normal_()
                with set_forward_context("NONE"):
                    expected = whole(x).clone()
                for mode in ("PIECEWISE", "FULL"):
                    with set_forward_context(mode, size):
                        got = whole(x)
                    torch.testing.assert_close(got, expected)
    assert list(whole.entries) == [64, 16, 4]
    assert all(list(piece.entries) == [64, 16, 4] for piece in block.pieces)


def test_weak_outputs_leave_their_memory_to_later_graphs(device):
    """Many graphs with weak outputs use little more of the pool than one."""
    grown = {}
    for weak in (True, False):
        own = BackendDevice("cuda")
        wrapper = GraphWrapper(
            lambda x: x * 2, "FULL", own, options=WrapperOptions(weak_ref_output=weak)
        )
        x = torch.ones(8 << 20, device="cuda")  # 32 MiB
        for key in range(4):
            with set_forward_context("FULL", key):
                got = wrapper(x)
            assert got[-1].item() == 2
        grown[weak] = own.backend.pool_bytes(own.global_pool())
        wrapper.clear_graphs()
    assert grown[True] < grown[False]
    assert grown[True] < 2 * (32 << 20)


def test_a_result_is_overwritten_by_the_next_replay(device):
    wrapper = GraphWrapper(lambda x: x + 1, "FULL", device)
    x = torch.zeros(4, device="cuda")
    with set_forward_context("FULL", "key"):
        first = wrapper(x)
        x.fill_(5)
        second = wrapper(x)
    assert torch.equal(first, second)
    assert second.tolist() == [6.0] * 4
