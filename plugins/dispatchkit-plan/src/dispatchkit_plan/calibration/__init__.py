"""Measurement of a step's time and memory on this device."""
