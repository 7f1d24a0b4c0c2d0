"""One line that runs a module or a function through graphs."""

from dispatchkit.execute.graphed.front import graphed

__all__ = ["graphed"]
