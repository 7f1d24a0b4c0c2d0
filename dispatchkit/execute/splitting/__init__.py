"""From a step in plain Python to pieces."""
