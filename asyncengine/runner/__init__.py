"""Backends: a loaded model and the step loop that runs it. backend.py loads one. state/ has the memory of keys and
values, steps/ the forward pass, start/ the preparations on a GPU, costs/ the times of steps, host/ the host's part."""
