"""Lanes: several streams of one runner."""
