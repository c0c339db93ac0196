"""The attention and the experts of transformers' modules, handed to whoever runs them.

transformers calls an attention function and an experts function by the names in a model's config. The two names of this
module are registered once. Their functions pass each call on to the hooks that are set in the calling thread: those
that take notes of a model (``discover``), or those of a step (``decoder``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

STEP = "asyncengine"
"""Name of an implementation without masks: the cache knows what a token sees."""
PROBE = "asyncengine_probe"
"""Name of an implementation that makes masks: they say what a token sees."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""True where a query sees a key, by index tensors of sequence, head, query and key."""


class Hooks(Protocol):
    """Whoever runs a model."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
        """Attention of q [1, Hq, T, D] over k [1, Hk, T, D] and v [1, Hk, T, E]: [1, T, Hq, E]."""

    def mix(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The results [T, H] of each row's experts, by ids and weights [T, k]."""

    def mask(self, sees: MaskFunction, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """The mask that a layer hands to ``attend``."""


_hooks: ContextVar[Hooks] = ContextVar("asyncengine_transformers_hooks")


@contextmanager
def hooked(hooks: Hooks) -> Iterator[None]:
    """Run what a model of transformers calls meanwhile in this thread by these hooks."""
    token = _hooks.set(hooks)
    try:
        yield
    finally:
        _hooks.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **how: Any
) -> tuple[Tensor, None]:
    return _hooks.get().attend(module, query, key, value, attention_mask, **how), None


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _hooks.get().mix(module, hidden_states, top_k_index, top_k_weights)


def _mask(
    *, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device, **_: Any
) -> Tensor | None:
    return _hooks.get().mask(mask_function, q_length, kv_length, device)


for _name in (STEP, PROBE):
    AttentionInterface.register(_name, _attention)
    ALL_EXPERTS_FUNCTIONS.register(_name, _experts)
AttentionMaskInterface.register(PROBE, _mask)
