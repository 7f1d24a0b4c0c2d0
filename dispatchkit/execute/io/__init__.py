"""Inputs and outputs: checked, copied into static buffers, cut to the real rows."""
