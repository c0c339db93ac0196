"""Formats of checkpoints: one class a format, which makes packed weights of the tensors of a module."""
