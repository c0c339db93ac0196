"""Text to token ids and back: prompts, tokenizer, chat templates, and the process that runs what strangers wrote."""
