"""Programs to copy from. ``python -m asyncengine.examples`` lists them; each runs with the bundled model on the CPU."""
