"""The step: its pieces, modules, guards, and the state it changes."""
