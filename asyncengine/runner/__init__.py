"""The way from a model directory to a forward pass: weights, KV cache, model runner."""
