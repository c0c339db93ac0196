"""LlamaForCausalLM, and the decoder that its relatives share.

Touvron et al. 2023: RMS norm before each block, rotary positions, grouped queries, SiLU-gated MLP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from asyncengine.kernels.attention import AttentionBackend, LayerKVCache
from asyncengine.kernels.ops import AttentionLayer, HeadNorms, Norm, Ops
from asyncengine.models.config import ModelConfig, RawConfig, read_rope
from asyncengine.models.files import excerpt
from asyncengine.models.rotary import rotary_table
from asyncengine.models.weights import WeightSource


def read_decoder_config(
    raw: RawConfig,
    *,
    default_kv_heads: int | None = None,
    layer_windows: tuple[int, ...] | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """What the relatives of Llama have in common; keywords are the points in which they differ."""
    activation = raw.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise raw.unsupported(f"hidden_act = {excerpt(activation)}")
    hidden_size = raw.integer("hidden_size")
    num_layers = raw.integer("num_hidden_layers")
    num_heads = raw.integer("num_attention_heads")
    # As in transformers: absent means the family's default, null means as many as query heads.
    absent = "num_key_value_heads" not in raw.values
    num_kv_heads = raw.integer(
        "num_key_value_heads", default_kv_heads if absent and default_kv_heads else num_heads
    )
    if head_dim is None and raw.values.get("head_dim") is None and hidden_size % num_heads:
        raise raw.unsupported(f"hidden_size = {hidden_size} over {num_heads} heads without head_dim")
    head_dim = raw.integer("head_dim", head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise raw.unsupported(f"{num_heads} attention heads over {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise raw.unsupported(f"an odd head_dim ({head_dim})")
    max_positions = raw.integer("max_position_embeddings")
    rope = read_rope(raw, max_positions)
    if rope.kind == "yarn":  # model cards say to add it, and leave max_position_embeddings as it was
        max_positions = max(max_positions, int(rope.factor * rope.original_max_positions))
    return ModelConfig(
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        activation="silu_mul",
        tie_word_embeddings=raw.flag("tie_word_embeddings", False),
        initializer_range=raw.number("initializer_range", 0.02),
        layer_windows=layer_windows or (0,) * num_layers,
        layer_scales=(head_dim**-0.5,) * num_layers,
        rope=rope,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def read_config(raw: RawConfig) -> ModelConfig:
    attention_bias = raw.flag("attention_bias", False)
    return read_decoder_config(
        raw, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=raw.flag("mlp_bias", False)
    )


class DecoderLayer:
    """One block: attention and MLP, each reads the residual stream through an RMS norm and adds to it."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: WeightSource,
        ops: Ops,
        attention: AttentionBackend,
        cos_sin: Tensor,
    ) -> None:
        self._ops = ops
        self._attention = attention
        self._is_last = index == config.num_layers - 1

        prefix = f"model.layers.{index}"
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim

        def linear(block: str, sizes: dict[str, int], in_size: int, bias: bool) -> object:
            full = {f"{prefix}.{block}.{name}_proj": size for name, size in sizes.items()}
            matrices = [weights.get(f"{name}.weight", size, in_size) for name, size in full.items()]
            biases = [weights.get(f"{name}.bias", size) if bias else None for name, size in full.items()]
            return ops.make_linear(matrices, biases)

        def norm(name: str) -> Norm:
            return Norm(weights.get(f"{prefix}.{name}.weight", hidden), None, config.norm_eps)

        self._input_norm = norm("input_layernorm")
        self._qkv = linear("self_attn", {"q": q_size, "k": kv_size, "v": kv_size}, hidden, config.qkv_bias)
        head_norms: HeadNorms | None = None
        if config.qk_norm:
            q, k = (weights.get(f"{prefix}.self_attn.{x}_norm.weight", dim) for x in "qk")
            head_norms = HeadNorms(q, k, config.norm_eps)
        scale, window = config.layer_scales[index], config.layer_windows[index]
        self._layer = AttentionLayer(config.num_heads, head_norms, cos_sin, scale, window)
        self._output = linear("self_attn", {"o": hidden}, q_size, config.output_bias)
        self._mlp_norm = norm("post_attention_layernorm")
        self._gate_up = linear("mlp", {"gate": inner, "up": inner}, hidden, config.mlp_bias)
        self._down = linear("mlp", {"down": hidden}, inner, config.mlp_bias)

    def forward(self, stream: Any, cache: LayerKVCache, batch: Any) -> None:
        ops = self._ops
        heads = ops.norm_linear(stream, self._input_norm, self._qkv)
        x = self._attention(heads, self._layer, cache, batch)
        if self._is_last:
            x = ops.keep_sampled(x, stream, batch)
        ops.linear_add_(x, self._output, stream)
        x = ops.norm_linear(stream, self._mlp_norm, self._gate_up, "silu_mul")
        ops.linear_add_(x, self._down, stream)


class LlamaForCausalLM:
    """The decoder with its embedding and its head, loaded while it is built.

    ``max_positions`` bounds the rotary table, so it is the longest sequence that can be run.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        ops: Ops,
        attention: AttentionBackend,
        max_positions: int,
    ) -> None:
        assert config.rope is not None
        self._ops = ops
        cos_sin = rotary_table(config.rope, config.head_dim, max_positions).to(ops.device)
        table = weights.get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._embedding = ops.make_embedding(table, tied=config.tie_word_embeddings)
        self._layers = [
            DecoderLayer(config, i, weights, ops, attention, cos_sin) for i in range(config.num_layers)
        ]
        self._norm = Norm(weights.get("model.norm.weight", config.hidden_size), None, config.norm_eps)
        self._head = self._embedding
        if not config.tie_word_embeddings:
            self._head = ops.make_head(weights.get("lm_head.weight", config.vocab_size, config.hidden_size))

    def forward(self, batch: Any, caches: Iterable[LayerKVCache]) -> Any:
        """Run the step and write its KV; what ``Ops.logits`` gives, float32 [num_samples, vocab_size] as a rule."""
        stream = self._ops.embed(batch, self._embedding)
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.forward(stream, cache, batch)
        return self._ops.logits(stream, self._norm, self._head, batch)
