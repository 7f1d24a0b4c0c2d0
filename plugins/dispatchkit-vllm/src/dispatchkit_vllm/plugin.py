"""What this distribution registers with dispatchkit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dispatchkit.hookspecs import PolicySpec, hookimpl

from dispatchkit_vllm.dialects import DIALECTS
from dispatchkit_vllm.policy import VllmPolicy


@hookimpl
def dispatchkit_register_policies() -> Sequence[PolicySpec]:
    """Register one policy for each dialect."""
    return [
        PolicySpec(name, partial(VllmPolicy, name), summary=dialect.summary)
        for name, dialect in DIALECTS.items()
    ]
