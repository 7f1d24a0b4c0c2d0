"""Predict which graphs are needed next; capture them in idle time, upload and keep them."""

from __future__ import annotations

from dispatchkit_predictive.assistant import Predictive, PredictiveStats
from dispatchkit_predictive.foresight import Foresight
from dispatchkit_predictive.predictor import KeyPredictor
from dispatchkit_predictive.rehearsal import Rehearsal, at_best, keys_of_trace, rehearse

__version__ = "0.1.0"

__all__ = [
    "Foresight",
    "KeyPredictor",
    "Predictive",
    "PredictiveStats",
    "Rehearsal",
    "at_best",
    "keys_of_trace",
    "rehearse",
]
