"""Swap policies and record steps while a runner serves; decide steps before they run."""
