"""The GPU's side of hybrid attention: pinned memory through which host rows cross, and threads that attend for them.

csrc/core/hybrid/host_rows.h has the circuit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor

from asyncengine._core import CudaDevice, CudaGraphs, GraphLink, HostExchange, HostPool, HostWorkers, LinkJobs
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.attention.link import LinkRows, attend
from asyncengine.kernels.cuda.rows.lanes import HostLanes
from asyncengine.runner.state.memory import attention_layers, host_shape, host_view, kv_dtype
from asyncengine.runner.steps.model_runner import LoadedModel

logger = logging.getLogger(__name__)

_LINK_JOBS = 4
"""Jobs of a batch over the link. They are few, so that the kernel takes no more than it can do while workers attend
beside it."""


class HostRows:
    """Mailboxes and results of every slot, and which model they are of."""

    def __init__(self, config: EngineConfig, native: CudaDevice, loaded: LoadedModel) -> None:
        """Raises RuntimeError if memory cannot be pinned."""
        model, slots = loaded.config, config.max_num_seqs
        self.num_lanes = config.hybrid_lanes_on(loaded.device)
        self._block_size = config.block_size
        self._form = config.hybrid_form_on("cuda")
        self._num_workers = config.num_hybrid_workers
        self._max_blocks = -(-loaded.max_model_len // config.block_size)
        self._cached = kv_dtype(config, loaded.dtype)
        self._device = torch.device("cpu")
        self._link_rows: LinkRows | None = None
        """Memory that the link's graph reads and writes."""
        self._model = model
        self._scales = None if loaded.kv_scales is None else loaded.kv_scales.cpu().contiguous()
        self._exchange = HostExchange(host_shape(model, loaded.dtype, slots), native)
        heads = model.num_heads + 2 * model.num_kv_heads
        words, num_bytes = self._exchange.mailbox_words, self._exchange.result_bytes
        mailboxes = host_view(self._exchange.mailboxes, slots * words * 8, torch.int64)
        results = host_view(self._exchange.results, slots * num_bytes, loaded.dtype)
        self.mailboxes, self.results = mailboxes.view(slots, heads, -1), results.view(slots, -1)

    @classmethod
    def make(cls, config: EngineConfig, native: CudaDevice, loaded: LoadedModel) -> Self | None:
        """Make the host rows. None if the configuration wants none, or, with a warning, if they cannot be."""
        if config.hybrid_attention == "off" or loaded.host_obstacle:
            return None
        if config.staging == "pageable":
            logger.warning("hybrid_attention is off: with staging=pageable the GPU does not touch the host's memory")
            return None
        try:
            return cls(config, native, loaded)
        except RuntimeError as e:
            logger.warning("hybrid_attention is off: host memory cannot be pinned: %s", e)
            return None

    def lanes(self, header: Tensor) -> HostLanes:
        """Return the lanes that steps need on the device; ``header`` is StepSource.header."""
        layers, lanes, width = self._model.num_layers, self.num_lanes, self._model.hidden_size
        self._device = header.device
        return HostLanes.allocate(self.mailboxes, self.results, header, layers=layers, lanes=lanes, width=width)

    def workers(
        self,
        native: CudaDevice,
        pool: HostPool,
        graphs: CudaGraphs,
        capture: Callable[[Callable[[], None]], int],
    ) -> HostWorkers:
        """Return the workers that attend over the blocks of the pool. ``capture`` gives torch's address of a graph."""
        scales = [None] * self._model.num_layers if self._scales is None else list(self._scales)
        form, lanes = self._form, self.num_lanes
        logger.info("hybrid attention by %s: %d threads, %d lanes a step", form, self._num_workers, lanes)
        return HostWorkers(
            self._exchange,
            pool=pool,
            block_size=self._block_size,
            transposed_keys=False,
            layers=attention_layers(self._model, scales),
            num_workers=self._num_workers,
            link=None if self._form == "workers" else self._link(native, pool, graphs, capture),
        )

    def _link(
        self,
        native: CudaDevice,
        pool: HostPool,
        graphs: CudaGraphs,
        capture: Callable[[Callable[[], None]], int],
    ) -> GraphLink:
        model, device = self._model, self._device
        block = (model.num_layers, 2, model.num_kv_heads, self._block_size, model.head_dim)
        num_bytes = pool.num_blocks * math.prod(block) * self._cached.itemsize
        jobs = LinkJobs(native, _LINK_JOBS, self._max_blocks)
        scales = [(scale, model.score_softcap) for scale in model.layer_scales]
        self._link_rows = LinkRows(
            jobs=host_view(jobs.address, 4 * jobs.words, torch.int32),
            pool=host_view(pool.block(0), num_bytes, self._cached).view(-1, *block),
            mailboxes=self.mailboxes,
            results=self.results,
            scales=torch.tensor(scales, dtype=torch.float32, device=device),
            windows=torch.tensor(model.layer_windows, dtype=torch.int32, device=device),
            kv_scales=None if self._scales is None else self._scales.to(device),
            max_blocks=self._max_blocks,
        )
        graph = capture(partial(attend, self._link_rows))
        return GraphLink(native, jobs, self._block_size, graphs, graph)
