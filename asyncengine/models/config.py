"""config.json, read without transformers: its import alone would cost seconds at start-up.

A model directory is untrusted. Values are checked before anything is computed from them, and a wrong one raises
ModelError that names the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncengine.errors import ModelError, UnsupportedModelError
from asyncengine.kernels.ops import Activation, CacheSpec
from asyncengine.models.files import excerpt, read_config
from asyncengine.models.rotary import RopeConfig, yarn_attention_factor

_MISSING: Any = object()

MAX_POSITIONS = 1 << 24
MAX_EOS_TOKENS = 64

_HIGHEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1 << 12),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), 1 << 12),
    **dict.fromkeys(("hidden_size", "n_embd"), 1 << 17),
    **dict.fromkeys(("intermediate_size", "n_inner"), 1 << 20),
    "vocab_size": 1 << 22,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "original_max_position_embeddings"), MAX_POSITIONS),
    "sliding_window": 2**31 - 1,
}
"""Largest plausible integers: several times those of any published model. Products of three stay below 2**63."""
_RANGE = {
    "rope_theta": (2.0, 1e30),  # yarn divides by its logarithm; float32 must hold it
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), (0.0, 1.0)),
    "initializer_range": (0.0, 1e3),
}
"""Of numbers: (lowest, which is excluded, and highest)."""
_ANY_NUMBER = (1e-6, 1e6)


class RawConfig:
    """config.json with typed access: a value of the wrong kind raises ModelError naming file and key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def load(cls, directory: Path) -> RawConfig:
        return cls(read_config(directory), str(directory / "config.json"))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The value of ``key``. If it is absent or null, ``default``; without a default, ModelError."""
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ModelError(f"{self.source} lacks {key!r}")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            raise ModelError(f"{self.source}: {key!r} must be {wanted}, found {excerpt(value)}")
        return value

    def integer(self, key: str, default: int = _MISSING) -> int:
        """A positive integer, at most the highest that is plausible for ``key``."""
        value = self.get(key, int, default)
        if value < 1:
            raise ModelError(f"{self.source}: {key!r} must be positive, found {excerpt(value)}")
        if value > _HIGHEST[key]:
            raise ModelError(f"{self.source}: {key!r} must be at most {_HIGHEST[key]}, found {excerpt(value)}")
        return int(value)

    def number(self, key: str, default: float = _MISSING) -> float:
        """A positive number in the range that is plausible for ``key``."""
        value = self.get(key, (int, float), default)
        low, high = _RANGE.get(key, _ANY_NUMBER)
        if not value > 0:  # NaN as well
            raise ModelError(f"{self.source}: {key!r} must be positive, found {excerpt(value)}")
        if not low < value <= high:
            raise ModelError(
                f"{self.source}: {key!r} must be above {low:g} and at most {high:g}, found {excerpt(value)}"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, bool, default))

    def unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.source}: {what} is not supported")

    def require(self, key: str, value: Any) -> None:
        """Raises UnsupportedModelError unless ``key`` is absent or has the one value that is implemented."""
        if self.values.get(key, value) != value:
            raise self.unsupported(f"{key} = {excerpt(self.values[key])}")

    @property
    def dtype(self) -> str:
        """The checkpoint's dtype as a name of torch; older files call the key torch_dtype."""
        name = self.get("dtype", str, None) or self.get("torch_dtype", str, "float32")
        return str(name).removeprefix("torch.")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """None, one id or a list of ids, as a tuple. Each must be below ``vocab_size``."""
        value = self.get(key, (int, list), [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ModelError(f"{self.source}: {key!r} must hold token ids, found {excerpt(value)}")
        if len(ids) > MAX_EOS_TOKENS:
            raise ModelError(f"{self.source}: {key!r} must hold at most {MAX_EOS_TOKENS} ids, found {len(ids)}")
        if outside := [i for i in ids if not 0 <= i < vocab_size]:
            raise ModelError(
                f"{self.source}: {key!r} must hold ids from 0 to {vocab_size - 1}, found {excerpt(outside[0])}"
            )
        return tuple(ids)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model, the same for every family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    initializer_range: float
    layer_windows: tuple[int, ...]
    """Sliding window of each layer in tokens; 0: none."""
    layer_scales: tuple[float, ...]
    """Factor on the attention scores of each layer."""
    layer_caches: tuple[CacheSpec, ...]
    """What each layer keeps between steps."""
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    """The output of a block is normed before it is added to the residual."""
    norm_weight_offset: float = 0.0
    """Added to the weights of RMS norms when they are read, in the model's dtype."""
    embedding_scale: float = 1.0
    """Factor on the rows of the embedding."""
    score_softcap: float = 0.0
    """0: scores of attention are not capped."""
    logit_softcap: float = 0.0
    """0: logits are not capped."""
    labels: tuple[str, ...] = ()
    """Of a classification model, whose head gives a logit for each in place of one for each token."""
    exclusive_labels: bool = True
    """A text has one of the labels, not any number of them."""

    @property
    def head_shape(self) -> tuple[str, int, int]:
        """Name and shape of the head's weight, where it is not the embedding."""
        if self.labels:
            return "score.weight", len(self.labels), self.hidden_size
        return "lm_head.weight", self.vocab_size, self.hidden_size


def read_rope(raw: RawConfig, max_positions: int) -> RopeConfig:
    """The rotary settings: rope_theta and rope_scaling or, from transformers 5 on, rope_parameters."""
    scaling = raw.get("rope_scaling", dict, None) or raw.get("rope_parameters", dict, None) or {}
    if any(isinstance(value, dict) for value in scaling.values()):
        raise raw.unsupported("rope_parameters for each layer type")
    rope = RawConfig(scaling, f"{raw.source}, rope scaling")
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise raw.unsupported(f"rope scaling {excerpt(kind)}")
    for source in (raw, rope):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise raw.unsupported("partial_rotary_factor")
    theta = rope.number("rope_theta", raw.number("rope_theta", 10_000.0))
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta, kind=kind)
    original = raw.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    if kind == "yarn":
        return _read_yarn(rope, theta, original, max_positions)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise ModelError(f"{rope.source}: low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(rope: RawConfig, theta: float, original: int, max_positions: int) -> RopeConfig:
    factor = rope.number("factor", max_positions / original)
    if factor * original > MAX_POSITIONS:
        raise ModelError(
            f"{rope.source}: 'factor' times the original positions must be at most {MAX_POSITIONS}, "
            f"found {factor:g} times {original}"
        )
    # Files also write 0 for a scale that they do not have.
    scales = [rope.number(key) if rope.get(key, (int, float), 0) else None for key in ("mscale", "mscale_all_dim")]
    inferred = yarn_attention_factor(factor, *scales)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", inferred),
    )
