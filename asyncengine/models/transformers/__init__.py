"""Models that run their own modules of the transformers library, over the operations of a kernel package."""
