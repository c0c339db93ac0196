"""Formats of weights on the GPU: how each is packed, which kernels take it, and how its inputs are made."""
