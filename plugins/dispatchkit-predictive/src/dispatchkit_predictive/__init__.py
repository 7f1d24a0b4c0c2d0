"""Predict which graphs are needed next, and capture and upload them in idle time."""

from __future__ import annotations

from dispatchkit_predictive.assistant import Predictive, PredictiveStats
from dispatchkit_predictive.capture_planner import CapturePlanner
from dispatchkit_predictive.predictor import KeyPredictor
from dispatchkit_predictive.simulation import (
    PredictionSimulation,
    fewest_eager_steps,
    keys_of_trace,
    simulate_prediction,
)

__version__ = "0.1.0"

__all__ = [
    "CapturePlanner",
    "KeyPredictor",
    "PredictionSimulation",
    "Predictive",
    "PredictiveStats",
    "fewest_eager_steps",
    "keys_of_trace",
    "simulate_prediction",
]
