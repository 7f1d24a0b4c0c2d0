"""The demo: a small decoder with a KV cache, and a step trace from real requests.

This module, ``traffic`` and ``report`` do not import torch.
"""
