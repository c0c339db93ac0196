"""A small model with a layer that keeps a state: a Llama whose second layer adds up what it has seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from asyncengine.kernels.ops import Handle, LayerStates, Norm, StateSpec
from asyncengine.models import registry
from asyncengine.models.config import ModelConfig, RawConfig
from asyncengine.models.decoder import DecoderLayer
from asyncengine.models.llama import LlamaForCausalLM
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.models import tiny

DECAY = 0.8


class FadingSum(NamedTuple):
    """residual += output · s, where s = DECAY * s + the queries of the token; s is the state, float32."""

    norm: Norm
    qkv: Handle
    output: Handle
    width: int

    def forward(self, ops: Any, residual: Any, cache: LayerStates, batch: Any, is_last: bool) -> None:
        inputs = ops.norm_linear(residual, self.norm, self.qkv, batch)[:, : self.width]
        states = cache.states.view(torch.float32)
        x = torch.empty_like(inputs)
        starts = batch.query_start.tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            state = states[slot]
            for token in range(starts[row], starts[row + 1]):
                state.mul_(DECAY).add_(inputs[token])
                x[token] = state
        if is_last:
            x = ops.keep_sampled(x, residual, batch)
        ops.linear_add_(x, self.output, residual, batch)


class StatefulLlama(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, weights: Any, ops: Any, max_positions: int) -> None:
        alike = replace(config, layer_caches=(config.layer_caches[0],) * config.num_layers)
        super().__init__(alike, weights, ops, max_positions)
        layers: Any = self._layers
        first, second = layers
        attention = second.mixer
        mixer = FadingSum(attention.norm, attention.qkv, attention.output, config.num_heads * config.head_dim)
        self._layers = (first, DecoderLayer(mixer, second.feed_forward))


def save(path: Path, window: int | None = None, positions: int = 512) -> None:
    """Write a checkpoint for the model, in the form of a Mistral with or without a window."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": positions, "sliding_window": window}
    _save(tiny.build_model("mistral-window", **sizes), path)


def save_lfm2(path: Path) -> None:
    """Write a checkpoint of an LFM2 with convolutions in two layers of three."""
    _save(tiny.build_model("lfm2", max_position_embeddings=512), path)


def save_hybrid(path: Path) -> None:
    """Write a checkpoint of a Falcon-H1, whose layers keep keys, values and states of Mamba-2."""
    _save(tiny.build_model("falcon-h1", max_position_embeddings=512, num_hidden_layers=2), path)


def _save(model: Any, path: Path) -> None:
    """Write a checkpoint, whose last token ends a sequence, and a tokenizer."""
    model.save_pretrained(path)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": tiny.VOCAB_SIZE - 1}))
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))


@contextmanager
def registered() -> Iterator[None]:
    """Mistrals are built as this model."""
    family = registry.FAMILIES["MistralForCausalLM"]

    def read_config(raw: RawConfig) -> ModelConfig:
        config = family.read_config(raw)
        state = StateSpec(4 * config.num_heads * config.head_dim)
        return replace(config, layer_caches=(config.layer_caches[0], state))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            registry.FAMILIES, "MistralForCausalLM", family._replace(read_config=read_config, build=StatefulLlama)
        )
        yield
