"""The step that is run: its pieces, modules, guards, and what it changes."""
