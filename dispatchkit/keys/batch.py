"""Batches, batch descriptors and graph keys."""

from __future__ import annotations

from typing import Any

import attrs

from dispatchkit.errors import DescriptorError, counted
from dispatchkit.keys.checks import whole_number
from dispatchkit.keys.modes import ALLOWED_MODES, RuntimeMode

#: Name of a field, its minimum, and whether None is allowed.
_Count = tuple[str, int, bool]


def _read_counts(record: Any, counts: tuple[_Count, ...]) -> None:
    """Validate the counts of a record, and convert them to ints.

    Integers of numpy and torch are accepted. All fields are converted in one call for speed: a
    dispatcher creates a batch for each cell.

    Raises:
        DescriptorError: A value is not a whole number, or is too small.
    """
    for name, minimum, is_optional in counts:
        value = getattr(record, name)
        if type(value) is int and value >= minimum:
            continue
        if value is None and is_optional:
            continue
        number = whole_number(value)
        if number is None or number < minimum:
            allowed = f"a whole number of at least {minimum}{', or None' * is_optional}"
            raise DescriptorError(name, value, allowed)
        object.__setattr__(record, name, number)


def _read_axes(record: Any) -> None:
    """Validate the axis buckets of a record, and convert them to a tuple.

    Raises:
        DescriptorError: The axes are not a tuple or list of hashable values.
    """
    value = record.axes
    if value == ():
        return
    if isinstance(value, list):
        value = tuple(value)
        object.__setattr__(record, "axes", value)
    try:
        hash(value)
    except TypeError:
        value_fits = False  # reject it here, not at the first lookup of the key
    else:
        value_fits = isinstance(value, tuple)
    if not value_fits:
        raise DescriptorError("axes", value, "a tuple of hashable values")


_DESCRIPTOR_COUNTS: tuple[_Count, ...] = (
    ("num_tokens", 1, False),
    ("num_reqs", 1, True),
    ("num_active_loras", 0, False),
    ("query_len", 0, False),
    ("max_query_len", 1, True),
)
_BATCH_COUNTS: tuple[_Count, ...] = (
    ("num_tokens", 0, False),
    ("num_reqs", 0, True),
    ("query_len", 0, False),
    ("max_query_len", 1, True),
    ("num_active_loras", 0, False),
)


@attrs.frozen(cache_hash=True)
class BatchDescriptor:
    """The properties that identify a graph and limit the batches it may serve.

    Attributes:
        num_tokens: Padded number of tokens; the graph serves batches up to this size.
        num_reqs: Number of requests at the capture, and the maximum that the graph serves; None if
            the number does not matter (piecewise graphs).
        uniform: Whether the graph serves uniform decode only: every request is past its prompt and
            has exactly ``query_len`` tokens.
        num_active_loras: Number of adapters at the capture, and the maximum that the graph serves.
        query_len: Tokens per request of a uniform graph, 1 by default; 0 for mixed batches.
        max_query_len: Maximum number of tokens per request, for a decode graph that accepts varying
            query lengths; None for no limit.
        axes: One bucket per configured axis, in the order of the configuration.

    Raises:
        DescriptorError: A value is invalid, or two values contradict each other.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = attrs.field(default=False, converter=bool)
    num_active_loras: int = 0
    query_len: int = 0
    max_query_len: int | None = None
    axes: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        _read_counts(self, _DESCRIPTOR_COUNTS)
        _read_axes(self)
        if self.num_reqs is not None and self.num_reqs > self.num_tokens:
            raise DescriptorError(
                "num_reqs",
                self.num_reqs,
                f"from 1 to num_tokens ({self.num_tokens})",
                "Do not count requests without tokens.",
            )
        if self.query_len and not self.uniform:
            raise DescriptorError(
                "query_len",
                self.query_len,
                "0 for a graph that is not uniform",
                "Set uniform=True, or omit query_len.",
            )
        if self.uniform and not self.query_len:
            # Normalize: descriptors of the same graph must be equal.
            object.__setattr__(self, "query_len", 1)

    @property
    def has_lora(self) -> bool:
        """Whether any adapter is active."""
        return self.num_active_loras > 0

    def relaxed(self) -> BatchDescriptor:
        """Return a copy for mixed batches, without request count and query lengths."""
        return attrs.evolve(self, num_reqs=None, uniform=False, query_len=0, max_query_len=None)

    def __str__(self) -> str:
        parts = [f"tokens={self.num_tokens}"]
        if self.num_reqs is not None:
            parts.append(f"reqs={self.num_reqs}")
        if self.uniform:
            parts.append(f"uniform={self.query_len}")
        if self.max_query_len is not None:
            parts.append(f"max_query_len={self.max_query_len}")
        if self.num_active_loras:
            parts.append(f"loras={self.num_active_loras}")
        if self.axes:
            parts.append(f"axes={','.join(map(str, self.axes))}")
        return " ".join(parts)


@attrs.frozen(cache_hash=True)
class GraphKey:
    """The identity of a graph: its runtime mode and batch descriptor."""

    mode: RuntimeMode
    descriptor: BatchDescriptor

    def __attrs_post_init__(self) -> None:
        # The int 2 equals FULL but would fail the `is RuntimeMode.FULL` checks.
        mode: Any = self.mode
        descriptor: Any = self.descriptor
        if not isinstance(mode, RuntimeMode) or mode is RuntimeMode.NONE:
            allowed = "RuntimeMode.PIECEWISE or RuntimeMode.FULL"
            hint = "Pass one of these; eager runs have no key."
            raise DescriptorError("mode", mode, allowed, hint)
        if not isinstance(descriptor, BatchDescriptor):
            raise DescriptorError("descriptor", descriptor, "a BatchDescriptor")

    @property
    def num_tokens(self) -> int:
        """Padded number of tokens."""
        return self.descriptor.num_tokens

    def covers(self, batch: Batch) -> bool:
        """Return whether the graph can serve a batch.

        A graph with adapters also serves batches with fewer or no adapters, because unused adapters
        contribute nothing. A uniform graph serves only uniform batches of the same query length.
        """
        own = self.descriptor
        return (
            own.num_tokens >= batch.num_tokens
            and own.num_active_loras >= batch.num_active_loras
            and (own.num_reqs is None or batch.num_reqs is None or own.num_reqs >= batch.num_reqs)
            and (not own.uniform or (batch.uniform and batch.query_len == own.query_len))
            and (
                own.max_query_len is None
                or (batch.max_query_len is not None and batch.max_query_len <= own.max_query_len)
            )
            and own.axes == batch.axes
        )

    def __str__(self) -> str:
        return f"{self.mode.name} {self.descriptor}"


@attrs.frozen
class Batch:
    """A batch as policies see it; warm steps do not create one.

    Attributes:
        num_tokens: Unpadded number of tokens (rows). Policies never receive a batch of 0 tokens.
        num_reqs: Number of requests, or None if the caller did not specify it.
        uniform: Whether the batch is uniform decode: every request is past its prompt and has
            exactly ``query_len`` tokens. A batch with the last chunk of a prompt is mixed, even if
            the chunk has ``query_len`` tokens. Shapes do not show the difference, so the caller
            must set this flag.
        query_len: Tokens per request if uniform, else 0.
        max_query_len: Largest number of tokens in one request, or None if unknown.
        num_active_loras: Number of adapters in use.
        allowed: Code of the allowed runtime modes, an index into ``ALLOWED_MODES``.
        axes: One item per configured axis, in the order of the configuration: the bucket of the
            value, or None for a value outside all buckets of the axis.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    query_len: int = 0
    max_query_len: int | None = None
    num_active_loras: int = 0
    allowed: int = int(RuntimeMode.FULL)
    axes: tuple[int | None, ...] = ()

    def __attrs_post_init__(self) -> None:
        _read_counts(self, _BATCH_COUNTS)
        _read_axes(self)
        code, last = whole_number(self.allowed), len(ALLOWED_MODES) - 1
        if code is None or not 0 <= code <= last:
            raise DescriptorError(
                "allowed",
                self.allowed,
                f"a code from 0 to {last}",
                "Use allowed_modes_code(modes).",
            )
        if code is not self.allowed:
            object.__setattr__(self, "allowed", code)

    @property
    def allowed_modes(self) -> frozenset[RuntimeMode]:
        """The runtime modes allowed for this batch."""
        return ALLOWED_MODES[self.allowed]

    def allows(self, mode: RuntimeMode) -> bool:
        """Return whether a runtime mode is allowed for this batch."""
        return mode in ALLOWED_MODES[self.allowed]

    @property
    def facts(self) -> list[str]:
        """The size and kind of the batch, in words.

        Axes are left out, because a batch stores their buckets but not their names.
        """
        facts = [counted(self.num_tokens, "token")]
        if self.num_reqs is not None:
            facts.append(counted(self.num_reqs, "request"))
        facts.append(
            f"uniform decode ({counted(self.query_len, 'token')} per request)"
            if self.uniform
            else "mixed"
        )
        if self.num_active_loras:
            facts.append(counted(self.num_active_loras, "adapter"))
        return facts

    def __str__(self) -> str:
        buckets = ["outside all buckets" if each is None else str(each) for each in self.axes]
        axes = [f"axes ({', '.join(buckets)})"] if buckets else []
        modes = ", ".join(mode.name for mode in sorted(self.allowed_modes))
        return f"{', '.join(self.facts + axes)}; allowed: {modes}"
