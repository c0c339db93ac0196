"""Tokens that wait for a thread while the device runs: what a grammar allows, or a callable makes of the logits."""
