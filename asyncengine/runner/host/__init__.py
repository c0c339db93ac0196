"""The GPU's side of host memory: a tier of KV blocks, and rows that decode on the host."""
