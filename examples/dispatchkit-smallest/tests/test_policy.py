"""The kit for policies, and what this one adds to it."""

from __future__ import annotations

from dispatchkit import DispatchConfig, Dispatcher, load_plugins
from dispatchkit.testing import PolicyTests

from dispatchkit_smallest import SmallestPolicy


class TestKit(PolicyTests):
    def make_policy(self) -> SmallestPolicy:
        return SmallestPolicy()


def test_it_is_chosen_by_name() -> None:
    policy = load_plugins().create_policy("smallest")
    table = Dispatcher(policy, DispatchConfig(sizes=(8, 16)), lazy=True, strict=True)
    assert table.dispatch(9).padded_num_tokens == 16
    assert table.policy_name == "smallest"
