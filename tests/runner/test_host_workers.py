"""The bindings of what attends for host rows; tests/native/test_core_host_workers.cpp tests what it computes."""

from __future__ import annotations

import ctypes
import math

import pytest

from asyncengine import _core
from asyncengine._core import (
    CudaDevice,
    Dtype,
    HostExchange,
    HostLayer,
    HostPool,
    HostShape,
    HostWorkers,
    SimulatedDevice,
)

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 4, 2, 8, 16
SHAPE = HostShape(dtype=Dtype.bfloat16, num_slots=3, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
PLANE_BYTES = KV_HEADS * HEAD_DIM * BLOCK_SIZE * 2


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice.simulated(SimulatedDevice(vocab_size=8))


@pytest.mark.parametrize("pinned", [True, False])
def test_an_exchange_has_a_mailbox_and_a_result_for_each_slot(device: CudaDevice, pinned: bool) -> None:
    exchange = HostExchange(SHAPE, device if pinned else None)
    assert exchange.mailbox_words == (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM // 2
    assert exchange.result_bytes == Q_HEADS * HEAD_DIM * 2
    size = 3 * exchange.mailbox_words * 8
    assert exchange.results == exchange.mailboxes + size
    assert ctypes.string_at(exchange.mailboxes, size) == bytes(size)


def test_workers_take_a_pool_of_their_shape(device: CudaDevice) -> None:
    exchange = HostExchange(SHAPE, device)
    pool = HostPool(device, LAYERS * 2 * PLANE_BYTES, 4, 1)

    def workers(layers: int, block_size: int = BLOCK_SIZE) -> HostWorkers:
        described = [HostLayer(scale=0.5)] * layers
        return HostWorkers(
            exchange, pool=pool, block_size=block_size, transposed_keys=False, layers=described, num_workers=2
        )

    assert workers(LAYERS).close(limit_s=60)
    for layers, block_size in ((LAYERS + 1, BLOCK_SIZE), (LAYERS, 2 * BLOCK_SIZE), (0, BLOCK_SIZE)):
        with pytest.raises(ValueError, match="host workers"):
            workers(layers, block_size)


def test_the_time_of_attention_is_measured() -> None:
    time = _core.time_host_attention(SHAPE, BLOCK_SIZE, False, 1, 100)
    assert 0 < time < math.inf
    with pytest.raises(ValueError, match="one worker"):
        _core.time_host_attention(SHAPE, BLOCK_SIZE, False, 0, 100)


@pytest.mark.parametrize(
    ("layers", "num_blocks", "used"), [(LAYERS, 5, True), (LAYERS + 1, 5, False), (LAYERS, 3, False)]
)
def test_it_is_measured_in_a_pool_that_has_room_and_these_layers(
    device: CudaDevice, layers: int, num_blocks: int, used: bool
) -> None:
    """A worker has three rows. Each writes to a block of its own, behind those that they share."""
    pool = HostPool(device, LAYERS * 2 * PLANE_BYTES, num_blocks, 1)
    size = num_blocks * LAYERS * 2 * PLANE_BYTES
    ctypes.memset(pool.block(0), 0x3C, size)
    shape = (SHAPE, BLOCK_SIZE, False, 1, 100)
    assert 0 < _core.time_host_attention(*shape, pool=pool, num_layers=layers) < math.inf
    assert (ctypes.string_at(pool.block(0), size) != bytes([0x3C]) * size) == used
