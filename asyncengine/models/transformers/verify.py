"""A loaded model is run once to see that nothing but attention lets the texts of a step meet.

Two short texts are computed in one pass, as steps do it, and the second alone. A layer that keeps a state of its own,
mixes neighbours, or does not take the positions that it is given makes other numbers of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncengine.errors import UnsupportedModelError
from asyncengine.models.transformers.discover import Head, Site, stubbed
from asyncengine.models.transformers.interface import MaskFunction, hooked
from asyncengine.models.transformers.waits import first_wait

_FIRST, _SECOND = 3, 4
_TRIES = 3
"""Draws of texts: rounding alone may send a token to another expert, and does so seldom."""


class _Plain:
    """Hooks that attend by plain operations, each text by itself."""

    def __init__(self, sites: Sequence[Site], lengths: Sequence[int], mix: Callable[..., Tensor]) -> None:
        self._sites, self.lengths, self._next = sites, tuple(lengths), 0
        self.masks = any(site.chosen for site in sites)
        self.mix = mix

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
        site = self._sites[self._next]
        self._next += 1
        parts = [torch.split(x, list(self.lengths), 2) for x in (q, k, v)]
        texts = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=site.scale, enable_gqa=True)
            for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat(texts, 2).transpose(1, 2).contiguous()

    def mask(self, sees: MaskFunction, queries: int, keys: int, device: torch.device) -> Tensor | None:
        return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)


def verify(model: Any, sites: Sequence[Site], mix: Callable[..., Tensor], vocab_size: int) -> None:
    """Raises UnsupportedModelError, naming index and type, for a layer in which the texts of a step meet."""
    layers = _layers(model, sites)
    generator = torch.Generator().manual_seed(0)
    found = set()
    for _ in range(_TRIES):
        ids = torch.randint(vocab_size, (_FIRST + _SECOND,), generator=generator)
        together = _outputs(model, layers, ids, _Plain(sites, (_FIRST, _SECOND), mix))
        alone = _outputs(model, layers, ids[_FIRST:], _Plain(sites, (_SECOND,), mix))
        index = next((i for i, (x, y) in enumerate(zip(together, alone, strict=True)) if _differ(x[_FIRST:], y)), None)
        if index is None:
            return
        found.add(index)
    index = min(found)
    if index == len(layers):
        raise UnsupportedModelError("behind its layers texts meet that are computed in one step")
    kind = type(layers[index]).__name__
    raise UnsupportedModelError(f"layer {index} ({kind}) keeps a state of its own, or takes no positions from outside")


def find_wait(model: Any, sites: Sequence[Site], mix: Callable[..., Tensor]) -> str:
    """The place in the model's code at which a step waits for the device; empty if there is none."""
    ids = torch.arange(_SECOND, device=_device(model))  # a copy from the host would be found
    return first_wait(lambda: _run(model, ids, _Plain(sites, (_SECOND,), mix)))


def _layers(model: nn.Module, sites: Sequence[Site]) -> list[nn.Module]:
    """The layers that attend, in the order of their first call."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    names: dict[str, None] = {}
    for site in sites:
        outer = min((name for name in lists if site.module.startswith(f"{name}.")), key=len, default=None)
        if outer is None:
            names[site.module] = None
        else:
            index = site.module.removeprefix(f"{outer}.").partition(".")[0]
            names[f"{outer}.{index}"] = None
    return [model.get_submodule(name) for name in names]


def _outputs(model: Any, layers: Sequence[nn.Module], ids: Tensor, hooks: _Plain) -> list[Tensor]:
    """The outputs of the layers and the input of the head, [T, N] each."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        outputs.append(_run(model, ids, hooks))
    finally:
        for handle in handles:
            handle.remove()
    return [output.reshape(-1, len(ids), output.shape[-1]).transpose(0, 1).flatten(1) for output in outputs]


def _run(model: Any, ids: Tensor, hooks: _Plain) -> Tensor:
    """The input of the head, [1, T, H]."""
    device = _device(model)
    head = Head(model.get_output_embeddings().weight.new_zeros(1))
    positions = torch.cat([torch.arange(n, device=device) for n in hooks.lengths])[None]
    ids = ids.to(device)[None]
    # A model that makes masks would read the positions, to see whether there are several texts.
    more = {"attention_mask": torch.ones_like(ids)} if hooks.masks else {}
    with torch.inference_mode(), hooked(hooks), stubbed(model, head):
        model(input_ids=ids, position_ids=positions, use_cache=False, **more)
    assert head.x is not None
    return head.x


def _device(model: Any) -> torch.device:
    device: torch.device = model.get_output_embeddings().weight.device
    return device


def _differ(x: Tensor, y: Tensor) -> bool:
    """Return whether a row is another by more than rounding makes of it."""
    tolerance = 1e-3 if x.dtype == torch.float32 else 0.25
    error = (x.float() - y.float()).norm(dim=-1) / y.float().norm(dim=-1).clamp(min=1e-6)
    return bool((error > tolerance).any())
