"""Mixtures of experts on the GPU: routing, sorting and grouped products, all without the host."""
