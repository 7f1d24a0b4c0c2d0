"""Inputs and outputs: validate inputs, copy them into static buffers, and cut the outputs."""
