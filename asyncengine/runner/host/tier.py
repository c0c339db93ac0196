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
from asyncengine.runner.loop_config import choose_num_host_blocks, choose_num_host_states
from asyncengine.runner.state.memory import KVCache, host_view

logger = logging.getLogger(__name__)

_TRANSFER_BYTES = 16 << 20
"""Bytes of a transfer: long enough for the link's full rate, short enough for others to get their turn."""

_NAME_MOVES = 64
"""Blocks that hold nothing of a transfer."""

_MOST_OF_MEMORY = 0.9
"""Most of the available memory that is pinned. The system ends a process that touches more, where it only refuses to
pin more."""


def gathered_bytes(config: EngineConfig, bytes_per_block: int) -> int:
    """Bytes of the GPU's memory that the tier takes."""
    if config.host_kv_memory_bytes is None or bytes_per_block == 0:
        return 0
    return HostPool.transfers * _moves(bytes_per_block) * bytes_per_block


def _moves(bytes_per_block: int) -> int:
    return max(1, min(64, _TRANSFER_BYTES // bytes_per_block))


def _pin_states(pool: HostPool, native: CudaDevice, regions: list[tuple[int, int]], wanted: int) -> int:
    """Pin states beside the blocks of the pool, or fewer; 0, with a warning, if not even one can be pinned."""
    bytes_per_state = sum(num_bytes for _, num_bytes in regions)
    given = min(wanted, int(_MOST_OF_MEMORY * available_memory()) // max(1, bytes_per_state))
    if given == 0:
        return 0
    try:
        states = pool.pin_states(native, regions, given)
    except RuntimeError as e:
        logger.warning("host memory cannot be pinned, so the host tier keeps no states: %s", e)
        return 0
    logger.info("host tier of states: %s, %s MiB pinned", f"{states:,}", f"{states * bytes_per_state >> 20:,}")
    return states


class HostTier:
    """Pinned blocks and states, and what a transfer's graph launches."""

    def __init__(
        self,
        pool: HostPool,
        groups: list[Tensor],
        gathered: Tensor,
        lists: list[Tensor],
        num_states: int = 0,
    ) -> None:
        self.pool = pool
        self.num_states = num_states
        self._groups = groups
        self._gathered = gathered
        self._lists = lists

    @classmethod
    def make(cls, config: EngineConfig, native: CudaDevice, cache: KVCache, num_blocks: int) -> Self | None:
        """Make a host tier for ``num_blocks`` blocks and the states of a cache; None if none is configured, or nothing
        can be pinned.

        A block of the host has the planes of the block side by side, group after group. Raises ConfigError if the
        configured memory does not hold one transfer.
        """
        groups = [planes.view(torch.int32) for planes in cache.groups]
        bytes_per_block = sum(planes[:, 0].nbytes for planes in groups)
        if config.host_kv_memory_bytes is None:
            return None
        regions = cache.state_regions()
        of_state = sum(num_bytes for _, num_bytes in regions)
        if bytes_per_block == 0:
            return cls._of_states(config, native, regions, of_state, num_blocks)
        moves = _moves(bytes_per_block)
        wanted = choose_num_host_blocks(config, bytes_per_block, num_blocks, moves, of_state)
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
        states = _pin_states(pool, native, regions, choose_num_host_states(config, of_state, bytes_per_block))
        gathered = torch.empty(
            (HostPool.transfers, moves, bytes_per_block // 4), dtype=torch.int32, device=groups[0].device
        )
        pool.set_gathered(gathered.data_ptr())
        words = pool.list_words
        lists = [host_view(pool.list(i), 4 * words, torch.int32) for i in range(HostPool.transfers)]
        return cls(pool, groups, gathered, lists, states)

    @classmethod
    def _of_states(
        cls, config: EngineConfig, native: CudaDevice, regions: list[tuple[int, int]], of_state: int, num_blocks: int
    ) -> Self | None:
        """Make the tier of a model whose layers keep states alone: its blocks hold and move nothing."""
        names = choose_num_host_blocks(config, 0, num_blocks, state_bytes=of_state)
        if names == 0:
            return None
        pool = HostPool(native, 0, names, min(names, _NAME_MOVES))
        states = _pin_states(pool, native, regions, choose_num_host_states(config, of_state, 0))
        return cls(pool, [], torch.empty(0), [], states) if states else None

    @property
    def transfers(self) -> range:
        """Transfers that launch a graph."""
        return range(HostPool.transfers if self._groups else 0)

    def enqueue(self, transfer: int) -> None:
        """The kernels of a transfer, between its list and the copies that come before it or after it."""
        begin, scatter = 0, HostPool.brings_in(transfer)
        for planes in self._groups:
            end = begin + planes[:, 0].numel()
            move_blocks(self._lists[transfer], planes, self._gathered[transfer, :, begin:end], scatter=scatter)
            begin = end
