"""ModelInfo: what the rest of the engine knows of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the engine needs to know about a loaded model."""

    name: str
    path: Path
    architecture: str
    dtype: str
    device: str
    """What computes: cpu, or the GPU's name."""
    vocab_size: int
    """Rows of the embedding. The tokenizer may have fewer tokens, or more."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    """Ends that config.json, generation_config.json and the tokenizer name, where the embedding has a row for them."""
    num_parameters: int
    weight_bytes: int
    num_kv_blocks: int
    block_size: int
    kv_bytes_per_block: int
    num_host_kv_blocks: int = 0
    """Of the host tier."""
    num_kv_layers: int = 0
    """Layers that keep keys and values."""
    can_decode_on_host: bool = False
    """Whether threads of the host can attend for its sequences (EngineConfig.hybrid_attention)."""
    fingerprint: str = ""
    """Of all that keys and values depend on; empty where nothing outlives the process."""
    vector_size: int = 0
    """Numbers of the vector that the model gives of a prompt: its hidden size, or its labels."""
    labels: tuple[str, ...] = ()
    """Of a classification model, which generates nothing."""
    exclusive_labels: bool = True
    """A prompt has one of the labels, not any number of them."""
    generates: bool = True
    """Whether the model has a head for tokens."""

    @property
    def kv_layer_token_bytes(self) -> float:
        """Of keys and values of a token in one layer."""
        return self.kv_bytes_per_block / (self.block_size * max(1, self.num_kv_layers))

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_kv_blocks * self.block_size
