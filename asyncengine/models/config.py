"""config.json, read without transformers: its import alone would cost seconds at start-up.

A model directory is untrusted. Values are checked before anything is computed from them, and a wrong one raises
ModelError that names the file and the key.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from asyncengine.errors import ModelError, UnsupportedModelError
from asyncengine.kernels.ops import (
    Activation,
    CacheSpec,
    JointSpec,
    KVSpec,
    LatentSpec,
    PagedSpec,
    SharedSpec,
    StateSpec,
)
from asyncengine.models.files import excerpt, read_config
from asyncengine.models.gguf.paths import is_gguf
from asyncengine.models.gguf.settings import read_settings
from asyncengine.models.mixer_shapes import Delta, Latent, Multipliers, StateSpace
from asyncengine.models.rotary import RopeConfig

logger = logging.getLogger(__name__)

MISSING: Any = object()
"""The default of a key that must be there."""

MAX_POSITIONS = 1 << 24
MAX_EOS_TOKENS = 64

_HIGHEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 1 << 12),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "head_dim"), 1 << 12),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads", "hidden_size_per_layer_input"), 1 << 12),
    **dict.fromkeys(("num_kv_heads", "num_ln_in_parallel_attn"), 1 << 12),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 1 << 17),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size", "moe_intermediate_size"), 1 << 20),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 1 << 20),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 1 << 14),
    "block_multiple_of": 1 << 16,
    **dict.fromkeys(("conv_L_cache", "mamba_d_conv"), 1 << 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups"), 1 << 12),
    **dict.fromkeys(("mamba_expand", "mamba_d_ssm", "shared_intermediate_size"), 1 << 20),
    **dict.fromkeys((f"linear_{kind}_head_dim" for kind in ("key", "value")), 1 << 12),
    **dict.fromkeys((f"linear_num_{kind}_heads" for kind in ("key", "value")), 1 << 12),
    "linear_conv_kernel_dim": 1 << 8,
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "top_k_experts", "decoder_sparse_step"), 1 << 12),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "n_shared_experts", "rotary_dim"), 1 << 12),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 1 << 22),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "original_max_position_embeddings"), MAX_POSITIONS),
    **dict.fromkeys(("seq_length", "max_seq_len"), MAX_POSITIONS),
    "sliding_window": 2**31 - 1,
}
"""Largest plausible integers: several times those of any published model. Products of three stay below 2**63."""
_RANGE = {
    # yarn divides by its logarithm; float32 must hold it
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), (2.0, 1e30)),
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"), (0.0, 1.0)),
    "initializer_range": (0.0, 1e3),
}
"""Ranges of numbers: (lowest, which is excluded, and highest)."""
_ANY_NUMBER = (1e-6, 1e6)


class RawConfig:
    """config.json with typed access: a value of the wrong kind raises ModelError naming file and key."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def load(cls, directory: Path) -> RawConfig:
        """The config of a model directory, or of a GGUF file."""
        if is_gguf(directory):
            return cls(read_settings(directory), str(directory))
        return cls(read_config(directory), str(directory / "config.json"))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = MISSING) -> Any:
        """The value of ``key``. If it is absent or null, ``default``; without a default, ModelError."""
        value = self.values.get(key)
        if value is None:
            if default is MISSING:
                raise ModelError(f"{self.source} lacks {key!r}")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            raise ModelError(f"{self.source}: {key!r} must be {wanted}, found {excerpt(value)}")
        return value

    def integer(self, key: str, default: int = MISSING) -> int:
        """A positive integer, at most the highest that is plausible for ``key``."""
        value = self.get(key, int, default)
        if value < 1:
            raise ModelError(f"{self.source}: {key!r} must be positive, found {excerpt(value)}")
        if value > _HIGHEST[key]:
            raise ModelError(f"{self.source}: {key!r} must be at most {_HIGHEST[key]}, found {excerpt(value)}")
        return int(value)

    def number(self, key: str, default: float = MISSING) -> float:
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

    def renamed(self, names: Mapping[str, str]) -> RawConfig:
        """Return the config with other names of keys replaced by the family's own. They count before those, as in
        transformers."""
        aliases = {own: self.values[name] for name, own in names.items() if name in self.values}
        return self.changed(aliases) if aliases else self

    def changed(self, values: dict[str, Any]) -> RawConfig:
        """Return the config with these values in place of its own."""
        return RawConfig(self.values | values, self.source)

    def with_defaults(self, defaults: dict[str, Any]) -> RawConfig:
        """Return the config with values for keys that are absent. A key that is null stays null."""
        return RawConfig(defaults | self.values, self.source)

    def unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.source}: {what} is not supported")

    def require(self, key: str, value: Any) -> None:
        """Raises UnsupportedModelError unless ``key`` is absent or has the one value that is implemented."""
        if self.values.get(key, value) != value:
            raise self.unsupported(f"{key} = {excerpt(self.values[key])}")

    @property
    def dtype(self) -> str:
        """The checkpoint's dtype as a name of torch; older files call the key torch_dtype.

        A model for images may name it for its language model alone.
        """
        text = RawConfig(self.get("text_config", dict, {}), f"{self.source}, text_config")
        names = (source.get(key, str, None) for source in (self, text) for key in ("dtype", "torch_dtype"))
        return str(next(filter(None, names), "float32")).removeprefix("torch.")

    def text_part(self) -> RawConfig:
        """Return the config of the language model, where it is one part of a model for images.

        The whole model's config says whether the embeddings are tied, if it does.
        """
        tied = {key: self.values[key] for key in ("tie_word_embeddings",) if key in self.values}
        return RawConfig(self.get("text_config", dict) | tied, f"{self.source}, text_config")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids of a key that holds none, one or a list.

        Ids from ``vocab_size`` on and negative ones are left out with a warning: no row of the embedding stands for
        them, so they never come.
        """
        value = self.get(key, (int, list), [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ModelError(f"{self.source}: {key!r} must hold token ids, found {excerpt(value)}")
        if len(ids) > MAX_EOS_TOKENS:
            raise ModelError(f"{self.source}: {key!r} must hold at most {MAX_EOS_TOKENS} ids, found {len(ids)}")
        if outside := [i for i in ids if not 0 <= i < vocab_size]:
            logger.warning(
                "%s: %r holds %s, and the model has the ids from 0 to %d: such a token never comes",
                self.source, key, excerpt(outside[0]), vocab_size - 1,
            )  # fmt: skip
        return tuple(i for i in ids if 0 <= i < vocab_size)


class LayerNorms(NamedTuple):
    """Names of a layer's norms in checkpoints; None where there is none.

    A norm before a block normalises what the block reads, one behind it what the block adds to the residual.
    """

    before_attention: str | None = "input_layernorm"
    before_mlp: str | None = "post_attention_layernorm"
    behind_attention: str | None = None
    behind_mlp: str | None = None


LLAMA_NORMS = LayerNorms()
NORMS_BEHIND = LayerNorms(None, None, "post_attention_layernorm", "post_feedforward_layernorm")


class QueryGrowth(NamedTuple):
    """Factor on the queries at a position: 1 + rate * log(1 + position // positions)."""

    rate: float
    positions: int


class ExpertNames(NamedTuple):
    """Names of a mixture's modules in checkpoints."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"

    @property
    def first(self) -> tuple[str, ...]:
        """Names of the modules of an expert's first product. Experts without a gate have an empty name for it."""
        return (self.gate, self.up) if self.gate else (self.up,)


class Mixture(NamedTuple):
    """Experts of a mixture, and the layers that have it in place of one feed-forward block."""

    num_experts: int
    top_k: int
    """Experts that compute a token."""
    intermediate_size: int
    """Inner size of an expert."""
    layers: tuple[bool, ...]
    """True for each layer with a mixture."""
    sums_to_one: bool = False
    """The weights of a token's experts are divided by their sum."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """This and the next fields but ``correction`` are as in ``RoutingRule``."""
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    sum_offset: float = 1e-20
    group_scores: int = 2
    correction: str = ""
    """Name of the tensor that is added to the scores for the choice, in the block; empty: none is."""
    shared_size: int = 0
    """Inner size of an expert that computes every token; 0: there is none."""
    gated_share: bool = False
    """The result of that expert is multiplied by a sigmoid of the token."""
    names: ExpertNames = ExpertNames()
    mxfp4: bool = False
    """The checkpoint's experts are in MXFP4."""


class LayerInputs(NamedTuple):
    """Embeddings of the tokens that each layer has for itself."""

    size: int
    """Elements of a token's row in one layer."""
    vocab_size: int


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
    layer_scales: tuple[float, ...]
    """Factor on the attention scores of each layer."""
    layer_caches: tuple[CacheSpec, ...]
    """Cache that each layer keeps between steps."""
    layer_ropes: tuple[RopeConfig | None, ...]
    """Rotary positions of each layer; None: its queries and keys are not rotated."""
    query_growth: QueryGrowth | None = None
    mixture: Mixture | None = None
    layer_inputs: LayerInputs | None = None
    conv_size: int = 0
    """Tokens that the convolution of a layer with a state sees."""
    conv_bias: bool = False
    """The convolution and the projections around it have biases."""
    state_space: StateSpace | None = None
    delta: Delta | None = None
    latent: Latent | None = None
    multipliers: Multipliers | None = None
    blocks: tuple[tuple[str, ...], ...] = ()
    """Kinds of the blocks of each layer, where checkpoints count every block."""
    keys_are_values: bool = False
    """The values of layers without a window are the keys before their norm: the checkpoint has one projection."""
    norms_values: bool = False
    """Values have an RMS norm without a weight."""
    wide_sharing_mlp: bool = False
    """Layers that share keys and values have MLPs of twice the intermediate size."""
    gated_queries: bool = False
    """Behind the queries of each head the checkpoint has a gate of as many rows, in the same matrix."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False
    """The checkpoint has queries, keys and values in one matrix, qkv_proj."""
    fused_gate_up: bool = False
    """The checkpoint has gate and up in one matrix, gate_up_proj."""
    centered_norms: bool = False
    """The norms of the residual are layer norms without a bias, and not RMS norms."""
    parallel_blocks: bool = False
    """Attention and MLP read the same norm of the residual, and both are added to it."""
    qk_norm: bool = False
    qk_norm_over_all: bool = False
    """These norms are over all heads together, and not over each."""
    layer_norms: LayerNorms = LLAMA_NORMS
    norm_weight_offset: float = 0.0
    """Added to the weights of RMS norms when they are read, in float32."""
    embedding_scale: float = 1.0
    """Factor on the rows of the embedding."""
    round_embedding_scale: bool = False
    """The factor is rounded to the model's dtype first."""
    score_softcap: float = 0.0
    """0: scores of attention are not capped."""
    attention_sinks: bool = False
    """Each query head has a score without a value (``AttentionLayer.sinks``)."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    logit_softcap: float = 0.0
    """0: logits are not capped."""
    positions_in_keys: bool = False
    """Keys hold their positions, which float8 has not exactly (alibi.py)."""
    largest_head: float = math.inf
    """Numbers of queries, keys and values are kept within ± this."""
    labels: tuple[str, ...] = ()
    """Labels of a classification model, whose head gives a logit for each label in place of one for each token."""
    exclusive_labels: bool = True
    """A text has one of the labels, not any number of them."""
    layers: str = "model.layers"
    """Name of the layers' module."""
    embedding: str = "model.embed_tokens"
    """Name of the embedding's module."""
    final_norm: str = "model.norm"
    """Name of the module of the norm before the head."""
    module_names: Mapping[str, str] = field(default_factory=dict)
    """Names of modules of a layer in checkpoints, by those that Llama has; for modules whose names differ."""
    has_head: bool = True
    """Logits mean something. Without a head the model gives vectors alone."""
    foreign: bool = False
    """Modules of transformers compute the steps."""

    @property
    def ropes(self) -> set[RopeConfig | None]:
        """Kinds of rotary positions that have a table; None stands for one that rotates nothing.

        Layers that norm queries and keys have a table in any case: kernels do both in one pass.
        """
        return {rope for rope in self.layer_ropes if rope is not None or self.qk_norm}

    def rank_obstacle(self, ranks: int) -> str:
        """Return why the model cannot be held by so many ranks together; empty if it can.

        Ranks share heads, and the inner sizes of feed-forward blocks; a norm over all heads would need those of others.
        """
        if ranks == 1:
            return ""
        if self.foreign:
            return "runs modules of transformers"
        if not all(isinstance(spec, KVSpec | LatentSpec) for spec in self.layer_caches) or self.norms_values:
            return "has layers other than attention with keys and values of their own, or norms of values"
        if self.qk_norm_over_all:
            return "norms queries and keys over all heads together"
        if self.attention_sinks:
            return "has sinks in its attention"
        counts = {self.num_heads, *(spec.num_heads for spec in self.layer_caches if isinstance(spec, KVSpec))}
        if uneven := sorted(count for count in counts if count % ranks):
            return f"has {uneven[0]} heads of queries or keys, which {ranks} does not divide"
        return ""

    def of_rank(self, ranks: int) -> ModelConfig:
        """The configuration with the heads of one of the ranks that hold the model together, and what they keep."""
        caches = (
            spec._replace(num_heads=spec.num_heads // ranks) if isinstance(spec, KVSpec) else spec
            for spec in self.layer_caches
        )
        heads, kv_heads = self.num_heads // ranks, max(1, self.num_kv_heads // ranks)  # each rank has all latents
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, layer_caches=tuple(caches)) if ranks > 1 else self

    def kv_spec(self, index: int) -> KVSpec | None:
        """The keys and values that a layer reads, its own or those that it shares; None if it reads none."""
        spec = self.layer_caches[index]
        if isinstance(spec, SharedSpec):
            spec = self.layer_caches[spec.layer]
        if isinstance(spec, JointSpec):
            return spec.kv
        return spec if isinstance(spec, KVSpec) else None

    @property
    def cache_parts(self) -> list[PagedSpec | StateSpec | SharedSpec]:
        """Caches that the layers keep between steps, in order; two of a layer with a JointSpec."""
        specs = (spec if isinstance(spec, JointSpec) else (spec,) for spec in self.layer_caches)
        return list(chain.from_iterable(specs))

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Size of the heads of each layer."""
        specs = map(self.kv_spec, range(self.num_layers))
        return tuple(self.head_dim if spec is None else spec.head_dim for spec in specs)

    @property
    def first_sharing_layer(self) -> int:
        """Index from which on no layer keeps anything: they share the keys and values of earlier ones."""
        kept = (index for index, spec in enumerate(self.layer_caches) if not isinstance(spec, SharedSpec))
        return max(kept, default=-1) + 1

    @property
    def kv_specs(self) -> list[KVSpec]:
        """The layers that keep keys and values, in order."""
        return [spec for spec in self.cache_parts if isinstance(spec, KVSpec)]

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Sliding window of each layer in tokens; 0: none."""
        specs = map(self.kv_spec, range(self.num_layers))
        return tuple(0 if spec is None else spec.window for spec in specs)

    @property
    def longest_window(self) -> int:
        """Tokens that the layers with blocks in the cache see, the most that one does; 0: one sees all."""
        paged = [spec for spec in self.cache_parts if isinstance(spec, KVSpec | LatentSpec)]
        windows = [spec.window if isinstance(spec, KVSpec) else 0 for spec in paged]
        return max(windows, default=0) if all(windows) else 0

    @property
    def has_alike_layers(self) -> bool:
        """Every layer keeps keys and values, and all keep num_kv_heads heads of head_dim numbers."""
        shape = self.num_kv_heads, self.head_dim
        return all(isinstance(spec, KVSpec) and spec[:2] == shape for spec in self.layer_caches)

    @property
    def head_shape(self) -> tuple[str, int, int]:
        """Name of the head and shape of its weight, where it is not the embedding."""
        if self.labels:
            return "score", len(self.labels), self.hidden_size
        return "lm_head", self.vocab_size, self.hidden_size


LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}
"""Names in layer_types: True if the layer has the window. "attention" is an old name."""


def read_layer_windows(raw: RawConfig, window: int, default: Sequence[bool]) -> tuple[int, ...]:
    """The window of each layer in tokens, 0 for none: those layers have ``window`` that layer_types names.

    ``default`` says which layers have it if there are no layer_types. Raises UnsupportedModelError for other types of
    layers, and for sliding layers where ``window`` is 0.
    """
    types = raw.get("layer_types", list, None)
    if types is None:
        return tuple(window if slides else 0 for slides in default)
    for kind in types:
        if not isinstance(kind, str) or kind not in LAYER_TYPES:
            raise raw.unsupported(f"layer type {excerpt(kind)} in layer_types")
    if len(types) != len(default):
        raise raw.unsupported(f"layer_types with {len(types)} entries for {len(default)} layers")
    slides = [LAYER_TYPES[kind] for kind in types]
    if any(slides) and not window:
        raise raw.unsupported("sliding_attention in layer_types without a sliding window")
    return tuple(window if sliding else 0 for sliding in slides)


def read_period(raw: RawConfig, key: str, default: int) -> int:
    """A period of layers, in which the last differs from the others."""
    period = raw.get(key, int, default)
    if not 1 <= period <= _HIGHEST["num_hidden_layers"]:
        raise raw.unsupported(f"{key} = {excerpt(period)}")
    return int(period)


def read_one_window(raw: RawConfig) -> tuple[int, ...]:
    """The windows of a family whose layers all have the same; UnsupportedModelError for layer_types that differ."""
    window = 0 if raw.values.get("sliding_window") is None else raw.integer("sliding_window")
    windows = read_layer_windows(raw, window, (True,) * raw.integer("num_hidden_layers"))
    if set(windows) != {window}:
        raise raw.unsupported("layer_types in a family with one window for all layers")
    return windows


def require_full_attention(raw: RawConfig, num_layers: int, max_positions: int) -> tuple[int, ...]:
    """The windows, all 0, of a family whose layers have none. UnsupportedModelError for a config that asks for some.

    transformers then keeps only a window of keys while it generates, and attends to all of the prompt.
    """
    if raw.values.get("sliding_window") is not None and raw.integer("sliding_window") < max_positions:
        raise raw.unsupported(f"sliding_window = {raw.integer('sliding_window')} in this family")
    return read_layer_windows(raw, 0, (False,) * num_layers)
