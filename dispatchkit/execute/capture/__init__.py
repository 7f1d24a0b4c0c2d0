"""Capture of graphs, and the life cycle of captured keys."""
