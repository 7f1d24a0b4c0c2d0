"""Measure the time and memory of a step on this device."""
