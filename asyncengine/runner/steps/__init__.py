"""The computation of a step, on the CPU and on a GPU."""
