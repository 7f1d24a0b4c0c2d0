"""The demo: a small decoder with a KV cache, and a real step trace.

This module, ``traffic`` and ``report`` do not import torch.
"""
