"""Rotary positions whose frequencies depend on the length of a text, fixed for the texts that an engine serves.

transformers looks at the longest position of a step. The texts of a step are of several lengths, and keys that are
cached keep the frequencies with which they were rotated.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


def fix_rope(model: nn.Module, max_model_len: int) -> None:
    """Set the frequencies of every rotary module to those for texts of up to so many tokens.

    As in native models, longrope has those for long texts if there may be some, and dynamic scaling none: texts are no
    longer than the positions with which it begins.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            if kind == "longrope":
                _choose_factors(module, max_model_len)
            if kind == "longrope" or "dynamic" in kind:
                module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kind, dict):
            for layer_type, own in kind.items():
                if own == "longrope":
                    _choose_factors(module, max_model_len, layer_type)
                if own == "longrope" or "dynamic" in own:
                    kind[layer_type] = "default"


def _choose_factors(module: Any, max_model_len: int, layer_type: str | None = None) -> None:
    """Run the module once at the last position: it sets its frequencies by that."""
    parameters = module.config.rope_parameters
    original = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    if max_model_len > original:
        logger.warning(
            "longrope: every text is computed with the factors for long ones, since the engine serves %d tokens; "
            "with max_model_len = %d it would have those for short ones",
            max_model_len,
            original,
        )
    frequencies = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    positions = torch.tensor([[max_model_len - 1]], device=frequencies.device)
    with torch.no_grad():
        module(frequencies[None], positions, **({} if layer_type is None else {"layer_type": layer_type}))
