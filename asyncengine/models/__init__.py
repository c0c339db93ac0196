"""Model families, one file each; registry.py finds the one that config.json names."""
