"""Structured output: which tokens a grammar allows next, computed on worker threads while the device runs."""
