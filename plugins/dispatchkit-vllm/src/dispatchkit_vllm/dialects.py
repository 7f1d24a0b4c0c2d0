"""The versions of vLLM's dispatch rule, as data.

The rule is implemented once, in ``ladder`` and ``policy``. A dialect selects variations of the
rule.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import attrs

__all__ = ["DIALECTS", "Dialect", "Loras", "Padding"]


class Loras(enum.Enum):
    """The numbers of active adapters that have separate graphs."""

    NONE = "none"  # Adapters are not part of the key.
    FLAG = "flag"  # Keys have an adapter flag; one graph serves any number above 0.
    EVERY_COUNT = "every count"  # Each number, or only the largest if query_len > 1.
    CASES = "cases"  # The largest number, and powers of two below it if configured.
    CASES_CLAMPED = "cases, clamped"  # Like CASES, but the largest case also serves larger numbers.


class Padding(enum.Enum):
    """The rule that chooses the bucket of a batch."""

    SHARED = "shared"  # All modes share one list of sizes and one padding table.
    PER_QUERY_LEN = "per query length"  # Uniform batches with query_len > 1 have separate sizes.
    PER_MODE = "per mode"  # Each mode uses its smallest graph that is large enough.


@attrs.frozen(kw_only=True)
class Dialect:
    """One version of vLLM's dispatch rule.

    Attributes:
        name: Name of the policy.
        summary: One-line description for lists of policies.
        padding: The rule that chooses the bucket of a batch.
        loras: The numbers of active adapters that have separate graphs.
        sizes_descending: Whether keys are declared in descending order of size.
        names_requests: Whether keys include a number of requests.
        relaxes_mixed_full: Whether mixed batches have FULL keys that allow any number of requests.
            These keys are tried after the exact key of a batch. If false, a FULL key of mixed
            batches allows as many requests as tokens, at most ``max_num_seqs``.
        caps_uniform_reqs: Whether a uniform key is limited to ``max_num_seqs`` requests.
        uniform_needs_separate: Whether uniform batches are distinguished from mixed batches only
            if the mode has a separate routine for them.
        rounding: Version of the rule that rounds sizes up to multiples of the query length;
            empty for no rounding.
        traits: Properties that the policy claims and the test kit checks.
        varies_query_len: Whether the configuration can request decode graphs for requests of
            varying length.
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
    summary="vLLM 0.11.0: keys include the number of tokens and a uniform flag, but not adapters",
    loras=Loras.NONE,
    sizes_descending=True,
    names_requests=False,
    traits=_TRAITS,
)
V0_11_1 = Dialect(
    name="vllm@0.11.1",
    summary="vLLM 0.11.1: like 0.11.0, with cascade attention and an adapter flag",
    loras=Loras.FLAG,
    names_requests=False,
    rounding="0.11.1",
    traits=_TRAITS,
)
V0_13 = Dialect(
    name="vllm@0.13",
    summary="vLLM 0.13: keys include the number of requests; the dispatcher pads batches",
    loras=Loras.FLAG,
    rounding="0.13",
    traits=_TRAITS,
)
V0_33 = Dialect(
    name="vllm@0.33",
    summary="vLLM 0.33, first model runner: keys include adapter counts; callers can exclude modes",
    relaxes_mixed_full=False,
    caps_uniform_reqs=True,
    uniform_needs_separate=True,
    rounding="newest",
    traits=_TRAITS,
)
NEWEST = attrs.evolve(
    V0_33, name="vllm", summary="vLLM's rule in the newest known release (0.33); the default"
)
MANAGER = Dialect(
    name="vllm@0.33-manager",
    summary="vLLM 0.33, second model runner: each mode uses its smallest graph that fits the batch",
    padding=Padding.PER_MODE,
    loras=Loras.CASES_CLAMPED,
    relaxes_mixed_full=False,
    caps_uniform_reqs=True,
    uniform_needs_separate=True,
    varies_query_len=True,
    # The sizes of uniform and mixed graphs differ, so a larger batch may use a smaller graph.
    traits=_TRAITS - {"monotone"},
)
DRAFTER = Dialect(
    name="vllm-drafter",
    summary="Variant with several uniform query lengths and separate sizes for uniform batches",
    padding=Padding.PER_QUERY_LEN,
    loras=Loras.NONE,
    names_requests=False,
    traits=_TRAITS,
)
LORA_COUNT = Dialect(
    name="vllm-lora-count",
    summary="Variant with separate graphs for each number of active adapters",
    loras=Loras.EVERY_COUNT,
    rounding="0.13",
    traits=_TRAITS,
)

#: All dialects, by the name of their policy.
DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        each.name: each
        for each in (NEWEST, V0_11, V0_11_1, V0_13, V0_33, MANAGER, DRAFTER, LORA_COUNT)
    }
)
