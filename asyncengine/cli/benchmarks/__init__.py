"""The benchmarks behind ``asyncengine bench``, one per module."""
