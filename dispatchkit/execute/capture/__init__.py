"""Capture of keys, and the life cycle of their graphs."""
