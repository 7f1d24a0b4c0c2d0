"""Generate the requests behind a step trace, with the tokens and positions of each step.

A step trace contains the numbers of tokens and requests of each step, but not the requests
themselves. The demo generates requests deterministically:

- in a uniform step, each request gets ``max_query_len`` tokens;
- in any other step, each request gets one token. The remaining tokens go to as few requests as
  possible, each with at most ``max_query_len`` tokens. These requests are new, and their tokens are
  prompts;
- if a step continues fewer requests than are active, the oldest requests end;
- a request whose cache is full ends, and a new request replaces it.

Positions, slots and token ids follow from these rules. Prompts are cut to the maximum length, and
steps to the maximum numbers of requests and tokens. The omitted tokens and requests are counted.
Steps without tokens are skipped.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

import attrs

from dispatchkit.errors import TraceError
from dispatchkit.observe.trace import StepTrace

#: Default number of steps: enough to include decode and mixed steps, but few enough for a CPU to
#: run them within half a minute.
DEFAULT_STEPS = 200


@attrs.frozen
class PlannedStep:
    """One step, token by token.

    Attributes:
        num_reqs: Number of requests in the step.
        uniform: Whether all requests are past their prompts and have ``query_len`` tokens.
        query_len: Number of tokens per request if uniform, else 0.
        tokens: Id of each token.
        positions: Position of each token in its request, from 0.
        slots: Cache slot of each token's request.
        cut_tokens: Number of tokens of the trace's step that are omitted in this step.
    """

    num_reqs: int
    uniform: bool
    query_len: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    cut_tokens: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the step."""
        return len(self.tokens)


@attrs.frozen
class Traffic:
    """The generated steps, and counts of the omitted parts of the trace.

    Attributes:
        steps: The steps, in the order of the trace.
        num_requests: Number of distinct requests.
        max_prompt: Maximum prompt length in tokens.
        num_tokens: Number of tokens of all steps, without omitted tokens.
        cut_tokens: Number of omitted tokens.
        cut_steps: Number of steps with omitted tokens.
        cut_requests: Number of requests omitted for lack of a slot, or because of the maximum
            number of tokens per step.
    """

    steps: tuple[PlannedStep, ...]
    num_requests: int
    max_prompt: int
    num_tokens: int
    cut_tokens: int
    cut_steps: int
    cut_requests: int

    @property
    def query_len(self) -> int:
        """The most frequent query length of uniform steps; 1 if there are none."""
        lengths = [step.query_len for step in self.steps if step.uniform]
        return max(set(lengths), key=lengths.count, default=1)


@attrs.define
class _Request:
    number: int
    slot: int
    length: int = 0


class _Requests:
    """The active requests, oldest first, and the free slots of the cache."""

    def __init__(self, num_slots: int) -> None:
        self.active: OrderedDict[int, _Request] = OrderedDict()
        self.num_started = 0
        self._free = list(range(num_slots))

    def leave(self, request: _Request) -> None:
        del self.active[request.number]
        heapq.heappush(self._free, request.slot)

    def start(self) -> _Request:
        request = _Request(self.num_started, heapq.heappop(self._free))
        self.num_started += 1
        self.active[request.number] = request
        return request


def plan_traffic(
    trace: StepTrace,
    *,
    num_slots: int,
    cache_len: int,
    vocab: int,
    max_step_tokens: int = 4096,
) -> Traffic:
    """Return a trace's steps with generated requests.

    Args:
        trace: A trace with the columns ``num_reqs``, ``max_query_len`` and ``uniform_decode``.
        num_slots: Maximum number of concurrent requests.
        cache_len: Number of tokens in the cache of a request. Prompts are limited to 7/8 of it, to
            leave room for decoding.
        vocab: Number of token ids.
        max_step_tokens: Maximum number of tokens of a step.

    Raises:
        TraceError: A column is missing, or no step has tokens and requests.
    """
    max_prompt = max(1, cache_len * 7 // 8)
    requests = _Requests(num_slots)
    steps: list[PlannedStep] = []
    cut_requests = 0
    for num_tokens, trace_reqs, max_query_len, uniform_decode in zip(
        *(
            trace.column(name)
            for name in ("num_tokens", "num_reqs", "max_query_len", "uniform_decode")
        ),
        strict=True,
    ):
        if num_tokens == 0:
            continue
        uniform = bool(uniform_decode) and max_query_len <= max_prompt
        query_len = max_query_len if uniform else 1
        num_reqs = min(trace_reqs, num_slots, max_step_tokens // query_len)
        cut_requests += trace_reqs - num_reqs
        rest = 0 if uniform else min(num_tokens - trace_reqs, max_step_tokens - num_reqs)
        prompts = _prompt_lengths(rest, max_query_len, num_reqs, max_prompt)
        members = _members(requests, num_reqs, len(prompts), query_len, cache_len)
        counts = [query_len] * (num_reqs - len(prompts)) + prompts
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for request, count in zip(members, counts, strict=True):
            span = range(request.length, request.length + count)
            # Token ids are arbitrary, but depend on both the request and the position.
            tokens += [(request.number * 7919 + position * 104_729) % vocab for position in span]
            positions += span
            slots += [request.slot] * count
            request.length += count
        if tokens:
            steps.append(
                PlannedStep(
                    num_reqs,
                    uniform,
                    query_len if uniform else 0,
                    tuple(tokens),
                    tuple(positions),
                    tuple(slots),
                    num_tokens - len(tokens),
                )
            )
    if not steps:
        raise TraceError(
            trace.source,
            None,
            "no step has both tokens and requests. Run more steps of the trace, or use another "
            "trace.",
        )
    return Traffic(
        tuple(steps),
        requests.num_started,
        max_prompt,
        sum(step.num_tokens for step in steps),
        sum(step.cut_tokens for step in steps),
        sum(step.cut_tokens > 0 for step in steps),
        cut_requests,
    )


def _prompt_lengths(rest: int, max_query_len: int, num_reqs: int, max_prompt: int) -> list[int]:
    """Return the lengths of a step's prompts, using as few prompts as possible.

    Args:
        rest: Tokens of the step beyond one per request.
        max_query_len: Maximum number of tokens of a request in the trace's step.
        num_reqs: Number of requests of the step.
        max_prompt: Maximum prompt length in tokens.
    """
    lengths: list[int] = []
    while rest > 0 and max_query_len > 1 and len(lengths) < num_reqs:
        more = min(rest, max_query_len - 1)
        lengths.append(min(1 + more, max_prompt))
        rest -= more
    return lengths


def _members(
    requests: _Requests, num_reqs: int, num_prompts: int, query_len: int, cache_len: int
) -> list[_Request]:
    """Return a step's requests: continuing requests first, then new requests."""
    for request in list(requests.active.values()):
        if request.length + query_len > cache_len:
            requests.leave(request)
    while len(requests.active) > num_reqs - num_prompts:
        requests.leave(next(iter(requests.active.values())))
    members = list(requests.active.values())
    return members + [requests.start() for _ in range(num_reqs - len(members))]
