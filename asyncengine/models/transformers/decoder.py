"""TransformersModel: modules of transformers that compute the steps of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from asyncengine.kernels.ops import Batch, Handle, LayerCache, ModelOps, Residual
from asyncengine.kernels.weight import dense
from asyncengine.models.config import ModelConfig
from asyncengine.models.transformers.discover import Head, head_place
from asyncengine.models.transformers.experts import add_mixtures
from asyncengine.models.transformers.interface import PROBE, hooked
from asyncengine.models.transformers.load import load
from asyncengine.models.transformers.norms import replace_norms
from asyncengine.models.transformers.projections import replace
from asyncengine.models.transformers.rope import fix_rope
from asyncengine.models.transformers.source import Source, naming
from asyncengine.models.transformers.step import Step
from asyncengine.models.transformers.verify import find_wait, verify
from asyncengine.models.weights.source import WeightSource


class TransformersModel:
    """A model over the rows of a step, which its modules take for one text. Positions and the cache keep texts apart.

    Loaded while it is built. The logits are an operation, for the rows that are sampled from.
    """

    splits_head = False

    def __init__(
        self, source: Source, config: ModelConfig, weights: WeightSource, ops: ModelOps, max_positions: int
    ) -> None:
        """Raises UnsupportedModelError for a layer in which the texts of a step meet."""
        dtype = weights.dtype
        self._model: Any = load(source, weights, dtype, ops.device)
        fix_rope(self._model, max_positions)
        self._ops = ops
        self._makes_masks = source.implementation == PROBE
        self._step = Step(self._model, source.notes.sites, ops)
        self._logit_scale, self._logit_softcap = config.logit_scale, config.logit_softcap
        add_mixtures(self._model, self._step, dtype)
        with naming(source.architecture):
            verify(self._model, source.notes.sites, self._step.mix, config.vocab_size)
        self.waits_at = find_wait(self._model, source.notes.sites, self._step.mix_without_waiting)
        """place in the model's code at which a step waits for the device; empty if it can be captured"""
        self._head = self._take_head()
        replace(self._model, self._step, source.notes.groups, dtype)
        replace_norms(self._model, self._step, dtype)

    def _take_head(self) -> Handle:
        """Put a module that keeps its input in the head's place."""
        owner, name = head_place(self._model)
        head: Any = getattr(owner, name)
        weight, bias = head.weight.detach(), getattr(head, "bias", None)
        self._kept = Head(torch.zeros(1, dtype=weight.dtype, device=weight.device))
        setattr(owner, name, self._kept)
        return self._ops.make_linear([dense(weight)], [None if bias is None else bias.detach()])

    def forward(self, batch: Batch, caches: Iterable[LayerCache]) -> Any:
        """``run``, then ``logits``."""
        return self.logits(self.run(batch, caches), batch)

    def run(self, batch: Batch, caches: Iterable[LayerCache]) -> Residual:
        """The layers of the step, which write its caches: the input of the head."""
        ops = self._ops
        self._step.begin(batch, iter(caches))
        ids, positions = ops.input_ids(batch)[None], ops.positions(batch)[None]
        with hooked(self._step):
            self._model(input_ids=ids, position_ids=positions, use_cache=False, **self._more(ids))
        x, self._kept.x = self._kept.x, None
        assert x is not None
        return ops.residual(x[0].contiguous(), batch)

    def _more(self, ids: Tensor) -> dict[str, Tensor]:
        """Without a mask of the texts, a model that makes masks would read the positions to see whether there are
        several."""
        return {"attention_mask": torch.ones_like(ids)} if self._makes_masks else {}

    def logits(self, residual: Residual, batch: Batch) -> Any:
        """Return ``Ops.logits`` of what ``run`` returned, float32 [num_samples, vocab_size] as a rule."""
        return self._ops.logits(residual, None, self._head, batch, self._logit_softcap, self._logit_scale)

    def hidden(self, residual: Residual, batch: Batch) -> Tensor:
        """The input of the head for the samples, [num_samples, H] in the model's dtype."""
        return self._ops.hidden(residual, None, batch)
