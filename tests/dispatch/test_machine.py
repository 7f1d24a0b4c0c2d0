"""The dispatcher beside a naive model that asks the policy anew each time."""

from __future__ import annotations

from hypothesis import settings

from dispatchkit.dispatch import Decision, Reason
from dispatchkit.keys import BatchDescriptor, CUDAGraphMode, GraphKey, RuntimeMode
from dispatchkit.testing import DispatcherMachine


class SmallestPolicy:
    """The smallest ready graph of the highest allowed mode, of any kind of key."""

    name = "smallest"

    def declare(self, config):
        mixed = config.mode.mixed_mode()
        for size in config.capture_sizes:
            for loras in sorted({0, config.max_loras}):
                if mixed is not CUDAGraphMode.NONE:
                    mode = RuntimeMode[mixed.name]
                    reqs = min(size, config.max_num_seqs) if mode is RuntimeMode.FULL else None
                    yield GraphKey(
                        mode, BatchDescriptor(size, num_reqs=reqs, num_active_loras=loras)
                    )
                for query_len in config.query_lens:
                    reqs = size // query_len
                    if size % query_len == 0 and reqs <= config.max_num_seqs:
                        yield GraphKey(
                            RuntimeMode.FULL,
                            BatchDescriptor(
                                size,
                                num_reqs=reqs,
                                uniform=True,
                                num_active_loras=loras,
                                query_len=query_len,
                            ),
                        )

    def decide(self, batch, graphs):
        why = None
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            if batch.allows(mode):
                for key in graphs.covering(batch, mode):
                    why_not = graphs.why_not(key)
                    if why_not is None:
                        return Decision.replay(key)
                    why = why or why_not
        return Decision.eager(why or Reason.NO_KEY)


class SmallestMachine(DispatcherMachine):
    def make_policy(self):
        return SmallestPolicy()


TestDispatcher = SmallestMachine.TestCase
TestDispatcher.settings = settings(
    max_examples=max(10, settings.default.max_examples // 4), stateful_step_count=30, deadline=None
)
