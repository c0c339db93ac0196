"""The GPU's side of a host tier: pinned memory for KV blocks, and the kernels that gather and scatter what moves."""

from __future__ import annotations

import logging
from typing import Self

import torch
from torch import Tensor

from asyncengine._core import CudaDevice, HostPool
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.step.moves import move_blocks
from asyncengine.machine import available_memory
from asyncengine.runner.loop_config import choose_num_host_blocks
from asyncengine.runner.state.memory import host_view

logger = logging.getLogger(__name__)

_TRANSFER_BYTES = 16 << 20
"""Bytes of a transfer: long enough for the link's full rate, short enough for others to get their turn."""

_MOST_OF_MEMORY = 0.9
"""Most of the available memory that is pinned. The system ends a process that touches more, where it only refuses to
pin more."""


def gathered_bytes(config: EngineConfig, bytes_per_block: int) -> int:
    """Bytes of the GPU's memory that the tier takes."""
    if config.host_kv_memory_bytes is None:
        return 0
    return HostPool.transfers * _moves(bytes_per_block) * bytes_per_block


def _moves(bytes_per_block: int) -> int:
    return max(1, min(64, _TRANSFER_BYTES // bytes_per_block))


class HostTier:
    """Pinned blocks, and what a transfer's graph launches."""

    def __init__(self, pool: HostPool, planes: Tensor, gathered: Tensor, lists: list[Tensor]) -> None:
        self.pool = pool
        self._planes = planes
        self._gathered = gathered
        self._lists = lists

    @classmethod
    def make(cls, config: EngineConfig, native: CudaDevice, kv: Tensor) -> Self | None:
        """Make a host tier for the cache kv [layers, 2, num_blocks, elements]; None if none is configured, or nothing
        can be pinned.

        Raises ConfigError if the configured memory does not hold one transfer.
        """
        planes = kv.flatten(0, 1).view(torch.int32)
        bytes_per_block = planes[:, 0].nbytes
        moves = _moves(bytes_per_block)
        wanted = choose_num_host_blocks(config, bytes_per_block, planes.shape[1], least=moves)
        if wanted == 0:
            return None
        given = min(wanted, int(_MOST_OF_MEMORY * available_memory()) // bytes_per_block)
        try:
            pool = HostPool(native, bytes_per_block, max(moves, given), moves)
        except RuntimeError as e:
            logger.warning("host memory cannot be pinned, so there is no host tier for the KV cache: %s", e)
            return None
        if pool.num_blocks < wanted:
            logger.warning(
                "the system has, or pins, %s of %s bytes for the host tier of the KV cache",
                f"{pool.num_blocks * bytes_per_block:,}",
                f"{wanted * bytes_per_block:,}",
            )
        logger.info(
            "host tier of the KV cache: %s blocks, %s MiB pinned",
            f"{pool.num_blocks:,}",
            f"{pool.num_blocks * bytes_per_block >> 20:,}",
        )
        gathered = torch.empty(
            (HostPool.transfers, moves, len(planes), planes.shape[2]), dtype=torch.int32, device=kv.device
        )
        pool.set_gathered(gathered.data_ptr())
        words = pool.list_words
        lists = [host_view(pool.list(i), 4 * words, torch.int32) for i in range(HostPool.transfers)]
        return cls(pool, planes, gathered, lists)

    def enqueue(self, transfer: int) -> None:
        """The kernel of a transfer, between its list and the copies that come before it or after it."""
        move_blocks(
            self._lists[transfer],
            self._planes,
            self._gathered[transfer],
            scatter=HostPool.brings_in(transfer),
        )
