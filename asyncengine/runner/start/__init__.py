"""The preparations of a start: kernels compiled, plans measured, scales calibrated, graphs captured."""
