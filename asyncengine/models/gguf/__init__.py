"""GGUF files: header, tensors, and what they say of a model's configuration and tokenizer."""
