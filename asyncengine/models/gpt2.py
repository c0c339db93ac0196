"""GPT2LMHeadModel (Radford et al. 2019): learned positions, layer norms with bias, a GELU MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine.kernels.ops import Ops, split_heads
from asyncengine.layers.attention import AttentionBackend, LayerKVCache
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.weights import WeightSource

# The names under which transformers knows the exact GELU and its tanh approximation.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_config(raw: RawConfig) -> ModelConfig:
    activation = raw.get("activation_function", str, "gelu_new")
    if activation not in _ACTIVATIONS:
        raise raw.unsupported(f"activation_function = {activation!r}")
    raw.require("add_cross_attention", False)
    hidden_size = raw.integer("n_embd", 768)
    num_layers = raw.integer("n_layer", 12)
    num_heads = raw.integer("n_head", 12)
    if hidden_size % num_heads:
        raise raw.unsupported(f"n_embd = {hidden_size} over {num_heads} heads")
    head_dim = hidden_size // num_heads
    scale = head_dim**-0.5 if raw.flag("scale_attn_weights", True) else 1.0
    by_layer = raw.flag("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        vocab_size=raw.integer("vocab_size", 50257),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("n_inner", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_positions=raw.integer("n_positions", 1024),
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
        initializer_range=raw.number("initializer_range", 0.02),
        layer_windows=(0,) * num_layers,
        layer_scales=tuple(scale / (i + 1) if by_layer else scale for i in range(num_layers)),
    )


class GPT2Layer:
    def __init__(
        self, config: ModelConfig, index: int, weights: WeightSource, ops: Ops, attention: AttentionBackend
    ) -> None:
        self._ops = ops
        self._attention = attention
        self._eps = config.norm_eps
        self._num_heads = config.num_heads
        self._head_dim = config.head_dim
        self._scale = config.layer_scales[index]
        self._activate = ops.gelu if config.activation == "gelu" else ops.gelu_tanh

        prefix = f"transformer.h.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(name: str, out_size: int, in_size: int) -> object:
            weight = weights.get_transposed(f"{prefix}.{name}.weight", out_size, in_size)
            return ops.make_linear([weight], [weights.get(f"{prefix}.{name}.bias", out_size)])

        def norm(name: str) -> tuple[Tensor, Tensor]:
            return weights.get(f"{prefix}.{name}.weight", hidden), weights.get(
                f"{prefix}.{name}.bias", hidden
            )

        self.input_norm = norm("ln_1")
        self._qkv = linear("attn.c_attn", 3 * hidden, hidden)
        self._output = linear("attn.c_proj", hidden, hidden)
        self._mlp_norm = norm("ln_2")
        self._up = linear("mlp.c_fc", inner, hidden)
        self._down = linear("mlp.c_proj", hidden, inner)

    def forward(self, x: Tensor, residual: Tensor, cache: LayerKVCache, batch: Any) -> Tensor:
        """x is the normed input. ``residual`` is updated in place; the result is still to be added to it."""
        ops = self._ops
        n = self._num_heads
        q, k, v = split_heads(ops.linear(x, self._qkv).view(-1, 3 * n, self._head_dim), n)
        ops.store_kv(k, v, cache.k, cache.v, batch)
        x = self._attention(q, cache, batch, self._scale, 0)
        x = ops.add_layer_norm(ops.linear(x, self._output), residual, *self._mlp_norm, self._eps)
        return ops.linear(self._activate(ops.linear(x, self._up)), self._down)


class GPT2LMHeadModel:
    """Loaded while it is built. ``max_positions`` is not needed: the table of positions is a weight."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        ops: Ops,
        attention: AttentionBackend,
        max_positions: int,
    ) -> None:
        hidden = config.hidden_size
        self._ops = ops
        self._eps = config.norm_eps
        self._embedding = weights.get("transformer.wte.weight", config.vocab_size, hidden)
        self._position_embedding = weights.get("transformer.wpe.weight", config.max_positions, hidden)
        self._layers = [GPT2Layer(config, i, weights, ops, attention) for i in range(config.num_layers)]
        self._norm = (
            weights.get("transformer.ln_f.weight", hidden),
            weights.get("transformer.ln_f.bias", hidden),
        )
        head = self._embedding
        if not config.tie_word_embeddings:
            head = weights.get("lm_head.weight", config.vocab_size, hidden)
        self._head = ops.make_linear([head], [None])

    def forward(self, batch: Any, caches: list[LayerKVCache]) -> Tensor | None:
        """Run the step and write its KV; float32 logits [num_samples, vocab_size], None without samples."""
        ops = self._ops
        step = ops.tokens(batch)
        residual = F.embedding(step.input_ids, self._embedding)
        residual += F.embedding(step.positions, self._position_embedding)
        x = ops.layer_norm(residual, *self._layers[0].input_norm, self._eps)
        for i, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            if i:
                x = ops.add_layer_norm(x, residual, *layer.input_norm, self._eps)
            x = layer.forward(x, residual, cache, batch)
        if not len(step.sample_index):
            return None
        x, residual = x[step.sample_index], residual[step.sample_index]
        x = ops.add_layer_norm(x, residual, *self._norm, self._eps)
        return ops.linear(x, self._head, torch.float32)
