"""Attention over the link: rows whose keys and values are in the host's blocks, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncengine.kernels.cuda.attention.link import LinkRows, attend
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.float8_cache import with_inverses

STEP, SLOTS, LAYERS, BLOCKS, BLOCK_SIZE, MAX_BLOCKS = 7, 5, 3, 40, 16, 8


def to_mailbox(heads: Tensor) -> Tensor:
    """heads [H, D] as words int64 [H, words]."""
    if heads.dtype == torch.float32:
        payload = heads.view(torch.int32).long() & 0xFFFFFFFF
    else:
        bits = heads.view(torch.int16).long() & 0xFFFF
        half = bits.shape[1] // 2
        payload = bits[:, :half] | bits[:, half:] << 16
    return payload | STEP << 32


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Attention of one token q [Hq, D], which is the last of k and v [T, Hk, D]: [Hq, D] in float64."""
    group = q.shape[0] // k.shape[1]
    first = max(0, len(k) - window) if window else 0
    k, v = (x[first:].double().repeat_interleave(group, 1) for x in (k, v))
    score = torch.einsum("hd,thd->ht", q.double(), k) * scale
    score = softcap * torch.tanh(score / softcap) if softcap else score
    return torch.einsum("ht,thd->hd", score.softmax(1), v)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (6, 1, 64), (2, 2, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("float8", [False, True])
def test_jobs_of_several_layers_and_lengths(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, float8: bool
) -> None:
    generator = torch.Generator().manual_seed(heads * dim)
    cached = FLOAT8 if float8 else dtype
    pool = torch.full((BLOCKS, LAYERS, 2, kv_heads, BLOCK_SIZE, dim), float("nan")).to(cached)
    scales = torch.full((LAYERS, 2, 2, kv_heads), 0.02)
    kv_scales = with_inverses(scales[:, :, 0]) if float8 else None
    rows = LinkRows(
        jobs=torch.zeros(1 + 4 * (3 + MAX_BLOCKS), dtype=torch.int32),
        pool=pool,
        mailboxes=torch.zeros(SLOTS, heads + 2 * kv_heads, dim * dtype.itemsize // 4, dtype=torch.int64),
        results=torch.full((SLOTS, heads * dim), float("nan"), dtype=dtype),
        scales=torch.tensor([[1 / math.sqrt(dim), 0.0], [0.3, 20.0], [0.2, 0.0]]),
        windows=torch.tensor([0, 0, 21], dtype=torch.int32),
        kv_scales=kv_scales,
        max_blocks=MAX_BLOCKS,
    )
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    expected = []
    jobs = [(0, 0, 0), (3, 1, 77), (4, 2, 100), (1, 0, 31)]  # slot, layer, position
    rows.jobs[0] = len(jobs)
    for number, (slot, layer, position) in enumerate(jobs):
        blocks = [free.pop() for _ in range(position // BLOCK_SIZE + 1)]
        rows.jobs[1 + number * (3 + MAX_BLOCKS) :][: 3 + len(blocks)] = torch.tensor([slot, layer, position, *blocks])
        q = torch.randn(heads, dim, generator=generator).to(dtype)
        k, v = (torch.randn(position + 1, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
        rows.mailboxes[slot] = to_mailbox(torch.cat([q, k[-1], v[-1]]))
        if kv_scales is not None:
            of_layer = kv_scales[layer]
            stored = [(x.float() * of_layer[i, 1, :, None]).clamp(-448, 448).to(FLOAT8) for i, x in enumerate((k, v))]
            k, v = (x.float() * of_layer[i, 0, :, None] for i, x in enumerate(stored))
        else:
            stored = [k, v]
        for place in range(position):
            for i in range(2):
                pool[blocks[place // BLOCK_SIZE], layer, i, :, place % BLOCK_SIZE] = stored[i][place]
        scale, softcap = rows.scales[layer].tolist()
        answer = plain(q, k, v, scale, int(rows.windows[layer]), softcap)
        expected.append((slot, blocks, layer, position, stored, answer))

    attend(rows)

    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for slot, blocks, layer, position, stored, answer in expected:
        torch.testing.assert_close(rows.results[slot].view(heads, dim).double(), answer, atol=tolerance, rtol=tolerance)
        own = pool[blocks[-1], layer, :, :, position % BLOCK_SIZE]
        assert torch.equal(own.float(), torch.stack([x[position] for x in stored]).float())
    assert rows.results[2].isnan().all()


def test_no_jobs_do_nothing() -> None:
    results = torch.full((SLOTS, 64), float("nan"))
    rows = LinkRows(
        torch.zeros(64, dtype=torch.int32), torch.zeros(2, 1, 2, 1, 16, 32),
        torch.zeros(SLOTS, 4, 32, dtype=torch.int64), results, torch.ones(1, 2), torch.zeros(1, dtype=torch.int32),
        None, MAX_BLOCKS,
    )  # fmt: skip
    attend(rows)
    assert results.isnan().all()
