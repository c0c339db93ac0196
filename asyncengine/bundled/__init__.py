"""The bundled model: a small Llama that tells small stories, so that the first command downloads nothing."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Folder of the bundled model in Hugging Face layout: float32 weights, tokenizer and chat template."""
    return Path(__file__).parent / "stories"
