"""Layers that keep a state for each sequence: short convolutions, and the recurrences of Mamba-2 and gated DeltaNet."""
