"""The demo: a small decoder with a real cache, and a real step trace to run.

Modules that compute import torch; this one, ``traffic`` and ``report`` do not.
"""
