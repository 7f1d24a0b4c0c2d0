"""Run steps with existing graphs: plans, launches, timing, checks."""
