"""The native CPU kernels: against plain torch in float64, and bit for bit against themselves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine import _core
from asyncengine.kernels.cpu.base import Residual
from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.ops import Activation, AttentionCall, AttentionLayer, LayerKVCache, Norm, split_heads
from asyncengine.kernels.weight import dense
from tests.kernels.twins import NO_STEP

ISAS = _core.CpuKernels.available_isas()
DTYPES = [torch.float32, torch.bfloat16]
# Relative error of a result stored once: half a unit in the last place, and as much again on the way.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


@functools.cache
def make_ops(isa: str, threads: int = 2) -> CpuOps:
    return CpuOps(threads, isa)


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return make_ops(request.param)


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_near(got: Tensor, expected: Tensor, scale: Tensor | float = 0.0) -> None:
    """Check to within rounding of the stored dtype, plus 2e-6 of `scale`, the size of the terms that were summed."""
    error = (got.double() - expected).abs()
    bound = ROUNDING[got.dtype] * expected.abs() + 2e-6 * torch.as_tensor(scale) + 1e-30
    worst = (error / bound).max()
    assert worst <= 1, f"error is {worst:.3g} times the bound"


def assert_same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    bits = torch.uint8 if a.itemsize == 1 else torch.int16
    assert torch.equal(a.view(bits), b.view(bits)), "not bit for bit equal"


# ---- linear ----


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 16, 33, 300])
@pytest.mark.parametrize("k", [1, 15, 64, 100, 768, 1601])
def test_linear(ops: CpuOps, dtype: torch.dtype, rows: int, k: int) -> None:
    sizes = [1, 37, 64, 11]
    weights = [random(n, k, dtype=dtype, seed=n) for n in sizes]
    biases = [random(1, dtype=dtype), None, random(64, dtype=dtype, seed=5), random(11, dtype=dtype)]
    x = random(rows, k, dtype=dtype, seed=9)
    handle = ops.make_linear([dense(w) for w in weights], biases)
    expected, scale = [], []
    for w, b in zip(weights, biases, strict=True):
        expected.append(F.linear(x.double(), w.double(), None if b is None else b.double()))
        scale.append(x.double().abs() @ w.double().abs().T)
    assert_near(ops.multiply(x, handle, NO_STEP), torch.cat(expected, 1), torch.cat(scale, 1))
    logits = ops.multiply(x, handle, NO_STEP, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert_near(logits, torch.cat(expected, 1), torch.cat(scale, 1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", [1, 3, 6, 13, 15, 16, 33, 300])
@pytest.mark.parametrize("k", [1, 15, 64, 769, 1601])
def test_linear_of_transposed_weights_is_the_same(ops: CpuOps, dtype: torch.dtype, rows: int, k: int) -> None:
    stored = [random(k, n, dtype=dtype, seed=n) for n in (2, 37, 64)]
    biases = [random(2, dtype=dtype), None, random(64, dtype=dtype, seed=5)]
    x = random(rows, k, dtype=dtype, seed=9)
    plain = ops.make_linear([dense(w.T.contiguous()) for w in stored], biases)
    panels = ops.make_linear([dense(w.T) for w in stored], biases)
    for out_dtype in (dtype, torch.float32):
        assert_same(ops.multiply(x, panels, NO_STEP, out_dtype), ops.multiply(x, plain, NO_STEP, out_dtype))


@pytest.mark.parametrize("k", [1, 64, 769])
@pytest.mark.parametrize("copy", [True, False])
def test_embedding_that_is_the_head_too(ops: CpuOps, dtype: torch.dtype, k: int, copy: bool) -> None:
    table, positions = random(301, k, dtype=dtype), random(50, k, dtype=dtype, seed=1)
    ids, places = list(range(300, -1, -7)), list(range(43))
    batch = _core.StepBatch(ids, places, places, [0, 43], [0], [[0]], [])
    embedding = ops.make_embedding(dense(table.clone()), tied=True, copy=copy)
    assert_same(ops.embed(batch, embedding).x, table[ids])
    assert_same(ops.embed(batch, embedding, positions).x, table[ids] + positions[places])
    x = random(16, k, dtype=dtype, seed=9)
    head = ops.make_head(dense(table))
    assert_same(*(ops.multiply(x, handle, NO_STEP, torch.float32) for handle in (embedding, head)))


@pytest.mark.parametrize("k", [33, 768, 2050])
def test_linear_does_not_depend_on_batch_or_threads(ops: CpuOps, dtype: torch.dtype, k: int) -> None:
    weights = [random(101, k, dtype=dtype, seed=1), random(64, k, dtype=dtype, seed=2)]
    biases = [random(101, dtype=dtype, seed=3), None]
    x = random(300, k, dtype=dtype, seed=4)
    handle = ops.make_linear([dense(w) for w in weights], biases)
    alone = torch.cat([ops.multiply(x[i : i + 1], handle, NO_STEP) for i in range(300)])
    for threads in (1, 2, 3):
        other = make_ops(ops.isa, threads)
        for rows in (2, 3, 4, 5, 8, 16, 31, 64, 129, 300):
            start = (37 * rows) % (301 - rows)
            assert_same(other.multiply(x[start : start + rows], handle, NO_STEP), alone[start : start + rows])


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_linear_is_all_its_parts(
    ops: CpuOps, dtype: torch.dtype, activation: Activation | None, rows: int, has_bias: bool
) -> None:
    bias = random(64, dtype=dtype)
    handle = ops.make_linear([dense(random(n, 48, dtype=dtype, seed=n)) for n in (302, 64)], [None, bias])
    norm = Norm(random(48, dtype=dtype, seed=1), bias[:48] if has_bias else None, 1e-5)
    x, pending = random(rows, 48, dtype=dtype, seed=2), random(rows, 48, dtype=dtype, seed=3)

    def parts(x: Tensor, residual: Tensor | None) -> Tensor:
        y = ops.multiply(ops.norm(x, norm, residual), handle, NO_STEP)
        return y if activation is None else ops.activate(y, activation)

    residual = Residual(x.clone())
    assert_same(ops.norm_linear(residual, norm, handle, NO_STEP, activation), parts(x, None))
    assert_same(residual.x, x)
    residual.pending = pending
    assert_same(ops.norm_linear(residual, norm, handle, NO_STEP, activation), parts(pending, x))
    assert_same(residual.x, x)
    assert residual.pending is None


def test_what_an_operation_returned_is_read_like_any_tensor(ops: CpuOps, dtype: torch.dtype) -> None:
    """The result is read right whatever the number of rows, and whichever of two results of one width was the last."""
    up = ops.make_linear([dense(random(48, 48, dtype=dtype))], [None])
    down = ops.make_linear([dense(random(48, 48, dtype=dtype, seed=1))], [None])
    norm = Norm(random(48, dtype=dtype, seed=2), None, 1e-5)
    for rows in (3, 20, 1, 3):
        x = random(rows, 48, dtype=dtype, seed=rows)
        residual = Residual(x.clone())
        inner = ops.norm_linear(residual, norm, up, NO_STEP)
        expected = ops.multiply(ops.multiply(ops.norm(x, norm), up, NO_STEP), down, NO_STEP)
        for read in (inner, inner.clone(), inner):
            residual.pending = None
            ops.linear_add_(read, down, residual, NO_STEP)
            assert residual.pending is not None
            assert_same(residual.pending, expected)
    with pytest.raises(ValueError, match="the residual must be"):
        ops.norm_linear(Residual(random(2, 47, dtype=dtype)), norm, up, NO_STEP)
    with pytest.raises(ValueError, match="what is added must be"):
        ops.norm_linear(Residual(x, x[:1]), norm, up, NO_STEP)
    with pytest.raises(ValueError, match="weight must be"):
        ops.norm_linear(Residual(x), Norm(random(47, dtype=dtype), None, 1e-5), up, NO_STEP)
    with pytest.raises(ValueError, match="x must be"):
        ops.linear_add_(ops.norm_linear(Residual(x), norm, up, NO_STEP)[:, 1:], down, Residual(x), NO_STEP)


def test_bfloat16_of_every_size_is_summed_in_order(ops: CpuOps) -> None:
    """Sums that depend on their order: a kernel that took another one for some counts of rows would show."""
    k, scales = 200, 2.0 ** torch.arange(-12, 13, dtype=torch.float32)
    x = (random(70, k) * scales[torch.arange(k) % 25]).bfloat16()
    weight = (random(k, 70, seed=1) * scales.flip(0)[torch.arange(k) % 25, None]).bfloat16()
    for w in (weight.T, weight.T.contiguous()):
        handle = ops.make_linear([dense(w)], [None])
        whole = ops.multiply(x, handle, NO_STEP, torch.float32)
        assert_near(whole, x.double() @ weight.double(), x.double().abs() @ weight.double().abs())
        for rows in range(1, 36):
            assert_same(ops.multiply(x[:rows], handle, NO_STEP, torch.float32), whole[:rows])


def test_linear_reads_nothing_outside_its_rows(ops: CpuOps, dtype: torch.dtype) -> None:
    k = 45
    wide = torch.full((40, k + 9), math.nan, dtype=dtype)
    wide[:, :k] = random(40, k, dtype=dtype, seed=1)
    x = wide[:, :k]  # strided rows
    for rows in (5, 21):
        padded = torch.full((rows + 2, k), math.nan, dtype=dtype)
        padded[1:-1] = random(rows, k, dtype=dtype)
        handle = ops.make_linear([dense(padded[1:-1])], [None])
        for count in (1, 4, 16, 23, 40):
            y = ops.multiply(x[:count], handle, NO_STEP)
            assert_near(y, x[:count].double() @ padded[1:-1].double().T, 100.0)


def test_memory_of_large_results_is_used_again_only_when_nobody_refers_to_it(ops: CpuOps) -> None:
    first, second = random(600, 512), random(600, 512, seed=1)
    result = ops.activate(first, "gelu")
    address, view, expected = result.data_ptr(), result[10:].view(-1, 64), result[10:].clone()
    del result
    other = ops.activate(second, "gelu")
    assert other.data_ptr() != address
    assert torch.equal(view, expected.view(-1, 64))
    del view
    assert ops.activate(first, "gelu").data_ptr() == address


# ---- rows: norms and activations ----

GELUS: tuple[Activation, ...] = ("gelu", "gelu_tanh")
ROW_KERNELS: dict[str, Callable[[CpuOps, Tensor, Tensor, Tensor], Tensor]] = {
    "rms_norm": lambda ops, x, w, b: ops.norm(x, Norm(w, None, 1e-6)),
    "layer_norm": lambda ops, x, w, b: ops.norm(x, Norm(w, b, 1e-5)),
    "add_rms_norm": lambda ops, x, w, b: ops.norm(x, Norm(w, None, 1e-6), x.flip(1).contiguous()),
    "add_layer_norm": lambda ops, x, w, b: ops.norm(x, Norm(w, b, 1e-5), x.flip(1).contiguous()),
    "silu_mul": lambda ops, x, w, b: ops.activate(torch.cat((x, x.flip(1)), 1), "silu_mul"),
    "gelu_tanh_mul": lambda ops, x, w, b: ops.activate(torch.cat((x, x.flip(1)), 1), "gelu_tanh_mul"),
    "gelu_tanh": lambda ops, x, w, b: ops.activate(x, "gelu_tanh"),
    "gelu": lambda ops, x, w, b: ops.activate(x, "gelu"),
}


def row_twin(name: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    added = (x + x.flip(1)).double()  # the residual is stored in x's dtype before its norm
    x, w, b = x.double(), w.double(), b.double()
    match name:
        case "rms_norm":
            return F.rms_norm(x, w.shape, w, 1e-6)
        case "layer_norm":
            return F.layer_norm(x, w.shape, w, b, 1e-5)
        case "add_rms_norm":
            return F.rms_norm(added, w.shape, w, 1e-6)
        case "add_layer_norm":
            return F.layer_norm(added, w.shape, w, b, 1e-5)
        case "silu_mul":
            return F.silu(x) * x.flip(1)
        case "gelu_tanh_mul":
            return F.gelu(x, approximate="tanh") * x.flip(1)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
    return F.gelu(x)


@pytest.mark.parametrize("name", ROW_KERNELS)
@pytest.mark.parametrize("width", [1, 7, 64, 100, 768])
def test_row_kernels(ops: CpuOps, dtype: torch.dtype, name: str, width: int) -> None:
    x = random(9, width, dtype=dtype) * 3
    w, b = random(width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2)
    got = ROW_KERNELS[name](ops, x, w, b)
    assert_near(got, row_twin(name, x, w, b), 1.0 if "norm" in name else 0.1)


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_row_kernels_do_not_depend_on_batch_or_threads(ops: CpuOps, dtype: torch.dtype, name: str) -> None:
    kernel, x = ROW_KERNELS[name], random(300, 515, dtype=dtype)
    w, b = random(515, dtype=dtype, seed=1), random(515, dtype=dtype, seed=2)
    alone = torch.cat([kernel(ops, x[i : i + 1], w, b) for i in range(300)])
    for threads in (1, 2, 3):
        for rows in (2, 17, 300):
            assert_same(kernel(make_ops(ops.isa, threads), x[-rows:], w, b), alone[-rows:])


def test_an_element_of_an_activation_depends_on_itself_only(ops: CpuOps) -> None:
    x = random(1, 61) * 5
    for kind in GELUS:
        assert_same(torch.cat([ops.activate(x[:, i : i + 1], kind) for i in range(61)], 1), ops.activate(x, kind))


def test_add_norm_updates_the_residual(ops: CpuOps, dtype: torch.dtype) -> None:
    x, residual = random(3, 50, dtype=dtype), random(3, 50, dtype=dtype, seed=1)
    expected = residual + x
    ops.norm(x, Norm(torch.ones(50, dtype=dtype), None, 1e-6), residual)
    assert_same(residual, expected)


def test_activations_over_the_whole_range(ops: CpuOps) -> None:
    special = torch.tensor([0.0, -0.0, 1e-30, 1e-38, 3e38, -3e38])
    x = torch.cat((torch.linspace(-105, 105, 4001), special))[None]
    x64 = x.double()  # F.gelu cancels for x << 0, even in float64
    by_erfc = 0.5 * x64 * torch.special.erfc(-x64 / math.sqrt(2))
    by_sigmoid = x64 * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x64 + 0.044715 * x64**3))
    for got, twin in ((ops.activate(x, "gelu"), by_erfc), (ops.activate(x, "gelu_tanh"), by_sigmoid)):
        tiny = twin.abs() < 1e-30  # below, results may flush to zero
        error = (got - twin).abs() / twin.abs().clamp_min(1e-30)
        assert error[~tiny].max() < 3e-5  # the far tail loses digits to the square in its exponent
        assert error[twin.abs() > 1e-2].max() < 2e-6
        assert got[tiny].abs().max() < 1e-30
    gate = torch.cat((x, torch.ones_like(x)), 1)
    silu = F.silu(x64)
    assert ((ops.activate(gate, "silu_mul") - silu).abs() / silu.abs().clamp_min(1e-30)).max() < 2e-6
    nan = torch.full((1, 3), math.nan)
    for kind in GELUS:
        assert ops.activate(nan, kind).isnan().all()


def test_soft_caps_over_the_whole_range(ops: CpuOps) -> None:
    x = torch.cat((torch.linspace(-25, 25, 8001), torch.tensor([0.0, 1e-30, 1.5, -1.5, 3e38, -math.inf, math.nan])))
    for cap in (1.0, 30.0):
        capped, expected = ops.soft_cap_(x[None].clone(), cap)[0], cap * torch.tanh(x.double() / cap)
        assert_near(capped[:-1], expected[:-1])
        assert capped[-1].isnan()
        alone = torch.cat([ops.soft_cap_(x[None, i : i + 1].clone(), cap)[0] for i in range(len(x))])
        assert_same(alone, capped)


# ---- attention inputs: head norm and rotary on strided views ----


@pytest.mark.parametrize("dim", [2, 40, 64, 80, 96, 128])
def test_head_norm_and_rotary_on_views(ops: CpuOps, dtype: torch.dtype, dim: int) -> None:
    tokens, q_heads, k_heads = 11, 3, 1
    qkv = random(tokens, (q_heads + 2 * k_heads) * dim, dtype=dtype)
    before = qkv.clone()
    q = qkv[:, : q_heads * dim].view(tokens, q_heads, dim)
    k = qkv[:, q_heads * dim : (q_heads + k_heads) * dim].view(tokens, k_heads, dim)
    weight = random(dim, dtype=dtype, seed=3)
    ops.head_rms_norm_(q, weight, 1e-6)
    old = before.view(tokens, -1, dim).double()
    old_q, old_k = old[:, :q_heads], old[:, q_heads : q_heads + k_heads]
    normed = F.rms_norm(old_q, (dim,), weight.double(), 1e-6)
    assert_near(q, normed, 1.0)

    positions = torch.randint(0, 500, (tokens,), generator=torch.Generator().manual_seed(1))
    angles = torch.outer(torch.arange(500.0), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    expected = []
    for x in (q.double(), old_k):
        cos, sin = cos_sin.double()[positions][:, None, :].chunk(2, -1)
        a, b = x.chunk(2, -1)
        expected.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    ops.rotary_(q, k, cos_sin, positions)
    assert_near(q, expected[0], 1.0)
    assert_near(k, expected[1], 1.0)
    assert_same(qkv[:, (q_heads + k_heads) * dim :], before[:, (q_heads + k_heads) * dim :])


# ---- paged attention ----


class Paged:
    """Sequences with random q, k, v and a NaN-filled cache whose blocks are handed out in random order."""

    def __init__(
        self,
        lengths: list[int],
        heads: tuple[int, int],
        dim: int,
        dtype: torch.dtype,
        block_size: int = 16,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        self.lengths, self.block_size, self.softcap, self.sinks = lengths, block_size, softcap, sinks
        self.scales: Tensor | None = None
        q_heads, kv_heads = heads
        self.q, self.k, self.v = (
            [random(n, h, dim, dtype=dtype, seed=10 * i + s) for i, n in enumerate(lengths)]
            for s, h in enumerate((q_heads, kv_heads, kv_heads))
        )
        counts = [-(-n // block_size) for n in lengths]
        ids = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.k_cache = torch.full((sum(counts) + 3, kv_heads, dim, block_size), math.nan, dtype=dtype)
        self.v_cache = torch.full((sum(counts) + 3, kv_heads, block_size, dim), math.nan, dtype=dtype)

    def step(self, ops: CpuOps, rows: list[tuple[int, int, int]], window: int) -> list[Tensor]:
        """One step of (sequence, first position, end): stores their KV, returns their outputs."""
        positions = [p for _, a, b in rows for p in range(a, b)]
        slots = [
            self.tables[s][p // self.block_size] * self.block_size + p % self.block_size
            for s, a, b in rows
            for p in range(a, b)
        ]
        starts = [0]
        for _, a, b in rows:
            starts.append(starts[-1] + b - a)
        tables = [self.tables[s] for s, _, _ in rows]
        batch = _core.StepBatch([0] * len(slots), positions, slots, starts, [a for _, a, _ in rows], tables, [])
        parts = [torch.cat([x[s][a:b] for s, a, b in rows]) for x in (self.q, self.k, self.v)]
        heads, num_heads, scale = torch.cat(parts, 1), parts[0].shape[1], parts[0].shape[2] ** -0.5
        caches = (self.k_cache, self.v_cache)
        before = self.k_cache.clone(), self.v_cache.clone()
        layer = AttentionLayer(num_heads, None, None, scale, window, self.softcap, None, self.sinks)
        cache = LayerKVCache(*caches, self.scales)
        out = ops.attention(heads.flatten(1), layer, cache, batch).clone()
        q, k, v = split_heads(heads, num_heads)
        ops.store_kv(k, v, LayerKVCache(*before, self.scales), batch)
        for written, expected in zip(caches, before, strict=True):
            assert_same(written, expected)
        assert_same(out, ops.paged_attention(AttentionCall(q, layer, cache, batch)))
        return list(out.split([b - a for _, a, b in rows]))

    def twin(self, sequence: int, window: int) -> Tensor:
        q, k, v = (x[sequence].double() for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        i, j = torch.arange(len(q))[:, None], torch.arange(len(q))[None]
        hidden = (j > i) | ((j <= i - window) if window else torch.zeros(()).bool())
        scores = scores.masked_fill(hidden, -math.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
        weights = scores.softmax(-1)[..., : len(q)]
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).flatten(1)


SHAPES = [((1, 1), 64), ((3, 3), 40), ((7, 1), 80), ((6, 2), 128), ((4, 4), 96), ((3, 1), 7), ((35, 1), 16)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [0, 5, 70])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_attention(
    ops: CpuOps, dtype: torch.dtype, heads: tuple[int, int], dim: int, window: int, softcap: float
) -> None:
    paged = Paged([1, 15, 16, 17, 190], heads, dim, dtype, softcap=softcap)
    got = paged.step(ops, [(s, 0, n) for s, n in enumerate(paged.lengths)], window)
    for s, out in enumerate(got):
        assert_near(out, paged.twin(s, window), 1.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [0, 3, 100, 600])
def test_attention_over_partitions(ops: CpuOps, window: int) -> None:
    paged = Paged([1300], (3, 1), 32, torch.float32, block_size=48)
    assert_near(paged.step(ops, [(0, 0, 1300)], window)[0], paged.twin(0, window), 1.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [0, 9, 540])
@pytest.mark.parametrize(("heads", "softcap"), [((2, 2), 0.0), ((5, 1), 0.0), ((2, 1), 2.0)])
def test_attention_does_not_depend_on_chunking_batch_or_threads(
    ops: CpuOps, dtype: torch.dtype, heads: tuple[int, int], window: int, softcap: float
) -> None:
    length, other_length = 1100, 40
    paged = Paged([length, other_length], heads, 48, dtype, softcap=softcap)
    whole = paged.step(make_ops(ops.isa, 1), [(0, 0, length), (1, 0, other_length)], window)
    for threads in (1, 2, 3):
        pool = make_ops(ops.isa, threads)
        for chunk in (1, 2, 3, 7, 64):
            # The last tokens of the long sequence in chunks, beside a decode row and a prefill of the other.
            for start in range(length - 3 * chunk, length, chunk):
                rows = [(1, other_length - 1, other_length), (0, start, start + chunk), (1, 3, 30)]
                decoded, chunked, prefilled = paged.step(pool, rows, window)
                assert_same(decoded, whole[1][-1:])
                assert_same(chunked, whole[0][start : start + chunk])
                assert_same(prefilled, whole[1][3:30])
        assert_same(paged.step(pool, [(0, length - 1, length)], window)[0], whole[0][-1:])


def test_attention_of_leading_rows_only(ops: CpuOps) -> None:
    paged = Paged([30, 20], (2, 1), 16, torch.float32)
    whole = paged.step(ops, [(0, 0, 30), (1, 0, 20)], 0)
    slots = [paged.tables[0][1] * 16 + 13, *(paged.tables[1][p // 16] * 16 + p % 16 for p in range(20))]
    batch = _core.StepBatch([0] * 21, [29, *range(20)], slots, [0, 1, 21], [29, 0], paged.tables, [0, 20])
    layer, cache = AttentionLayer(2, None, None, 0.25, 0), LayerKVCache(paged.k_cache, paged.v_cache)
    out = ops.paged_attention(AttentionCall(paged.q[0][29:], layer, cache, batch))
    assert_same(out, whole[0][29:])


def test_a_nan_in_sight_is_not_hidden(ops: CpuOps) -> None:
    paged = Paged([20], (1, 1), 16, torch.float32)
    paged.k[0][4, 0, 3] = math.nan
    (out,) = paged.step(ops, [(0, 0, 20)], 0)
    assert not out[:4].isnan().any()
    assert out[4:].isnan().all()


# ---- misuse ----


def test_wrong_arguments_raise(ops: CpuOps) -> None:
    handle = ops.make_linear([dense(random(4, 8))], [None])
    with pytest.raises(ValueError, match=r"\[tokens, 8\]"):
        ops.multiply(random(2, 9), handle, NO_STEP)
    with pytest.raises(ValueError, match="contiguous"):
        ops.multiply(random(8, 2).T, handle, NO_STEP)
    caches = torch.zeros(2, 2, 8, 16), torch.zeros(2, 2, 16, 8)
    batch = _core.StepBatch([0], [0], [0], [0, 1], [0], [[0]], [0])
    with pytest.raises(ValueError, match="heads must be"):
        ops.attention(random(1, 40), AttentionLayer(2, None, None, 1.0, 0), LayerKVCache(*caches), batch)
    with pytest.raises(ValueError, match="3 query heads"):
        ops.attention(random(1, 56), AttentionLayer(3, None, None, 1.0, 0), LayerKVCache(*caches), batch)
    with pytest.raises(ValueError, match="weight"):
        ops.norm(random(2, 8), Norm(random(9), None, 1e-6))
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        ops.activate(random(2, 8).half(), "gelu")
    with pytest.raises(ValueError, match="there are: auto"):
        CpuOps(1, "sse9")
    with pytest.raises(ValueError, match="at least 1 thread"):
        CpuOps(0)
    with pytest.raises(ValueError, match="query_start"):
        _core.StepBatch([1], [0], [0], [0, 2], [0], [[0]], [0])
