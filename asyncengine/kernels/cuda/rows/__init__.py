"""Kernels that work on one row at a time."""
