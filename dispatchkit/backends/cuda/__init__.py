"""CUDA graphs, streams and events."""

from dispatchkit.backends.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
