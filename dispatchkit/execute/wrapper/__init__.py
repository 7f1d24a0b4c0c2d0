"""Graphs around a callable, chosen by a forward context."""
