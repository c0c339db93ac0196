"""The GPU's side of hybrid attention: pinned memory through which host rows cross, and threads that attend for them.

csrc/core/host_rows.h has the circuit.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Self

import torch
from torch import Tensor

from asyncengine import _core
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.rows.lanes import HostLanes
from asyncengine.runner.model_runner import LoadedModel

logger = logging.getLogger(__name__)

_DTYPES = {torch.float32: _core.Dtype.float32, torch.bfloat16: _core.Dtype.bfloat16}
_OTHER_THREADS = 2
"""Cores that workers leave to the step thread and to Python."""


class HostRows:
    """Mailboxes and results of every slot, and which model they are of."""

    def __init__(self, config: EngineConfig, native: _core.CudaDevice, loaded: LoadedModel) -> None:
        """Raises RuntimeError if memory cannot be pinned."""
        model, slots = loaded.config, config.max_num_seqs
        self._lanes = config.hybrid_lanes
        self._block_size = config.block_size
        self._num_workers = config.hybrid_workers or max(1, config.num_threads - _OTHER_THREADS)
        self._model = model
        self._scales = None if loaded.kv_scales is None else loaded.kv_scales.cpu().contiguous()
        self._exchange = _core.HostExchange(
            _DTYPES[loaded.dtype], slots, model.num_heads, model.num_kv_heads, model.head_dim, native
        )
        heads = model.num_heads + 2 * model.num_kv_heads
        words, num_bytes = self._exchange.mailbox_words, self._exchange.result_bytes
        mailboxes = _bytes_at(self._exchange.mailboxes, slots * words * 8)
        results = _bytes_at(self._exchange.results, slots * num_bytes)
        self.mailboxes = mailboxes.view(torch.int64).view(slots, heads, -1)
        self.results = results.view(loaded.dtype).view(slots, -1)

    @classmethod
    def make(cls, config: EngineConfig, native: _core.CudaDevice, loaded: LoadedModel) -> Self | None:
        """None if the configuration wants none, or, with a warning, if they cannot be."""
        if config.hybrid_attention == "off":
            return None
        why = _obstacle(config, loaded)
        if why is None:
            try:
                return cls(config, native, loaded)
            except RuntimeError as e:
                why = f"host memory cannot be pinned: {e}"
        logger.warning("hybrid_attention is off: %s", why)
        return None

    def hybrid(self, attend_ns: float = 0.0, exchange_ns: float = 0.0) -> _core.HybridConfig:
        """For the scheduler, with what a worker takes for a token of context in a layer, and what lanes add to a step.

        Without these a move to the host always pays.
        """
        return _core.HybridConfig(
            lanes=self._lanes,
            layers=self._model.num_layers,
            workers=self._num_workers,
            attend_ns=attend_ns,
            exchange_ns=exchange_ns,
        )

    def lanes(self, header: Tensor) -> HostLanes:
        """What steps need of them on the device; ``header`` is StepSource.header."""
        layers, width = self._model.num_layers, self._model.hidden_size
        return HostLanes.allocate(self.mailboxes, self.results, header, layers=layers, lanes=self._lanes, width=width)

    def workers(self, pool: _core.HostPool) -> _core.HostWorkers:
        """Threads that attend over the blocks of the pool."""
        model = self._model
        layers = [
            (scale, window, model.score_softcap, 0 if self._scales is None else self._scales[index].data_ptr())
            for index, (scale, window) in enumerate(zip(model.layer_scales, model.layer_windows, strict=True))
        ]
        logger.info("hybrid attention: %d workers, %d lanes a step", self._num_workers, self._lanes)
        return _core.HostWorkers(
            self._exchange,
            pool=pool,
            block_size=self._block_size,
            transposed_keys=False,
            layers=layers,
            num_workers=self._num_workers,
        )


def _obstacle(config: EngineConfig, loaded: LoadedModel) -> str | None:
    """Why no row can decode on the host."""
    if config.staging == "pageable":
        return "with staging=pageable the GPU neither reads nor writes host memory"
    if loaded.config.labels:
        return "a model that classifies generates no tokens"
    if loaded.config.head_dim % 2:
        return f"heads of {loaded.config.head_dim} elements have no halves"
    return None


def _bytes_at(address: int, num_bytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
