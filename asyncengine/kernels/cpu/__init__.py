"""Kernels for host memory."""
