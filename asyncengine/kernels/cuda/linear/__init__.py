"""Projections: which kernel multiplies, and the kernels."""
