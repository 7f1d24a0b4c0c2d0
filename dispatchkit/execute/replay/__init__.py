"""How a step runs once its graph exists: plans, launches, timing, checks."""
