"""Map policies, commands and other names to the distributions that provide them.

Elsewhere in the core, only docstrings and comments name dispatchkit's plugins. This file names the
default policy and, for installation hints, the distributions of plugins. ``load_attribute`` imports
a distribution when one of its Python names is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from dispatchkit.errors import MissingDistributionError

#: Name of the policy used if neither the user nor a plugin chooses a policy.
DEFAULT_POLICY = "vllm"

#: The distribution of each name, by kind of name. The kinds are the values of ``Spec.kind``, and
#: ``attribute`` for Python attributes of the package (``dispatchkit.<name>``).
DISTRIBUTIONS: Mapping[str, Mapping[str, str]] = {
    "policy": {
        **dict.fromkeys((DEFAULT_POLICY, "vllm-drafter", "vllm-lora-count"), "dispatchkit-vllm"),
        "adaptive": "dispatchkit-adaptive",
        "composite": "dispatchkit-composite",
        "grid": "dispatchkit-plan",
        "threshold": "dispatchkit-threshold",
    },
    "lane policy": dict.fromkeys(
        ("round-robin", "least-loaded", "by-key", "priority"), "dispatchkit-multistream"
    ),
    "observer": {
        "predictive": "dispatchkit-predictive",
        "prometheus": "dispatchkit-prometheus",
        "prometheus-engine": "dispatchkit-prometheus",
    },
    "command": dict.fromkeys(("calibrate", "plan", "report", "simulate"), "dispatchkit-plan"),
    "attribute": {
        **dict.fromkeys(("GraphWrapper", "set_forward_context"), "dispatchkit-vllm"),
        **dict.fromkeys(("batch_facts", "split_module"), "dispatchkit-compile"),
        **dict.fromkeys(
            (
                "BUILTIN_COST_MODELS",
                "calibrate",
                "emit",
                "explain_trace",
                "forecast_graph_memory",
                "forecast_swap",
                "load_cost_model",
                "plan_sizes",
                "read_steps",
                "read_workload",
                "save_cost_model",
                "simulate",
                "write_report",
            ),
            "dispatchkit-plan",
        ),
    },
}


def distribution_of(kind: str, name: str) -> str | None:
    """Return the distribution that provides a name; None if unknown.

    A version suffix is ignored: ``vllm@0.13`` is looked up as ``vllm``.
    """
    return DISTRIBUTIONS.get(kind, {}).get(name.partition("@")[0])


def install_hint(kind: str, name: str) -> str:
    """Return an installation hint for a name; empty if the name is unknown."""
    distribution = distribution_of(kind, name)
    if distribution is None:
        return ""
    return f"It is part of {distribution}. Run: pip install {distribution}."


def load_attribute(name: str, what: str = "") -> Any:
    """Return an attribute of a dispatchkit distribution, importing its package if necessary.

    Args:
        name: A name of kind ``attribute``, defined in the package of its distribution.
        what: Subject of the error message, such as ``explain --trace``; by default
            ``dispatchkit.<name>``.

    Raises:
        MissingDistributionError: The distribution is not installed.
    """
    distribution = DISTRIBUTIONS["attribute"][name]
    package = distribution.replace("-", "_")
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        text = (
            f"{what or f'dispatchkit.{name}'} needs {distribution}, which is not installed. "
            f"Run: pip install {distribution}."
        )
        raise MissingDistributionError(text, name=name) from None
    return getattr(module, name)
