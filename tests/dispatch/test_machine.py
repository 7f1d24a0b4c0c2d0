"""The dispatcher compared with a naive model that asks the policy for every batch."""

from __future__ import annotations

from hypothesis import settings

from dispatchkit.testing import DispatcherMachine, SmallestPolicy


class SmallestMachine(DispatcherMachine):
    def make_policy(self):
        return SmallestPolicy()


TestDispatcher = SmallestMachine.TestCase
TestDispatcher.settings = settings(
    max_examples=max(5, settings.default.max_examples // 4), stateful_step_count=30, deadline=None
)
