"""Weights of projections as the CPU keeps them."""
