"""Policies with one realistic mistake each, and the property that must find it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import ClassVar

import attrs
from sample_policies import FULL, PIECEWISE, CountingPolicy, LargestPolicy, SplitsPolicy

from dispatchkit.dispatch import CalibrationRun, CellUpdate, Decision, Part, Reason
from dispatchkit.keys import Batch, BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.testing import SmallestPolicy

#: (faulty policy, property that finds it, pattern of the message)
PLANTED = []


def planted(finding, message):
    def add(policy):
        PLANTED.append((policy, finding, message))
        return policy

    return add


def ready_keys(batch, graphs):
    """Return all ready keys of allowed modes, whether or not they cover the batch."""
    return [key for key in graphs if batch.allows(key.mode) and graphs.is_ready(key)]


def changed(key, **facts):
    return attrs.evolve(key, descriptor=attrs.evolve(key.descriptor, **facts))


@planted("chosen graph covers the batch", r"chose .* for a batch with num_tokens=\d+")
class RoundsDownPolicy(SmallestPolicy):
    """Uses bisect_right instead of bisect_left and gets the bucket below."""

    def decide(self, batch, graphs):
        below = [
            key
            for key in ready_keys(batch, graphs)
            if key.num_tokens <= batch.num_tokens
            and key.covers(attrs.evolve(batch, num_tokens=1, num_reqs=None))
        ]
        if below:
            return Decision.replay(max(below, key=lambda key: key.num_tokens))
        return super().decide(batch, graphs)


@planted("chosen graph covers the batch", r"chose .* for a batch with num_active_loras=[1-9]")
class ForgetsAdaptersPolicy(SmallestPolicy):
    """Looks up a key without the batch's adapters."""

    def decide(self, batch, graphs):
        return super().decide(attrs.evolve(batch, num_active_loras=0), graphs)


@planted("chosen graph covers the batch", r"chose .* for a batch with num_reqs=\d+")
class ForgetsRequestsPolicy(SmallestPolicy):
    """Checks only tokens, so that a bucket captured for fewer requests is chosen."""

    def declare(self, config):
        return [
            changed(key, num_reqs=1)
            if key.descriptor.num_reqs and not key.descriptor.uniform
            else key
            for key in super().declare(config)
        ]

    def decide(self, batch, graphs):
        return super().decide(attrs.evolve(batch, num_reqs=None), graphs)


@planted("uniform graph serves only its own query length", r"chose FULL .*uniform.* for a mixed")
class UniformForMixedPolicy(SmallestPolicy):
    """Chooses any FULL graph that is large enough."""

    def decide(self, batch, graphs):
        for key in sorted(ready_keys(batch, graphs), key=lambda key: key.num_tokens):
            own = key.descriptor
            if (
                own.num_tokens >= batch.num_tokens
                and own.num_active_loras >= batch.num_active_loras
                and (own.num_reqs is None or own.num_reqs >= (batch.num_reqs or 1))
            ):
                return Decision.replay(key)
        return Decision.eager(Reason.NO_KEY)


@planted("constraints go before preferences", r"decide chose \w+ .*, but the batch allows only")
class IgnoresCeilingPolicy(SmallestPolicy):
    """Prefers FULL even where it is not allowed."""

    def decide(self, batch, graphs):
        return super().decide(attrs.evolve(batch, allowed=2), graphs)


@planted("only ready graphs are chosen", r"which cannot run: \w+")
class NeverAsksWhetherReadyPolicy(SmallestPolicy):
    """Treats declared keys as captured."""

    def decide(self, batch, graphs):
        for mode in (FULL, PIECEWISE):
            if batch.allows(mode):
                for key in graphs.covering(batch, mode):
                    return Decision.replay(key)
        return Decision.eager(Reason.NO_KEY)


@planted("chosen key was declared", r"which declare did not return")
class TwoKeyFunctionsPolicy(SmallestPolicy):
    """Rebuilds the key in decide without its bound on requests."""

    def decide(self, batch, graphs):
        answer = super().decide(batch, graphs)
        if answer.key is None:
            return answer
        return Decision.replay(changed(answer.key, num_reqs=None))


@planted("same batch same decision", r"returned .*, then ")
class AlternatesPolicy(LargestPolicy):
    """Alternates between replay and eager, so that both get samples."""

    traits = ()

    def __init__(self):
        self.turn = 0

    def decide(self, batch, graphs):
        self.turn += 1
        usual = super() if self.turn % 2 else None
        return usual.decide(batch, graphs) if usual else Decision.eager("exploring")


@planted("same history same decision", r"but a fresh policy returned")
class OwnChancePolicy(SmallestPolicy):
    """Starts differently in each object."""

    traits = ()
    _made = itertools.count()

    def __init__(self):
        self.prefers_eager = next(self._made) % 2

    def decide(self, batch, graphs):
        if self.prefers_eager:
            return Decision.eager("exploring")
        return super().decide(batch, graphs)


@planted("trait stateless in another process", r"different hash seeds gave different answers")
class HashOrderPolicy(SmallestPolicy):
    """Declares in the order of a set of names."""

    def declare(self, config):
        return sorted(super().declare(config), key=lambda key: hash(str(key)))


@planted("declare is deterministic", r"In a second call, declare returned different keys")
class GeneratorKeptPolicy(SmallestPolicy):
    """Keeps one generator of keys, which is empty the second time."""

    def __init__(self):
        self.keys = None

    def declare(self, config):
        if self.keys is None:
            self.keys = iter(super().declare(config))
        return self.keys


@planted("declared keys keep within the limits", r"more tokens than max_num_tokens")
class RoundsSizesUpPolicy(SmallestPolicy):
    """Rounds sizes up to a multiple of eight, past the end of the buffers."""

    def declare(self, config):
        return [
            changed(key, num_tokens=-(-key.num_tokens // 8) * 8)
            if not key.descriptor.uniform
            else key
            for key in super().declare(config)
        ]


@planted("declared keys keep within the limits", r"FULL .*though the configured mode is")
class IgnoresModePolicy(SmallestPolicy):
    """Declares FULL graphs in every configured mode."""

    def declare(self, config):
        return [attrs.evolve(key, mode=FULL) for key in super().declare(config)]


@planted("declared keys keep within the limits", r"more requests than max_num_seqs")
class AsManyRequestsAsTokensPolicy(SmallestPolicy):
    """Ignores the limit on requests."""

    def declare(self, config):
        return [
            key if key.descriptor.uniform else changed(key, num_reqs=key.num_tokens)
            for key in super().declare(config)
        ]


@planted("declared keys keep within the limits", r"not a multiple of query_len")
class PartsOfRequestsPolicy(SmallestPolicy):
    """Captures uniform decode at every size, multiple of the query length or not."""

    def declare(self, config):
        keys = super().declare(config)
        query_len = config.query_len
        extra = [
            GraphKey(FULL, BatchDescriptor(size, uniform=True, query_len=query_len))
            for size in config.sizes
            if config.mode.separate_routine() and config.mode.has_full_cudagraphs()
        ]
        return keys + extra


@planted("every batch gets an answer", r"decide raised IndexError")
class RunsOffTheLadderPolicy(SmallestPolicy):
    """Indexes a padding table that ends at the largest size."""

    def declare(self, config):
        self.table = [
            next(size for size in config.sizes if size >= n)
            for n in range(1, config.max_capture_size + 1)
        ]
        return super().declare(config)

    def decide(self, batch, graphs):
        _ = self.table[batch.num_tokens - 1]
        return super().decide(batch, graphs)


@planted("every batch gets an answer", r"must return a Decision or None")
class AnswersATuplePolicy(SmallestPolicy):
    """Returns a tuple, as another project's dispatcher does."""

    def decide(self, batch, graphs):
        answer = super().decide(batch, graphs)
        return (answer.mode, answer.key)


@planted("every batch gets an answer", r"decide changed the registry")
class TidiesUpPolicy(SmallestPolicy):
    """Evicts graphs inside decide."""

    def decide(self, batch, graphs):
        answer = super().decide(batch, graphs)
        if answer.key is not None and answer.key.num_tokens < 8:
            graphs._registry.failed(answer.key, "not worth it")
        return answer


@planted("a batch that fits a graph gets one or a reason", r"though .* is ready and fits")
class WrongReasonPolicy(SmallestPolicy):
    """Runs some batches eager for a wrong reason."""

    def decide(self, batch, graphs):
        if batch.num_tokens % 3 == 0:
            return Decision.eager(Reason.ABOVE_LARGEST)
        return super().decide(batch, graphs)


@planted("a batch that fits a graph gets one or a reason", r"eager with the reason ''")
class SilentEagerPolicy(SmallestPolicy):
    """Runs eager without a reason."""

    def decide(self, batch, graphs):
        answer = super().decide(batch, graphs)
        return answer if answer.key is not None else Decision(RuntimeMode.NONE, None, "")


@planted("a plain batch gets a graph", r"chose no graph for any batch at a capture size")
class NeverReplaysPolicy(SmallestPolicy):
    """Compares with a threshold that was never set, and so never replays."""

    def decide(self, batch, graphs):
        return Decision.eager("below_threshold")


@planted(
    "number of requests only bounds", r"for an unknown number of requests .* for num_reqs=[12]"
)
class RequestsDecidePolicy(SmallestPolicy):
    """Runs few requests eager without declaring a bound."""

    def decide(self, batch, graphs):
        if batch.num_reqs is not None and batch.num_reqs <= 2:
            return Decision.eager("few_requests")
        return super().decide(batch, graphs)


@planted(
    "answers depend only on graphs that could serve",
    r"returned .*, but .* after .* changed to '\w+'",
)
class WaitsForAllPolicy(SmallestPolicy):
    """Uses no graph until nearly all are captured."""

    def decide(self, batch, graphs):
        if sum(map(graphs.is_ready, graphs)) < len(graphs) - 1:
            return Decision.eager("warming_up")
        return super().decide(batch, graphs)


@planted("table follows captures evictions and failures", r"cannot run now|cannot run:")
class RemembersWhatWasReadyPolicy(SmallestPolicy):
    """Keeps its own cache of answers, which is never cleared."""

    def __init__(self):
        self.cache = {}

    def decide(self, batch, graphs):
        if batch not in self.cache:
            self.cache[batch] = super().decide(batch, graphs)
        return self.cache[batch]


@planted("failures teach nothing about latency", r"the time of a failed step changed")
class LearnsFromFailuresPolicy(CountingPolicy):
    """Treats the time of a failed replay as a measurement."""

    def observe(self, outcome):
        return super().observe(attrs.evolve(outcome, completed=True))


@planted("what is learnt keeps the constraints", r"observe requested an invalid decision: chose")
class LearnsASmallerBucketPolicy(CountingPolicy):
    """Requests the fastest bucket so far for any batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def observe(self, outcome):
        if outcome.decision.key is None or outcome.elapsed_us is None:
            return None
        self.seen.append((outcome.elapsed_us, outcome.decision.key))
        fastest = min(self.seen, key=lambda pair: pair[0])[1]
        return [CellUpdate(outcome.batch, Decision.replay(fastest))]


@planted("same outcomes same updates", r"but a fresh policy returned .* after the same outcomes")
class SharedMemoryPolicy(CountingPolicy):
    """Keeps its counts on the class, so that all objects share them."""

    counts: ClassVar = defaultdict(int)

    def observe(self, outcome):
        self.counts[self._cell(outcome.batch)] += 1
        if self.counts[self._cell(outcome.batch)] % 2 and outcome.batch.allows(RuntimeMode.NONE):
            return [CellUpdate(outcome.batch, Decision.eager("probe"), one_shot=True)]
        return None


@planted("calibration ends and keeps the constraints", r"still requested runs after \d+ calls")
class NeverCalibratedPolicy(CountingPolicy):
    """Never finishes calibration."""

    def calibration_runs(self, graphs):
        return [CalibrationRun(Batch(1), Decision.eager("calibration", timed=True), runs=1)]


@planted("calibration ends and keeps the constraints", r"requested an invalid step: chose")
class BeyondCalibrationPolicy(CountingPolicy):
    """Requests a graph that is too small."""

    def calibration_runs(self, graphs):
        small = min(graphs, key=lambda key: key.num_tokens, default=None)
        if small is None or small.num_tokens >= graphs.config.max_num_tokens:
            return []
        return [CalibrationRun(Batch(small.num_tokens + 1), Decision.replay(small), runs=1)]


@planted("optional parts can be used", r"pace is 0")
class StandstillPolicy(SmallestPolicy):
    """Requests a measurement pace of zero."""

    pace = 0


@planted("trait smallest_bucket", r"is smaller and ready")
class ClaimsSmallestPolicy(LargestPolicy):
    """Claims a trait that it lacks."""

    traits = ("smallest_bucket",)


@planted("trait monotone", r"for a batch of \d+ tokens")
class ClaimsMonotonePolicy(SmallestPolicy):
    """Pads even sizes to the largest bucket."""

    traits = ("monotone",)

    def decide(self, batch, graphs):
        chosen = LargestPolicy if batch.num_tokens % 2 == 0 else SmallestPolicy
        return chosen.decide(LargestPolicy(), batch, graphs)


@planted("trait order", r"but chose .* when only \w+ and eager were allowed")
class ClaimsOrderPolicy(SmallestPolicy):
    """Prefers PIECEWISE."""

    traits = ("order",)

    def decide(self, batch, graphs):
        if batch.allows(PIECEWISE) and batch.allows(RuntimeMode.NONE):
            lesser = super().decide(attrs.evolve(batch, allowed=1), graphs)
            if lesser.key is not None:
                return lesser
        return super().decide(batch, graphs)


@planted("traits are known", r"The policy claims unknown traits: stateles; known traits: ")
class MisspeltTraitPolicy(SmallestPolicy):
    """Claims a misspelt trait."""

    traits = ("stateles",)


@planted("trait stateless", r"returned .*, but later")
class ClaimsStatelessPolicy(CountingPolicy):
    """Learns, but claims to be stateless."""

    traits = ("stateless",)

    def __init__(self):
        super().__init__(slow_us=0.0)


@planted("trait all_keys_reachable", r"decide did not choose it for any batch with num_tokens=")
class ClaimsReachablePolicy(SmallestPolicy):
    """Declares a FULL twin of each graph that decide never returns."""

    traits = ("all_keys_reachable",)

    def decide(self, batch, graphs):
        if batch.allows(PIECEWISE):
            lesser = super().decide(attrs.evolve(batch, allowed=1), graphs)
            if lesser.key is not None:
                return lesser
        return Decision.eager(Reason.NO_KEY)


SPLIT = "a split batch is served once and in order"


@planted(SPLIT, r"split \d+ rows into .*, but these parts have \d+ rows?")
class SplitsARowTwicePolicy(SplitsPolicy):
    """Counts the row at the cut in both parts."""

    def parts(self, batch, graphs, mode):
        parts = super().parts(batch, graphs, mode)
        if parts and parts[-1].num_tokens < parts[-1].key.num_tokens:
            parts = (*parts[:-1], Part(parts[-1].key, parts[-1].num_tokens + 1))
        return parts


@planted(SPLIT, r"split \d+ rows into .*, but these parts have only \d+ rows?")
class SplitsARowLessPolicy(SplitsPolicy):
    """Drops one row of the first graph."""

    def parts(self, batch, graphs, mode):
        parts = super().parts(batch, graphs, mode)
        if parts and parts[0].num_tokens > 1:
            parts = (Part(parts[0].key, parts[0].num_tokens - 1), *parts[1:])
        return parts


@planted(SPLIT, r"split \d+ rows and chose .* tokens; a graph must be at least as large")
class SplitsBeyondAGraphPolicy(SplitsPolicy):
    """Halves a batch without checking the limits of its graphs."""

    def parts(self, batch, graphs, mode):
        parts = super().parts(batch, graphs, mode)
        if not parts:
            return ()
        half = batch.num_tokens // 2
        return Part(parts[0].key, batch.num_tokens - half), Part(parts[-1].key, half)


@planted(SPLIT, r"split a batch into .*; put larger graphs first")
class SplitsInAnotherOrderPolicy(SplitsPolicy):
    """Puts the smaller remainder first."""

    def parts(self, batch, graphs, mode):
        return super().parts(batch, graphs, mode)[::-1]


@planted(SPLIT, r"split \d+ rows and chose .*axes=.*, which is not in the registry")
class SplitsOverAnotherBucketPolicy(SplitsPolicy):
    """Chooses a part's graph from another bucket of an axis."""

    def parts(self, batch, graphs, mode):
        parts = super().parts(batch, graphs, mode)
        if not parts:
            return ()
        return *parts[:-1], Part(changed(parts[-1].key, axes=(7,)), parts[-1].num_tokens)
