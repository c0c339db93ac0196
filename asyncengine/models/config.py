"""config.json, read without transformers: its import alone would cost seconds at start-up."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncengine.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from asyncengine.kernels.ops import Activation
from asyncengine.layers.rotary import RopeConfig, yarn_attention_factor

_MISSING: Any = object()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; raises ModelError if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot read {path}: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


class RawConfig:
    """config.json with typed access: a value of the wrong kind raises ModelError naming file and key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def load(cls, directory: Path) -> RawConfig:
        path = directory / "config.json"
        if not path.is_file():
            raise ModelNotFoundError(f"{directory} has no config.json: it is not a model directory")
        return cls(read_json(path), str(path))

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
            raise ModelError(f"{self.source}: {key!r} must be {wanted}, found {value!r}")
        return value

    def integer(self, key: str, default: int = _MISSING) -> int:
        """A positive integer."""
        value = self.get(key, int, default)
        if value < 1:
            raise ModelError(f"{self.source}: {key!r} must be positive, found {value}")
        return int(value)

    def number(self, key: str, default: float = _MISSING) -> float:
        """A positive, finite number."""
        value = float(self.get(key, (int, float), default))
        if not 0 < value < math.inf:
            raise ModelError(f"{self.source}: {key!r} must be positive, found {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, bool, default))

    def unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.source}: {what} is not supported")

    def require(self, key: str, value: Any) -> None:
        """Raises UnsupportedModelError unless ``key`` is absent or has the one value that is implemented."""
        if self.values.get(key, value) != value:
            raise self.unsupported(f"{key} = {self.values[key]!r}")

    @property
    def dtype(self) -> str:
        """The checkpoint's dtype as a name of torch; older files call the key torch_dtype."""
        name = self.get("dtype", str, None) or self.get("torch_dtype", str, "float32")
        return str(name).removeprefix("torch.")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """None, one id or a list of ids, as a tuple."""
        value = self.get(key, (int, list), [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ModelError(f"{self.source}: {key!r} must hold token ids, found {value!r}")
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
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def read_rope(raw: RawConfig, max_positions: int) -> RopeConfig:
    """The rotary settings: rope_theta and rope_scaling or, from transformers 5 on, rope_parameters."""
    scaling = raw.get("rope_scaling", dict, None) or raw.get("rope_parameters", dict, None) or {}
    if any(isinstance(value, dict) for value in scaling.values()):
        raise raw.unsupported("rope_parameters for each layer type")
    rope = RawConfig(scaling, f"{raw.source}, rope scaling")
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise raw.unsupported(f"rope scaling {kind!r}")
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
    inferred = yarn_attention_factor(
        factor, rope.get("mscale", (int, float), None), rope.get("mscale_all_dim", (int, float), None)
    )
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
