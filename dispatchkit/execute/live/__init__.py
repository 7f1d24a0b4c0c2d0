"""Swap policies, run decided steps and record steps while a runner serves."""
