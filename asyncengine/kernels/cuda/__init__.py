"""Kernels for CUDA: Triton, Gluon and torch."""
