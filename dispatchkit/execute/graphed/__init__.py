"""Run a module or a function through graphs, with one line of code."""

from dispatchkit.execute.graphed.front import graphed

__all__ = ["graphed"]
