"""Formats of weights on the CPU: how each is packed, and how it is multiplied."""
