"""Scales of a KV cache in float8, fixed when a model is loaded (see ``kernels/float8_cache.py``).

A checkpoint that was made for such a cache has them: ``self_attn.k_scale`` and ``self_attn.v_scale`` of each layer, as
vLLM and compressed-tensors write them. Otherwise they are made of the keys and values of a fixed prompt: random ids,
the same at every start, which the model runs once in its own dtype. Keys are taken as they are stored, normed and
rotated. Scales of latents are always made so: checkpoints have one for latents and rotated keys together.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.config import EngineConfig
from asyncengine.errors import MissingWeightError
from asyncengine.kernels.cpu.base import BaseOps
from asyncengine.kernels.float8_cache import fixed_scales
from asyncengine.kernels.ops import LayerKVCache, LayerLatentCache
from asyncengine.models.config import ModelConfig
from asyncengine.models.registry import CausalLM
from asyncengine.runner.state import memory
from asyncengine.runner.state.host_ranks import HostRanks

PROMPT_TOKENS = 512
"""Tokens of the fixed prompt, as far as the model's context goes."""
_BLOCK = 16


class ScaleSource(Protocol):
    """Weights that may have scales."""

    def scales(self, name: str, count: int) -> Tensor | None:
        """float32 [count]; None if there are none of that name."""


def stored(weights: ScaleSource, model: ModelConfig) -> Tensor | None:
    """The checkpoint's scales, float32 [layers, 2, Hk] of keys and of values; None if it has none.

    Raises MissingWeightError if it has some of them, and not all.
    """
    if model.latent is not None:
        return None
    names = [[f"model.layers.{i}.self_attn.{kind}_scale" for kind in "kv"] for i in range(model.num_layers)]
    found = {name: weights.scales(name, model.num_kv_heads) for pair in names for name in pair}
    missing = [name for name, scales in found.items() if scales is None]
    if len(missing) == len(found):
        return None
    if missing:
        raise MissingWeightError(f"the checkpoint has scales of keys and values, but not {missing[0]}")
    return torch.stack([torch.stack([found[name] for name in pair]) for pair in names])  # type: ignore[misc]


def fixed_prompt(vocab_size: int, max_model_len: int) -> Tensor:
    """int64 [tokens]: the prompt that scales are made of."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (min(PROMPT_TOKENS, max_model_len),), generator=generator)


def calibrate_host(
    model: CausalLM[StepBatch], config: ModelConfig, dtype: torch.dtype, max_model_len: int, *ops: BaseOps[Any]
) -> Tensor:
    """Scales of the fixed prompt, float32 [layers, 2, Hk], by one step over a cache of its own in ``dtype``.

    Of a model with latents Hk is 1, and the scales are those of latents and of rotated keys.

    With the operations of several ranks the model is a ``HostRanks``, the configuration is that of one, and the
    scales are those of all, Hk in the order of the ranks.
    """
    ids = fixed_prompt(config.vocab_size, max_model_len)
    batch, caches = one_prompt(ids.tolist(), config, dtype, *ops)
    if isinstance(model, HostRanks):
        model.caches = [cache.layers for cache in caches[1:]]
    with torch.inference_mode():
        model.run(batch, caches[0].layers)
        return fixed_scales(torch.cat([tops(config, cache) for cache in caches], -1))


def one_prompt(
    ids: list[int], config: ModelConfig, dtype: torch.dtype, *ops: BaseOps[Any]
) -> tuple[StepBatch, list[memory.KVCache]]:
    """A step of one prompt whose tokens are all sampled, and a cache of its own for the operations of each rank."""
    tokens, blocks = len(ids), -(-len(ids) // _BLOCK)
    sizes = EngineConfig(model="", block_size=_BLOCK, max_num_seqs=1)
    caches = [memory.allocate(sizes, config, blocks, dtype, own) for own in ops]
    for tensor in (tensor for cache in caches for tensor in (*cache.groups, *cache.states)):
        tensor.zero_()
    places = list(range(tokens))
    return StepBatch(ids, places, places, [0, tokens], [0], [list(range(blocks))], places), caches


def tops(model: ModelConfig, cache: memory.KVCache) -> Tensor:
    """float32 [layers, 2, Hk]: the largest keys and values of a cache, or the largest latents and rotated keys."""
    made = []
    for layer in cache.layers:
        match layer:
            case LayerKVCache():
                made.append([plane.abs().amax((0, 2, 3)) for plane in (layer.k, layer.v)])
            case LayerLatentCache():
                assert model.latent is not None
                parts = layer.latents[..., : model.latent.rank], layer.latents[..., model.latent.rank :]
                made.append([part.abs().amax().view(1) for part in parts])
    return torch.stack([torch.stack(pair) for pair in made]).float()
