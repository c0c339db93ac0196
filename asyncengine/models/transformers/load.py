"""Weights of a model that transformers builds, by its own mapping of names."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from asyncengine.errors import MissingWeightError, ModelError, WeightMismatchError
from asyncengine.models.transformers.source import Source, brief, build, quietly
from asyncengine.models.weights.source import WeightSource

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def load(source: Source, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> Any:
    """Build the model with its weights on the device.

    Raises MissingWeightError or WeightMismatchError for the first tensor that is not there, or not as it should be.
    """
    stored = weights.stored()
    with quietly():
        if stored is None:
            model = build(source.kind, source.config, source.implementation, dtype)
            _fill(model, weights)
        else:
            model = _load(source, stored, dtype)
    return model if device == _CPU else model.to(device)


def _fill(model: Any, weights: WeightSource) -> None:
    """Random weights for all parameters; what modules compute of their config alone is there already."""
    done: dict[int, bool] = {}
    for name, parameter in model.named_parameters():
        if not done.setdefault(id(parameter), False):
            done[id(parameter)] = True
            parameter.data = weights.tensor(name, *parameter.shape).to(parameter.dtype)
    model.tie_weights()


def _load(source: Source, stored: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    config = copy.deepcopy(source.config)
    try:
        loaded: Any = source.kind.from_pretrained(
            None, config=config, state_dict=stored, dtype=dtype, attn_implementation=source.implementation,
            experts_implementation=source.implementation, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as e:
        raise ModelError(f"transformers cannot load the weights: {brief(e)}") from e
    model, told = loaded
    head = [f"{name}.weight" for name, module in model.named_modules() if module is model.get_output_embeddings()]
    missing = sorted(set(told["missing_keys"]) - ({*head} if not source.has_head else set()))
    if missing:
        raise MissingWeightError(f"tensor {missing[0]} is not in the checkpoint ({len(missing)} are missing)")
    if wrong := sorted(told["mismatched_keys"]):
        name, found, expected = wrong[0]
        raise WeightMismatchError(f"tensor {name}: expected shape {tuple(expected)}, found {tuple(found)}")
    if extra := sorted(told["unexpected_keys"]):
        logger.warning(
            "the checkpoint holds %d tensors that the model does not use: %s", len(extra), ", ".join(extra[:5])
        )
    return model
