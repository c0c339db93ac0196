"""ModelInfo: what the rest of the engine knows of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Properties of a loaded model that the engine needs."""

    name: str
    path: Path
    architecture: str
    dtype: str
    device: str
    """The device that computes: cpu, or the GPU's name."""
    device_index: int | None = None
    """Number of the GPU, as in cuda:1; None on the CPU."""
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
    """KV blocks of the host tier."""
    num_kv_layers: int = 0
    """Layers that keep keys and values."""
    num_state_slots: int = 0
    """States that there is room for, of sequences and of snapshots; 0: no layer keeps a state."""
    num_snapshots: int = 0
    """Snapshots among those states."""
    num_host_states: int = 0
    """Snapshots that the host tier has room for, beside these."""
    state_bytes: int = 0
    """Bytes of a state of all layers."""
    state_snapshot_tokens: int = 0
    """Tokens between the snapshots of a prompt's states, in whole blocks; 0: there is none within a prompt."""
    window: int = 0
    """Tokens that the layers see, the most that one does, where every layer has a window; 0: a layer sees all."""
    window_groups: int = 0
    """Groups of layers that see ``group_window`` tokens, each with blocks of its own, where others see all; 0: a block
    holds all layers."""
    group_window: int = 0
    window_blocks: int = 0
    """Blocks that such a group holds of one sequence at most."""
    layers_per_block: int = 0
    """Layers that a block has room for; 0: all."""
    kv_bytes_per_sequence: int = 0
    """Bytes of keys and values that a sequence of max_model_len tokens holds at most."""
    can_decode_on_host: bool = False
    """True if threads of the host can attend for sequences of this model (EngineConfig.hybrid_attention)."""
    host_obstacle: str = ""
    """Why they cannot, as the end of a sentence about the model; empty if they can."""
    fingerprint: str = ""
    """Digest of all that keys and values depend on; empty where no KV block outlives the process."""
    vector_size: int = 0
    """Numbers of the vector that the model gives of a prompt: its hidden size, or its labels."""
    labels: tuple[str, ...] = ()
    """Names of the labels of a classification model, which generates nothing."""
    exclusive_labels: bool = True
    """A prompt has one of the labels, not any number of them."""
    generates: bool = True
    """True if the model has a head for tokens."""

    @property
    def device_label(self) -> str:
        """The name of the device, with the number of a GPU."""
        return self.device if self.device_index is None else f"{self.device} (cuda:{self.device_index})"

    @property
    def states_in_words(self) -> str:
        """The room for states, as the start's log tells it; empty if no layer keeps one."""
        if not self.state_bytes:
            return ""
        of_all = f"{self.num_state_slots:,} of {self.state_bytes / 2**20:.1f} MiB"
        return f"{of_all}, of which {self.num_snapshots:,} are snapshots, kept {self.snapshot_places}" + (
            f"; {self.num_host_states:,} more on the host" if self.num_host_states else ""
        )

    @property
    def snapshot_places(self) -> str:
        """The places of a prompt behind which the prefix cache keeps a state, in words."""
        return snapshot_places(self.state_snapshot_tokens)

    @property
    def kv_layer_token_bytes(self) -> float:
        """Bytes of keys and values of a token in one layer."""
        return self.kv_bytes_per_block / (self.block_size * max(1, self.layers_per_block or self.num_kv_layers))

    @property
    def kv_capacity_sequences(self) -> float:
        """Sequences of max_model_len tokens that the cache holds at the same time."""
        windows = self.window_groups * min(self.max_model_len, self.window_blocks * self.block_size)
        return self.num_kv_blocks * self.block_size / (self.max_model_len + windows)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of the longest sequence that the cache holds."""
        alike = self.num_kv_blocks // (1 + self.window_groups)
        return max(alike, self.num_kv_blocks - self.window_groups * self.window_blocks) * self.block_size


def snapshot_places(tokens: int) -> str:
    """The places of a prompt behind which the prefix cache keeps a state, in words; ``tokens`` lie between two."""
    return "at the end of each prompt" + (f" and every {tokens:,} tokens within it" if tokens else "")
