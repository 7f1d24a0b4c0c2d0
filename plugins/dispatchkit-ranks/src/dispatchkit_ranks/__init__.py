"""Make all ranks use the same mode and padded size in every step.

``RankAgreement`` exchanges values between the ranks of a torch.distributed process group.
``RankedDispatcher`` wraps a ``Dispatcher``, and ``RankedRunner`` wraps a ``GraphRunner``. Both use
a ``RankAgreement`` to decide each step.
Importing this package does not import torch; the first access to ``RankAgreement``,
``AgreementStats`` or ``RankedRunner`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatchkit_ranks.dispatcher import RankedDispatcher
from dispatchkit_ranks.facts import AgreedBatch, Facts
from dispatchkit_ranks.fingerprint import differences, fingerprint
from dispatchkit_ranks.leader import LeaderPolicy
from dispatchkit_ranks.protocol import Phase, Ranks

if TYPE_CHECKING:
    from dispatchkit_ranks.agreement import AgreementStats, RankAgreement
    from dispatchkit_ranks.runner import RankedRunner

__version__ = "0.1.0"

__all__ = [
    "AgreedBatch",
    "AgreementStats",
    "Facts",
    "LeaderPolicy",
    "Phase",
    "RankAgreement",
    "RankedDispatcher",
    "RankedRunner",
    "Ranks",
    "differences",
    "fingerprint",
]

_NEEDS_TORCH = {
    "AgreementStats": "agreement",
    "RankAgreement": "agreement",
    "RankedRunner": "runner",
}


def __getattr__(name: str) -> Any:
    module = _NEEDS_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from dispatchkit.errors import BackendUnavailableError

        raise BackendUnavailableError(
            f"{name} needs torch, which is not installed. Run: pip install 'dispatchkit[torch]'."
        ) from error
    globals()[name] = value
    return value
