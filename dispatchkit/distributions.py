"""Which distribution brings a name that the core does not have.

The one place where the core names its own plugins: it imports none of them. The table serves
the default policy and every message that says what to install.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The policy that is taken where neither the user nor a plugin chooses one.
DEFAULT_POLICY = "vllm"

#: Kind of name -> name -> distribution. Kinds are those of the hooks' records, and
#: ``attribute`` for Python names of ``dispatchkit`` (``dispatchkit.<name>``).
DISTRIBUTIONS: Mapping[str, Mapping[str, str]] = {
    "policy": {
        DEFAULT_POLICY: "dispatchkit-vllm",
        "adaptive": "dispatchkit-adaptive",
        "composite": "dispatchkit-composite",
        "threshold": "dispatchkit-threshold",
    },
    "lane policy": dict.fromkeys(
        ("round-robin", "least-loaded", "by-key", "priority"), "dispatchkit-multistream"
    ),
    "observer": {
        "predictive": "dispatchkit-predictive",
        "prometheus": "dispatchkit-prometheus",
    },
    "command": {},
    "attribute": {},
}


def distribution_of(kind: str, name: str) -> str | None:
    """Return the distribution that brings a name; None if it is not known.

    A release is not part of the name: ``vllm@0.13`` comes with ``vllm``.
    """
    return DISTRIBUTIONS.get(kind, {}).get(name.partition("@")[0])


def install_hint(kind: str, name: str) -> str:
    """Return a sentence that says what to install for a name; empty if it is not known."""
    distribution = distribution_of(kind, name)
    if distribution is None:
        return ""
    return f"It comes with {distribution}. Run: pip install {distribution}."
