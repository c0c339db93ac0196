"""A step on the device: its tensors, and how it gets there."""
