"""Operations that families beside the five may ask of Ops: soft caps, norms before the add, scales; against plain
formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncengine import _core
from asyncengine.kernels.cpu.base import BaseOps, Residual
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.ops import AttentionLayer, LayerKVCache, Norm
from asyncengine.kernels.weight import dense
from asyncengine.models.decoder import AttentionBlock, Decoder, DecoderLayer, MLPBlock
from tests.kernels.twins import NO_STEP

DTYPES = [torch.float32, torch.bfloat16]
HIDDEN, HEADS, DIM, INNER, VOCAB, BLOCK = 32, 4, 8, 40, 57, 16


@pytest.fixture(params=["native", "native-sdpa", "reference"])
def ops(request: pytest.FixtureRequest) -> BaseOps:
    kernels, _, by = request.param.partition("-")
    return CpuOps(2, prefill_attention=by or "native") if kernels == "native" else ReferenceOps()


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype, seed: int, std: float = 1.0) -> Tensor:
    return (std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Check to within a few roundings to ``dtype``, measured by the largest element."""
    tolerance = 2e-6 if dtype == torch.float32 else 2.0**-6
    assert (got.double() - expected.double()).abs().max() <= tolerance * expected.abs().max()


def prompt(ids: list[int]) -> _core.StepBatch:
    """A step of one sequence whose tokens are all sampled from."""
    count = len(ids)
    blocks = list(range(-(-count // BLOCK)))
    return _core.StepBatch(ids, list(range(count)), list(range(count)), [0, count], [0], [blocks], list(range(count)))


def empty_cache(count: int, dtype: torch.dtype) -> LayerKVCache:
    """Make a cache for two heads of keys and values."""
    blocks = -(-count // BLOCK)
    k, v = torch.full((blocks, 2, DIM, BLOCK), math.nan), torch.full((blocks, 2, BLOCK, DIM), math.nan)
    return LayerKVCache(k.to(dtype), v.to(dtype))


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def attend(heads: Tensor, layer: AttentionLayer) -> Tensor:
    """heads [T, (HEADS + 4) * DIM]: causal attention in float64, as transformers writes it (eager)."""
    q, k, v = heads.double().view(len(heads), -1, DIM).split([HEADS, 2, 2], 1)
    k, v = (x.repeat_interleave(HEADS // 2, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    if layer.softcap:
        scores = capped(scores, layer.softcap)
    i, j = torch.arange(len(heads))[:, None], torch.arange(len(heads))[None]
    hidden = (j > i) | (j <= i - layer.window if layer.window else torch.zeros(()).bool())
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v).flatten(1)


def rms(x: Tensor, norm: Norm) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


@pytest.mark.parametrize("window", [0, 6])
def test_scores_are_capped(ops: BaseOps, dtype: torch.dtype, window: int) -> None:
    heads = random(37, (HEADS + 4) * DIM, dtype=dtype, seed=1, std=2.0)
    layer = AttentionLayer(HEADS, None, None, DIM**-0.5, window, 3.0)
    out = ops.attention(heads.clone(), layer, empty_cache(37, dtype), prompt([0] * 37))
    assert_near(out, attend(heads, layer), dtype)
    plain = layer._replace(softcap=0.0)
    assert (attend(heads, layer) - attend(heads, plain)).abs().max() > 0.1, "the cap must matter"
    out = ops.attention(heads.clone(), plain, empty_cache(37, dtype), prompt([0] * 37))
    assert_near(out, attend(heads, plain), dtype)


@pytest.mark.parametrize("window", [0, 70])
def test_sinks_take_their_part_of_the_softmax(dtype: torch.dtype, window: int) -> None:
    """A decode row is shared among items of native kernels; the twin computes it at once."""
    sinks = torch.tensor([-3.0, 0.0, 1.5, 30.0])
    layer = AttentionLayer(HEADS, None, None, DIM**-0.5, window, 0.0, None, sinks)
    heads, results = random(1300, (HEADS + 4) * DIM, dtype=dtype, seed=1), []
    for ops in (CpuOps(2), ReferenceOps(), CpuOps(2, prefill_attention="sdpa")):
        cache, blocks = empty_cache(1300, dtype), list(range(82))
        for first, last in ((0, 1299), (1299, 1300)):
            places = list(range(first, last))
            batch = _core.StepBatch(places, places, places, [0, last - first], [first], [blocks], [])
            out = ops.attention(heads[first:last].clone(), layer, cache, batch)
        results.append(out)
    for other in results[1:]:
        assert_near(results[0], other, dtype)
    none = ops.attention(heads[1299:].clone(), layer._replace(sinks=None), cache, batch)
    assert (none - results[0]).abs().max() > 0.1 * none.abs().max()


def test_logits_are_capped(ops: BaseOps, dtype: torch.dtype) -> None:
    x, weight = random(5, HIDDEN, dtype=dtype, seed=1), random(VOCAB, HIDDEN, dtype=dtype, seed=2)
    norm, head = Norm(random(HIDDEN, dtype=dtype, seed=3), None, 1e-6), ops.make_head(dense(weight))
    exact = rms(x, norm).to(dtype).double() @ weight.double().T
    assert exact.abs().max() > 6
    got = ops.logits(Residual(x.clone()), norm, head, prompt([0] * 5), 4.0)
    assert got.dtype == torch.float32
    assert_near(got, capped(exact, 4.0), dtype)
    assert_near(ops.logits(Residual(x.clone()), norm, head, prompt([0] * 5)), exact, dtype)


def test_a_product_is_normed_before_it_is_added(ops: BaseOps, dtype: torch.dtype) -> None:
    inner = random(6, INNER, dtype=dtype, seed=1)
    x, weight = random(6, HIDDEN, dtype=dtype, seed=2), random(HIDDEN, INNER, dtype=dtype, seed=3)
    after, norm = (Norm(random(HIDDEN, dtype=dtype, seed=s), None, 1e-6) for s in (4, 5))
    residual = Residual(x.clone())
    ops.linear_add_(inner, ops.make_linear([dense(weight)], [None]), residual, NO_STEP, after)
    product = (inner.double() @ weight.double().T).to(dtype)
    total = x + rms(product, after).to(dtype)
    assert_near(ops.hidden(residual, norm, prompt([0] * 6)), rms(total, norm), dtype)
    assert_near(residual.x, total, dtype)


def test_embedded_rows_are_scaled_and_positions_are_not(ops: BaseOps, dtype: torch.dtype) -> None:
    table, places = random(VOCAB, HIDDEN, dtype=dtype, seed=1), random(9, HIDDEN, dtype=dtype, seed=2)
    ids = [3, 56, 0, 3, 17]
    scale = float(torch.tensor(HIDDEN**0.5, dtype=dtype))
    for copy in (False, True):
        embedding = ops.make_embedding(dense(table.clone()), tied=True, copy=copy)
        scaled = table[ids] * torch.tensor(scale, dtype=dtype)
        assert torch.equal(ops.embed(prompt(ids), embedding, None, scale).x, scaled)
        assert torch.equal(ops.embed(prompt(ids), embedding, places, scale).x, scaled + places[:5])
        assert torch.equal(ops.embed(prompt(ids), embedding, places).x, table[ids] + places[:5])


def test_hidden_is_what_logits_multiplies(ops: BaseOps, dtype: torch.dtype) -> None:
    """The vectors are of the tokens that are sampled from, whether or not others are still in the residual."""
    x, pending = random(7, HIDDEN, dtype=dtype, seed=1), random(7, HIDDEN, dtype=dtype, seed=2)
    norm = Norm(random(HIDDEN, dtype=dtype, seed=3), None, 1e-6)
    batch = _core.StepBatch([0] * 7, list(range(7)), list(range(7)), [0, 7], [0], [[0]], [2, 6])
    got = ops.hidden(Residual(x.clone(), pending.clone()), norm, batch)
    assert_near(got, rms((x + pending)[[2, 6]], norm), dtype)
    head = ops.make_head(dense(torch.eye(HIDDEN, dtype=dtype)))
    assert torch.equal(ops.logits(Residual(x.clone(), pending.clone()), norm, head, batch), got.float())


def test_a_decoder_of_sandwich_norms(ops: BaseOps, dtype: torch.dtype) -> None:
    """Two layers as Gemma 2 has them, one with a window: caps, scales and norms on both sides of every block."""

    def weight(*shape: int, seed: int) -> Tensor:
        return random(*shape, dtype=dtype, seed=seed, std=shape[-1] ** -0.5 if len(shape) > 1 else 1.0)

    ids, table = [5, 9, 56, 0, 31, 9, 2] * 3, weight(VOCAB, HIDDEN, seed=1)
    last = Norm(weight(HIDDEN, seed=2), None, 1e-6)
    exact = (table[ids] * torch.tensor(5.5, dtype=dtype)).double()
    layers = []
    for n, window in enumerate((6, 0)):
        norms = [Norm(weight(HIDDEN, seed=10 * n + s), None, 1e-6) for s in range(3, 7)]
        shapes = ((HEADS + 4) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)
        qkv, output, up, down = (weight(*shape, seed=30 + 10 * n + s) for s, shape in enumerate(shapes))
        attention = AttentionLayer(HEADS, None, None, 0.4, window, 1.5)
        handles = [ops.make_linear([dense(w)], [None]) for w in (qkv, output, up, down)]
        layers.append(
            DecoderLayer(
                AttentionBlock(norms[0], handles[0], attention, handles[1], norms[1]),
                MLPBlock(norms[2], handles[2], "gelu_tanh_mul", handles[3], norms[3]),
            )
        )
        exact += rms(attend(rms(exact, norms[0]) @ qkv.double().T, attention) @ output.double().T, norms[1])
        gate, linear = (rms(exact, norms[2]) @ up.double().T).chunk(2, -1)
        inner = torch.nn.functional.gelu(gate, approximate="tanh") * linear
        exact += rms(inner @ down.double().T, norms[3])
    logits = capped(rms(exact, last) @ table.double().T, 2.0)

    embedding = ops.make_embedding(dense(table), tied=True)
    model = Decoder(ops, layers, embedding=embedding, norm=last, head=embedding, embedding_scale=5.5, logit_softcap=2.0)
    got = model.forward(prompt(ids), [empty_cache(len(ids), dtype) for _ in layers])
    assert (got.double() - logits).abs().max() < (1e-5 if dtype == torch.float32 else 0.1)


def test_an_rms_norm_with_a_weight_in_float32(ops: BaseOps, dtype: torch.dtype) -> None:
    """The weight is not rounded: the result is that of float32 rows, rounded once."""
    x, weight = random(5, HIDDEN, dtype=dtype, seed=1), 1 + random(HIDDEN, dtype=torch.float32, seed=2, std=0.01)
    norm = Norm(weight, None, 1e-6)
    exact = ops.norm(x.float(), norm).to(dtype)
    assert torch.equal(ops.norm(x, norm), exact)
    handle = ops.make_linear([dense(torch.eye(HIDDEN, dtype=dtype))], [None])
    assert torch.equal(ops.norm_linear(Residual(x.clone()), norm, handle, NO_STEP), exact)
    heads = x.view(5, 1, HIDDEN).clone()
    ops.head_rms_norm_(heads, weight, 1e-6)
    assert torch.equal(heads.view(5, HIDDEN), exact)


def test_a_layer_norm_has_its_weight_in_the_dtype_of_its_rows() -> None:
    weight = torch.ones(HIDDEN)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        CpuOps(1).norm(random(5, HIDDEN, dtype=torch.bfloat16, seed=1), Norm(weight, weight, 1e-6))
