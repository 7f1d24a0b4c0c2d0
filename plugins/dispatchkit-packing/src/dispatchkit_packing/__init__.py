"""Packers, which decide which items of a call share a step."""

from __future__ import annotations

from dispatchkit_packing.packers import CheapestPacking, first_fit_decreasing

__version__ = "0.1.0"

__all__ = ["CheapestPacking", "first_fit_decreasing"]
