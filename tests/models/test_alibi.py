"""Linear biases as numbers of queries and keys: their slopes, their precision, and heads in each order."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from asyncengine.models.alibi import PLACES, FusedHeads, bloom_slopes, power_slopes, query_places


@pytest.mark.parametrize("heads", [1, 2, 6, 12, 16, 71, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(bloom_slopes(heads)), theirs, rtol=1e-6, atol=0)
    theirs = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    torch.testing.assert_close(torch.tensor(power_slopes(heads)), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_biases_are_exact_to_sixteen_bits(dtype: torch.dtype) -> None:
    """Products of queries and keys give slope times position, whatever the dtype rounds."""
    slopes, scale = bloom_slopes(12), 0.088
    heads = FusedHeads(12, 12, 4, by_group=False, places=query_places(slopes, scale, dtype))
    positions = torch.tensor([0, 1, 255, 256, 1000, 65_535])
    wide = heads.split(torch.zeros(6, 36 * 4, dtype=dtype), positions).view(6, 36, 4 + PLACES).double()
    scores = torch.einsum("hd,khd->hk", wide[0, :12], wide[:, 12:24]) * scale
    expected = torch.tensor(slopes)[:, None].double() * positions
    torch.testing.assert_close(scores, expected, rtol=2**-16, atol=0)
    assert not wide[:, 24:].any()


def test_heads_lie_in_the_order_of_their_matrix() -> None:
    fused = torch.arange(8.0).repeat_interleave(2)[None]  # eight heads of two numbers
    plain = FusedHeads(4, 2, 2, by_group=False).split(fused, torch.tensor([3]))
    assert torch.equal(plain, fused)
    groups = FusedHeads(4, 2, 2, by_group=True, largest=6.0).split(fused, torch.tensor([3]))
    assert groups[0, ::2].tolist() == [0, 1, 4, 5, 2, 6, 3, 6]
    places = torch.ones(4, PLACES)
    heads = FusedHeads(4, 2, 2, by_group=True, places=places)
    wide = heads.split(fused, torch.tensor([300]))
    assert wide.view(8, 2 + PLACES)[:, 0].tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    assert wide.view(8, 2 + PLACES)[4, 2:].tolist() == [1, 1, 44, 44, 0, 0, 0, 0]
    assert torch.equal(heads.joined(wide[:, : 4 * (2 + PLACES)]), torch.tensor([[0.0, 0, 1, 1, 4, 4, 5, 5]]))
