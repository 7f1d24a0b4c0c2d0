"""Inputs and outputs: validation, copies into static buffers, cutting to the real rows."""
