"""The GPU's row kernels: against float64 twins, against the CPU's kernels, and against poison."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncengine.kernels.cpu.ops import CpuOps
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.cuda.launch.gluon import whole_tiles_of
from asyncengine.kernels.cuda.rows.activation import activate_rows, gate_by_sigmoid
from asyncengine.kernels.cuda.rows.additions import add_rows
from asyncengine.kernels.cuda.rows.lookup import embed
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.cuda.rows.rotary import rotary_store_kv, scale_queries, store_kv
from asyncengine.kernels.cuda.rows.tensors import empty_rows
from asyncengine.kernels.ops import Norm
from tests.amounts import examples
from tests.kernels.poison import poison_new_memory
from tests.kernels.twins import NO_STEP

# As on the GPU, exp overflows to infinity in the tail of a sigmoid.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
DTYPES = [torch.float32, torch.bfloat16]
# Relative error of a result stored once: half a unit in the last place, and as much again on the way.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, expected: Tensor, scale: float) -> None:
    """Check to within rounding of the stored dtype, plus 2e-6 of `scale`, the size of the terms that were summed."""
    error = (got.cpu().double() - expected.cpu().double()).abs()
    bound = ROUNDING[got.dtype] * expected.cpu().double().abs() + 2e-6 * scale + 1e-30
    worst = float((error / bound).max())
    assert worst <= 1, f"error is {worst:.3g} times the bound"


def assert_same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    assert torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16)), "not bit for bit equal"


# ---- norms and activations ----

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, weight, bias
KERNELS: dict[str, Kernel] = {
    "rms_norm": lambda x, w, b: norm_rows(x, Norm(w, None, 1e-6)),
    "layer_norm": lambda x, w, b: norm_rows(x, Norm(w, b, 1e-5)),
    "silu_mul": lambda x, w, b: activate_rows(torch.cat((x, x.flip(1)), 1), "silu_mul"),
    "gelu_tanh": lambda x, w, b: activate_rows(x, "gelu_tanh"),
    "gelu": lambda x, w, b: activate_rows(x, "gelu"),
    "gate": lambda x, w, b: gate_by_sigmoid(x, x.flip(1)),
}


def exact(name: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x, w, b = x.double(), w.double(), b.double()
    match name:
        case "rms_norm":
            return F.rms_norm(x, w.shape, w, 1e-6)
        case "layer_norm":
            return F.layer_norm(x, w.shape, w, b, 1e-5)
        case "silu_mul":
            return F.silu(x) * x.flip(1)
        case "gate":
            return x * x.flip(1).sigmoid()
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def on_the_cpu(name: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    ops = CpuOps(1)
    if "norm" in name:
        return ops.norm(x, Norm(w, b, 1e-5) if name == "layer_norm" else Norm(w, None, 1e-6))
    if name == "gate":
        return ops.gated(x, x.flip(1), NO_STEP)
    return ops.activate(torch.cat((x, x.flip(1)), 1) if name == "silu_mul" else x, name)


def check_rows(name: str, rows: int, width: int, dtype: torch.dtype, seed: int, device: torch.device) -> None:
    x = random(rows, width, dtype=dtype, seed=seed) * 3
    w, b = random(width, dtype=dtype, seed=seed + 2), random(width, dtype=dtype, seed=seed + 3)
    moved = [t.to(device).clone() for t in (x, w, b)]
    got = KERNELS[name](*moved)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert_near(got, exact(name, x, w, b), 1.0 if "norm" in name else 0.2)
    assert_same(moved[0], x)
    assert_near(got, on_the_cpu(name, x, w, b), 1.0 if dtype == torch.float32 else 3e3)
    for row in {0, rows - 1}:
        assert_same(KERNELS[name](x[row : row + 1].to(device), *moved[1:]), got[row : row + 1])


@pytest.mark.parametrize("name", KERNELS)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 130) | st.sampled_from([768, 1601, 2048, 5120]),
    bfloat16=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(12))
def test_rows(device: torch.device, name: str, rows: int, width: int, bfloat16: bool, seed: int) -> None:
    check_rows(name, rows, width, DTYPES[bfloat16], seed, device)


@pytest.mark.parametrize("name", KERNELS)
def test_wide_rows(device: torch.device, name: str, dtype: torch.dtype) -> None:
    check_rows(name, 1, 16384, dtype, 5, device)
    check_rows(name, 1, 18432, dtype, 6, device)


@pytest.mark.parametrize("name", KERNELS)
def test_poison_stays_in_its_row(device: torch.device, dtype: torch.dtype, name: str) -> None:
    x = random(5, 99, dtype=dtype).to(device)
    w, b = (random(99, dtype=dtype, seed=seed).to(device) for seed in (2, 3))
    clean = KERNELS[name](x.clone(), w, b)
    x[[1, 3]] = math.nan
    got = KERNELS[name](x, w, b)
    assert_same(got[::2], clean[::2])
    assert got[1::2].isnan().all()


@pytest.mark.parametrize("rows", [1, 5, 16, 40, 129, 300])
def test_rows_have_memory_for_whole_tiles(rows: int) -> None:
    """A copy sees memory for whole tiles; rows that end where their memory does get zeros there."""
    made = empty_rows(rows, 64, torch.bfloat16, torch.device("cpu"))
    assert made.shape == (rows, 64)
    assert made.is_contiguous()
    for tile in (1, 16, 64, 256):
        if tile < 2 * rows:
            assert list(whole_tiles_of(made, tile, 64).shape) == [-(-rows // tile) * tile, 64]
    alone = torch.empty(rows, 64, dtype=torch.bfloat16)
    assert list(whole_tiles_of(alone, 256, 64).shape) == [rows, 64]
    last = torch.empty(rows + 256, 3, 64, dtype=torch.bfloat16)[256:, 2]
    assert list(whole_tiles_of(last, 256, 64).shape) == [rows, 64]


@pytest.mark.parametrize("name", KERNELS)
def test_strided_rows_end_where_they_end(device: torch.device, dtype: torch.dtype, name: str) -> None:
    wide = torch.full((4, 90), math.nan, dtype=dtype, device=device)
    wide[:, :50] = random(4, 50, dtype=dtype).to(device)
    x = wide[:, :50]
    w, b = (random(50, dtype=dtype, seed=s).to(device) for s in (2, 3))
    if name == "silu_mul":
        expected = activate_rows(x.contiguous(), "silu_mul")
        assert_same(activate_rows(x, "silu_mul"), expected)
        return
    assert_same(KERNELS[name](x, w, b), KERNELS[name](x.contiguous(), w, b))


def test_a_norm_of_chosen_rows(device: torch.device, dtype: torch.dtype) -> None:
    x, w = random(6, 70, dtype=dtype).to(device), random(70, dtype=dtype, seed=2).to(device)
    index = torch.tensor([5, 0, 0, 3], device=device)
    norm = Norm(w, None, 1e-6)
    assert_same(norm_rows(x, norm, index), norm_rows(x, norm)[index])


@given(rows=st.integers(1, 5), width=st.integers(1, 70) | st.sampled_from([768, 1600]), parts=st.integers(1, 8),
       layer=st.booleans(), bfloat16=st.booleans(), chosen=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
@settings(max_examples=examples(25))
def test_a_norm_adds_up_parts(
    device: torch.device, rows: int, width: int, parts: int, layer: bool, bfloat16: bool, chosen: bool, seed: int
) -> None:
    """The result is the norm of the x that the launch leaves, or would leave if rows were not chosen."""
    dtype = DTYPES[bfloat16]
    wide = torch.full((rows, width + 3), math.nan, dtype=dtype)
    wide[:, :width] = random(rows, width, dtype=dtype, seed=seed)
    wide = wide.to(device)
    x, before = wide[:, :width], wide.clone()
    added = random(parts, rows, width, dtype=torch.float32, seed=seed + 1).to(device)
    weight, bias = (random(width, dtype=dtype, seed=seed + i).to(device) for i in (2, 3))
    norm = Norm(weight, bias if layer else None, 1e-5)
    expected = before[:, :width].to(torch.float32, copy=True)
    for part in added:
        expected += part
    expected = expected.to(dtype)
    if chosen:
        index = torch.tensor([rows - 1, 0, rows - 1], device=device)
        assert_same(norm_rows(x, norm, index, added), norm_rows(expected, norm, index))
        assert_same(wide, before)
    else:
        assert_same(norm_rows(x, norm, parts=added), norm_rows(expected, norm))
        assert_same(x, expected)
        assert wide[:, width:].isnan().all()


@given(
    rows=st.integers(1, 4), width=st.integers(1, 70) | st.sampled_from([768, 1600]), parts=st.integers(1, 5),
    norms=st.tuples(*[st.sampled_from(["none", "rms", "layer"])] * 2), replaces=st.booleans(), bfloat16=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=examples(40))
def test_rows_are_added_through_a_norm_and_read_through_another(
    device: torch.device, rows: int, width: int, parts: int, norms: tuple[str, str], replaces: bool, bfloat16: bool,
    seed: int,
) -> None:  # fmt: skip
    dtype = DTYPES[bfloat16]
    wide, onto = (torch.full((n, width + 3), math.nan, dtype=dtype) for n in (rows * parts, rows))
    wide[:, :width] = random(rows * parts, width, dtype=dtype, seed=seed)
    onto[:, :width] = before = random(rows, width, dtype=dtype, seed=seed + 1)
    gains = [random(width, dtype=dtype, seed=seed + i).to(device) for i in (2, 3, 4, 5)]
    norm, reader = (
        None if kind == "none" else Norm(weight, bias if kind == "layer" else None, 1e-5)
        for kind, weight, bias in zip(norms, gains[::2], gains[1::2], strict=True)
    )
    added = wide[:, :width].double().view(rows, parts, width).sum(1)
    if norm is not None and norm.bias is not None:
        added = F.layer_norm(added, (width,), norm.weight.cpu().double(), norm.bias.cpu().double(), 1e-5)
    elif norm is not None:
        added = F.rms_norm(added, (width,), norm.weight.cpu().double(), 1e-5)
    x, onto = wide.to(device), onto.to(device)
    normed = add_rows(x[:, :width], onto[:, :width], reader, parts=parts, norm=norm, replaces=replaces)
    assert_near(onto[:, :width], added if replaces else added + before.double(), 40 * float(added.abs().max()) + 1)
    assert onto[:, width:].isnan().all()
    assert (normed is None) == (reader is None)
    if normed is not None and reader is not None:
        assert_same(normed, norm_rows(onto[:, :width], reader))


@given(
    tokens=st.integers(1, 6), width=st.integers(1, 70) | st.sampled_from([768, 1600, 4096]), positions=st.booleans(),
    bfloat16=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=examples(15))
def test_embedding(device: torch.device, tokens: int, width: int, positions: bool, bfloat16: bool, seed: int) -> None:
    dtype = DTYPES[bfloat16]
    table, places = random(11, width, dtype=dtype, seed=seed), random(9, width, dtype=dtype, seed=seed + 1)
    ids, where = torch.arange(tokens).int() * 2 % 11, torch.arange(tokens).int() * 5 % 9
    got = embed(ids.to(device), table.to(device), where.to(device), places.to(device) if positions else None)
    expected = table[ids].float() + places[where].float() if positions else table[ids]
    assert_near(got, expected, 0.0)


def test_activations_of_extreme_values(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.tensor([[-100.0, -30.0, -9.0, -0.0, 0.0, 1e-20, 9.0, 30.0, 100.0, 3e38]], device=device).to(dtype)
    gelu = activate_rows(x, "gelu")
    silu = activate_rows(torch.cat((x, x / x.abs()), 1), "silu_mul")
    for got in (gelu, activate_rows(x, "gelu_tanh"), silu):
        assert got[0, 6:].equal(x[0, 6:]) or got[0, 6] < x[0, 6]
        assert got[0, 7:].equal(x[0, 7:])
        assert got[0, :3].abs().max() < 2e-3
    assert gelu[0, 3:5].abs().max() == 0


# ---- rotary embedding and the KV cache ----


def rotary_case(
    tokens: int, q_heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """heads, cos_sin, positions, slots with some tokens missing, and two poisoned caches."""
    generator = torch.Generator().manual_seed(seed)
    heads = random(tokens, q_heads + 2 * kv_heads, dim, dtype=dtype, seed=seed)
    angles = torch.rand(40, dim // 2, generator=generator) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(0, 40, (tokens,), generator=generator).int()
    blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator) < 0.3] = -1
    caches = [torch.full((blocks, kv_heads, block_size, dim), math.nan, dtype=dtype) for _ in range(2)]
    return heads, cos_sin, positions, slots, caches


def rotary_twin(
    heads: Tensor, q_heads: int, norms: tuple[Tensor, Tensor] | None, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the reference leaves them."""
    kv_heads = (heads.shape[1] - q_heads) // 2
    q, k, v = (x.clone() for x in heads.split([q_heads, kv_heads, kv_heads], 1))
    ops = ReferenceOps()
    if norms is not None:
        ops.head_rms_norm_(q, norms[0], 1e-6)
        ops.head_rms_norm_(k, norms[1], 1e-6)
    ops.rotary_(q, k, cos_sin, positions.long())
    return q, k, v


def expected_cache(cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    cache = cache.clone()
    for slot, value in zip(slots.tolist(), values, strict=True):
        if slot >= 0:
            cache[slot // cache.shape[2], :, slot % cache.shape[2]] = value
    return cache


def assert_near_or_poisoned(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.isnan().cpu(), expected.isnan())
    # A sum that ends near the edge between two bfloat16 may round the other way, before the rotation and after it.
    step = 1e-6 if got.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(got.cpu(), expected, rtol=step, atol=step, equal_nan=True)


@given(
    tokens=st.integers(1, 6),
    q_heads=st.integers(1, 9),
    kv_heads=st.integers(1, 4),
    half=st.sampled_from([1, 3, 8, 40, 48, 64, 128]),
    block_size=st.sampled_from([16, 48]),
    bfloat16=st.booleans(),
    norm=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(40))
def test_rotary_store_kv(
    device: torch.device,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    half: int,
    block_size: int,
    bfloat16: bool,
    norm: bool,
    seed: int,
) -> None:
    dtype, dim = DTYPES[bfloat16], 2 * half
    heads, cos_sin, positions, slots, caches = rotary_case(tokens, q_heads, kv_heads, dim, block_size, dtype, seed)
    norms = (random(dim, dtype=dtype, seed=seed + 1), random(dim, dtype=dtype, seed=seed + 2)) if norm else None
    q, k, v = rotary_twin(heads, q_heads, norms, cos_sin, positions)

    missing = slots < 0
    positions[missing] = 1 << 30  # would be read far outside the table
    wide = torch.full((tokens, heads[0].numel() + 7), math.nan, dtype=dtype, device=device)
    wide[:, : heads[0].numel()] = heads.flatten(1)
    wide[missing] = math.nan
    view = wide[:, : heads[0].numel()].view(tokens, -1, dim)
    k_cache, v_cache = (cache.to(device).clone() for cache in caches)
    q_norm, k_norm = (n.to(device) for n in norms) if norms else (None, None)
    table, moved_positions, moved_slots = (x.to(device) for x in (cos_sin, positions, slots))
    rotary_store_kv(view, q_heads, q_norm, k_norm, 1e-6, table, moved_positions, moved_slots, k_cache, v_cache)
    q[missing] = math.nan
    assert_near_or_poisoned(view[:, :q_heads], q)
    assert_same(view[~missing, q_heads:], heads[~missing, q_heads:])
    assert wide[:, heads[0].numel() :].isnan().all()
    assert_near_or_poisoned(k_cache, expected_cache(caches[0], slots, k))
    assert_same(v_cache, expected_cache(caches[1], slots, v))


@given(
    tokens=st.integers(1, 6),
    heads=st.integers(1, 20),
    dim=st.sampled_from([1, 7, 64, 80, 256]),
    block_size=st.sampled_from([16, 48]),
    bfloat16=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(25))
def test_store_kv(
    device: torch.device, tokens: int, heads: int, dim: int, block_size: int, bfloat16: bool, seed: int
) -> None:
    # As GPT-2 has them: q, k and v side by side, as many heads of each.
    qkv, _, _, slots, caches = rotary_case(tokens, heads, heads, dim, block_size, DTYPES[bfloat16], seed)
    k, v = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    moved = qkv.to(device)
    k_cache, v_cache = (cache.to(device).clone() for cache in caches)
    store_kv(moved[:, heads : 2 * heads], moved[:, 2 * heads :], slots.to(device), k_cache, v_cache)
    assert_same(k_cache, expected_cache(caches[0], slots, k))
    assert_same(v_cache, expected_cache(caches[1], slots, v))


# ---- misuse ----


def test_an_rms_norm_with_a_weight_in_float32(device: torch.device) -> None:
    """The weight is not rounded: the result is that of float32 rows, rounded once."""
    x, weight = random(5, 70, dtype=torch.bfloat16).to(device), (1 + random(70, seed=1) / 100).to(device)
    assert torch.equal(
        norm_rows(x, Norm(weight, None, 1e-5)), norm_rows(x.float(), Norm(weight, None, 1e-5)).bfloat16()
    )
    with pytest.raises(ValueError, match="weight must be"):
        norm_rows(x.float(), Norm(weight.bfloat16(), None, 1e-5))


def test_a_norm_in_place_leaves_what_lies_between_rows(device: torch.device, dtype: torch.dtype) -> None:
    memory, weight = random(4, 90, dtype=dtype).to(device), random(70, dtype=dtype, seed=1).to(device)
    before, x = memory.clone(), memory[:, 10:80]
    assert norm_rows(x, Norm(weight, None, 1e-5), in_place=True) is x
    assert torch.equal(x, norm_rows(before[:, 10:80], Norm(weight, None, 1e-5)))
    assert torch.equal(memory[:, :10], before[:, :10])
    assert torch.equal(memory[:, 80:], before[:, 80:])


@pytest.mark.parametrize("dim", [6, 500])
def test_queries_are_scaled_by_their_positions(device: torch.device, dtype: torch.dtype, dim: int) -> None:
    """Keys, values and tokens that are not there stay as they are."""
    heads, scales = random(4, 5, dim, dtype=dtype).to(device), torch.tensor([1.0, 1.7, 0.3], device=device)
    positions = torch.tensor([2, 0, 1 << 30, 1], dtype=torch.int32, device=device)
    expected = heads.clone()
    for token, position in ((0, 2), (1, 0), (3, 1)):
        expected[token, :3] = (heads[token, :3].float() * scales[position]).to(dtype)
    scale_queries(heads, 3, scales, positions, torch.tensor([4, 5, -1, 6], device=device))
    assert torch.equal(heads, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gate_of_one_number_is_for_its_whole_row(device: torch.device, dtype: torch.dtype) -> None:
    x, gate = random(3, 1601, dtype=dtype, seed=1), random(3, 5, dtype=dtype, seed=2)[:, 2:3]
    got = gate_by_sigmoid(x.to(device), gate.to(device))
    assert_near(got, x.double() * gate.double().sigmoid(), 0.2)


def test_wrong_arguments_raise(device: torch.device) -> None:
    x, w = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    with pytest.raises(ValueError, match="weight"):
        norm_rows(x, Norm(w[:7], None, 1e-6))
    with pytest.raises(ValueError, match="position_table"):
        embed(torch.zeros(1, dtype=torch.int32), x, torch.zeros(1, dtype=torch.int32), x.bfloat16())
    with pytest.raises(ValueError, match="contiguous rows"):
        activate_rows(x.T, "gelu")
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        activate_rows(x.double(), "gelu")
    with pytest.raises(ValueError, match=r"gate must be torch.float32 \[2, 8\] or \[2, 1\]"):
        gate_by_sigmoid(x, x[:, :7])
    with pytest.raises(ValueError, match="even"):
        activate_rows(x[:, :7], "silu_mul")
    cache = torch.zeros(2, 1, 16, 8, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    heads, table = torch.zeros(2, 3, 8, device=device), torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match="q heads"):
        rotary_store_kv(heads, 2, None, None, 1e-6, table, slots.int(), slots, cache, cache)
    with pytest.raises(ValueError, match="together"):
        rotary_store_kv(heads, 1, w, None, 1e-6, table, slots.int(), slots, cache, cache)
    with pytest.raises(ValueError, match="positions"):
        rotary_store_kv(heads, 1, None, None, 1e-6, table, slots, slots, cache, cache)
    with pytest.raises(ValueError, match="slot_mapping"):
        store_kv(heads[:, :1], heads[:, 1:2], slots.int(), cache, cache)
