"""Swap policies, decide steps before they run, and record steps while a runner serves."""
