"""The tape: a backend with the semantics of CUDA graphs on a CPU."""

from dispatchkit.backends.tape.backend import TapeBackend

__all__ = ["TapeBackend"]
