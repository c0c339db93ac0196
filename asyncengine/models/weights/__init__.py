"""Weights of a model: where they come from and how a model asks for them."""
