"""Paged attention: which kernel attends, and the kernels."""
