"""Running steps with existing graphs: plans, launches, timing, checks."""
