"""The page at / and the figures that it shows."""
