"""Well-known lists of capture sizes, for comparison with a plan."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["power_sizes", "rival_sizes", "vllm_default_sizes", "vllm_interactivity_sizes"]


def _coarse(max_size: int) -> set[int]:
    return {*range(8, min(max_size + 1, 256), 8), *range(256, max_size + 1, 16)}


def vllm_default_sizes(max_size: int = 512) -> tuple[int, ...]:
    """Return vLLM's default list up to a maximum: 51 sizes for 512.

    The maximum is always included, so that all lists cover the same steps.

    Source: vLLM 0.13 to 0.33, ``_set_cudagraph_sizes`` in ``vllm/config/vllm.py``.
    """
    return tuple(
        sorted({size for size in (1, 2, 4) if size <= max_size} | _coarse(max_size) | {max_size})
    )


def vllm_interactivity_sizes(max_size: int = 512) -> tuple[int, ...]:
    """Return vLLM's list for ``performance_mode="interactivity"``: 76 sizes for 512.

    It contains every size up to 32, where the default list contains only 1, 2, 4 and the multiples
    of 8. Above 32, the lists are equal.
    """
    return tuple(sorted({*range(1, min(max_size, 32) + 1)} | _coarse(max_size) | {max_size}))


def power_sizes(max_size: int = 512) -> tuple[int, ...]:
    """Return the powers of two up to a maximum, and the maximum."""
    return tuple(sorted({1 << bit for bit in range(max_size.bit_length())} | {max_size}))


def rival_sizes(max_size: int) -> Mapping[str, tuple[int, ...]]:
    """Return the lists that a plan is compared with, by name."""
    return {
        "vllm-default": vllm_default_sizes(max_size),
        "vllm-interactivity": vllm_interactivity_sizes(max_size),
        "powers-of-two": power_sizes(max_size),
    }
