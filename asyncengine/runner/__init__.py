"""From a model directory to a forward pass: weights, KV cache, model runner."""
