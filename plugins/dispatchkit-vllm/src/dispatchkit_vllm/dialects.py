"""The differences between the generations of vLLM's dispatch rule, as data.

The rule itself is implemented once, in ``ladder`` and ``policy``. A dialect selects among its
few variations.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import attrs

__all__ = ["DIALECTS", "Dialect", "Loras", "Padding"]


class Loras(enum.Enum):
    """The counts of active adapters that have separate graphs."""

    NONE = "none"  # Adapters are not part of the key.
    FLAG = "flag"  # With or without adapters; the captured graph serves every count.
    EVERY_COUNT = "every count"  # One graph per count, or the largest when drafting.
    CASES = "cases"  # The largest count, and powers of two below it if configured.
    CASES_CLAMPED = "cases, clamped"  # As CASES; larger counts use the largest case.


class Padding(enum.Enum):
    """How the bucket of a batch is determined."""

    SHARED = "shared"  # One size list and one table for all modes.
    PER_QUERY_LEN = "per query length"  # Uniform batches of several tokens have separate ones.
    PER_MODE = "per mode"  # The smallest graph of each mode that is large enough.


@attrs.frozen(kw_only=True)
class Dialect:
    """One generation of the rule.

    Attributes:
        name: Name of the policy.
        summary: One line for lists of policies.
        padding: How the bucket of a batch is determined.
        loras: The counts of adapters that have graphs.
        sizes_descending: Keys are declared in descending order of size.
        names_requests: Keys include their number of requests.
        relaxes_mixed_full: FULL keys of mixed batches allow any number of requests, and a
            batch looks for such a key after its exact one. Otherwise they allow as many as
            fit, and a batch looks only for the exact key.
        caps_uniform_reqs: A uniform key never has more requests than a batch may have.
        uniform_needs_separate: Uniform batches are distinguished only if the mode has a
            separate routine for them.
        rounding: Generation whose rule rounds sizes up to multiples of the query length;
            empty: sizes are not changed.
        traits: Permanent properties that the policy claims, checked by the test kit.
        varies_query_len: Decode graphs for requests of varying length are captured if the
            configuration asks for them.
    """

    name: str
    summary: str
    padding: Padding = Padding.SHARED
    loras: Loras = Loras.CASES
    sizes_descending: bool = False
    names_requests: bool = True
    relaxes_mixed_full: bool = True
    caps_uniform_reqs: bool = False
    uniform_needs_separate: bool = False
    rounding: str = ""
    traits: frozenset[str] = frozenset()
    varies_query_len: bool = False


_TRAITS = frozenset({"smallest_bucket", "monotone", "order", "stateless", "all_keys_reachable"})

V0_11 = Dialect(
    name="vllm@0.11",
    summary="vLLM 0.11.0: (tokens, uniform), no adapters",
    loras=Loras.NONE,
    sizes_descending=True,
    names_requests=False,
    traits=_TRAITS,
)
V0_11_1 = Dialect(
    name="vllm@0.11.1",
    summary="vLLM 0.11.1: as 0.11 with cascade attention and an adapter flag",
    loras=Loras.FLAG,
    names_requests=False,
    rounding="0.11.1",
    traits=_TRAITS,
)
V0_13 = Dialect(
    name="vllm@0.13",
    summary="vLLM 0.13: keys name their requests, the dispatcher pads",
    loras=Loras.FLAG,
    rounding="0.13",
    traits=_TRAITS,
)
V0_33 = Dialect(
    name="vllm@0.33",
    summary="vLLM 0.33, first model runner: counts of adapters, sets of allowed modes",
    relaxes_mixed_full=False,
    caps_uniform_reqs=True,
    uniform_needs_separate=True,
    rounding="newest",
    traits=_TRAITS,
)
NEWEST = attrs.evolve(
    V0_33, name="vllm", summary="vLLM's rule, newest release known (0.33); the default"
)
MANAGER = Dialect(
    name="vllm@0.33-manager",
    summary="vLLM 0.33, second model runner: searches the smallest graph of each mode",
    padding=Padding.PER_MODE,
    loras=Loras.CASES_CLAMPED,
    relaxes_mixed_full=False,
    caps_uniform_reqs=True,
    uniform_needs_separate=True,
    varies_query_len=True,
    # Graphs of a query length have other sizes than graphs of mixed batches, so a batch with one
    # more token may find a smaller graph.
    traits=_TRAITS - {"monotone"},
)
DRAFTER = Dialect(
    name="vllm-drafter",
    summary="several uniform query lengths, with sizes aligned to them",
    padding=Padding.PER_QUERY_LEN,
    loras=Loras.NONE,
    names_requests=False,
    traits=_TRAITS,
)
LORA_COUNT = Dialect(
    name="vllm-lora-count",
    summary="one graph for each count of active adapters",
    loras=Loras.EVERY_COUNT,
    rounding="0.13",
    traits=_TRAITS,
)

#: Every dialect by the name of its policy.
DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        each.name: each
        for each in (NEWEST, V0_11, V0_11_1, V0_13, V0_33, MANAGER, DRAFTER, LORA_COUNT)
    }
)
