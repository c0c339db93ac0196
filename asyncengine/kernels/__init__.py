"""Kernels: the operations that models are made of, one module for each kind of machine."""
