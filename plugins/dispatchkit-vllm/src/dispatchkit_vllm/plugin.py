"""Register this distribution's policies with dispatchkit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dispatchkit import Policy
from dispatchkit.hookspecs import PolicySpec, hookimpl

from dispatchkit_vllm.dialects import DIALECTS, NEWEST
from dispatchkit_vllm.policy import VllmPolicy
from dispatchkit_vllm.runner_rule import current_rule


def _vllm() -> Policy:
    """Return the newest rule; inside vLLM, the rule of the installed release."""
    return current_rule() or VllmPolicy(NEWEST)


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
