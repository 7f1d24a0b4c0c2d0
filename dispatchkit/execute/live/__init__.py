"""Changing and recording a runner while it serves."""
