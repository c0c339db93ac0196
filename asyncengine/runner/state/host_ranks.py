"""Ranks on the CPU: the parts of one model, each computed by a thread of its own, in lockstep.

A step runs on all ranks at once. They meet wherever they add products up; who comes last adds, in the order of the
ranks, and all go on with the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.kernels.cpu.base import BaseOps
from asyncengine.kernels.ops import LayerCache, Norm
from asyncengine.models.registry import CausalLM


class Meeting:
    """The place at which ranks add up their products. A rank that fails elsewhere calls ``leave``."""

    def __init__(self, ranks: int) -> None:
        self._products: list[Tensor | None] = [None] * ranks
        self._barrier = threading.Barrier(ranks, self._add_up)

    def reduce(
        self, rank: int, product: Tensor, batch: StepBatch, onto: Tensor | None = None, norm: Norm | None = None
    ) -> None:
        """``Reduction`` for a rank, without norms. Raises BrokenBarrierError if another rank has left."""
        assert norm is None
        self._products[rank] = product
        self._barrier.wait()
        if onto is not None:
            onto += product

    def leave(self) -> None:
        """Make this and all later calls of the others fail, until ``again``."""
        self._barrier.abort()

    def again(self) -> None:
        """Open a meeting that was left. No rank may be in it."""
        self._barrier.reset()

    def _add_up(self) -> None:
        products = [product for product in self._products if product is not None]
        with torch.inference_mode():
            total = products[0].float()
            for product in products[1:]:
                total = total + product.float()
            for product in products:
                product.copy_(total)
        self._products = [None] * len(products)


class HostRanks:
    """A model in parts, as one ``CausalLM``; rank 0 computes all that follows the layers but the others' logits."""

    def __init__(self, models: Sequence[CausalLM[StepBatch]], ops: Sequence[BaseOps[Any]]) -> None:
        self._models = list(models)
        self.splits_head = models[0].splits_head
        self._residuals: list[Any] = []
        """Residuals that the other ranks' last ``run`` returned."""
        self._meeting = Meeting(len(models))
        count = len(models) - 1
        self._others = ThreadPoolExecutor(count, thread_name_prefix="asyncengine-rank")
        started = threading.Barrier(count)
        # Started here: a thread that is no thread of Python's would leave an entry of its own behind.
        list(self._others.map(lambda _: started.wait(), range(count)))
        self.caches: list[Sequence[LayerCache]] = []
        """Caches of the ranks but the first."""
        for rank, of_rank in enumerate(ops):
            of_rank.reduction = partial(self._meeting.reduce, rank)

    def forward(self, batch: StepBatch, caches: Iterable[LayerCache]) -> Any:
        return self.logits(self.run(batch, caches), batch)

    def run(self, batch: StepBatch, caches: Iterable[LayerCache]) -> Any:
        """The residual of rank 0, whose caches these are. The error of the rank that failed is raised."""
        others = [self._others.submit(self._run, rank, batch, own) for rank, own in enumerate(self.caches, start=1)]
        mine: Future[Any] = Future()
        try:
            mine.set_result(self._run(0, batch, caches))
        except Exception as e:
            mine.set_exception(e)
        errors = [error for error in (done.exception() for done in (mine, *others)) if error is not None]
        if errors:
            self._meeting.again()
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        self._residuals = [other.result() for other in others]
        return mine.result()

    def _run(self, rank: int, batch: StepBatch, caches: Iterable[LayerCache]) -> Any:
        try:
            with torch.inference_mode():
                return self._models[rank].run(batch, caches)
        except BaseException:
            self._meeting.leave()
            raise

    def logits(self, residual: Any, batch: StepBatch) -> Any:
        """The logits of all ranks, side by side."""
        if not self.splits_head:
            return self._models[0].logits(residual, batch)
        others = [
            self._others.submit(self._part, rank, own, batch) for rank, own in enumerate(self._residuals, start=1)
        ]
        parts = [self._part(0, residual, batch), *(other.result() for other in others)]
        return None if parts[0] is None else torch.cat(parts, 1)

    def _part(self, rank: int, residual: Any, batch: StepBatch) -> Any:
        with torch.inference_mode():
            return self._models[rank].logits(residual, batch)

    def hidden(self, residual: Any, batch: StepBatch) -> Tensor:
        return self._models[0].hidden(residual, batch)
