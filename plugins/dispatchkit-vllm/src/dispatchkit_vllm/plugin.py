"""The policies that this distribution registers with dispatchkit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dispatchkit import Policy
from dispatchkit.hookspecs import PolicySpec, hookimpl

from dispatchkit_vllm.dialects import DIALECTS, NEWEST
from dispatchkit_vllm.policy import VllmPolicy
from dispatchkit_vllm.runner_rule import rule_in_force


def _vllm() -> Policy:
    """Return the newest rule, or inside vLLM the rule of the installed release."""
    return rule_in_force() or VllmPolicy(NEWEST)


@hookimpl
def dispatchkit_register_policies() -> Sequence[PolicySpec]:
    """Register one policy for each dialect."""
    return [
        PolicySpec(
            name,
            _vllm if dialect is NEWEST else partial(VllmPolicy, name),
            summary=dialect.summary,
        )
        for name, dialect in DIALECTS.items()
    ]
