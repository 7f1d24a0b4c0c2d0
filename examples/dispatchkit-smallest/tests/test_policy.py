"""The test kit for policies, and the policy's own tests."""

from __future__ import annotations

from dispatchkit import DispatchConfig, Dispatcher, load_plugins
from dispatchkit.testing import PolicyTests

from dispatchkit_smallest import SmallestPolicy


class TestKit(PolicyTests):
    def make_policy(self) -> SmallestPolicy:
        return SmallestPolicy()


def test_policy_is_found_by_name() -> None:
    policy = load_plugins().create_policy("smallest")
    dispatcher = Dispatcher(policy, DispatchConfig(sizes=(8, 16)), lazy=True, strict=True)
    assert dispatcher.dispatch(9).padded_num_tokens == 16
    assert dispatcher.policy_name == "smallest"
