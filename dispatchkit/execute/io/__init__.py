"""Inputs and outputs: validation, copies into static input buffers, cutting to real rows."""
