"""The kernels of mixtures of experts against plain formulas: routing, sorting, and products of few and of many rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from asyncengine.kernels.cuda.experts import few_rows
from asyncengine.kernels.cuda.experts.codes import stack_codes
from asyncengine.kernels.cuda.experts.few_rows import multiply_down, multiply_up
from asyncengine.kernels.cuda.experts.mix import mix
from asyncengine.kernels.cuda.experts.plan import FEW_ROWS, tiles_for
from asyncengine.kernels.cuda.experts.route import ROUTED_ROWS, choose_experts, route_rows, takes_rows
from asyncengine.kernels.cuda.experts.sort import sort_pairs
from asyncengine.kernels.cuda.experts.stack import stack_experts
from asyncengine.kernels.cuda.gpu import H200, INTERPRETER
from asyncengine.kernels.cuda.linear.formats.base import as_tensor
from asyncengine.kernels.cuda.linear.grouped import CodedRows
from asyncengine.kernels.cuda.linear.handle import CudaLinear, pack
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.experts import choose_experts as choose_plainly
from asyncengine.kernels.float8 import Quantized, pack_float8, quantize, unpack_float8
from asyncengine.kernels.grouped import make_grouped, round_to_groups, unpack
from asyncengine.kernels.ops import Activation, Norm, Routing, RoutingRule
from asyncengine.kernels.weight import INT4, INT8, PackedWeight, dense
from asyncengine.models.weights.mxfp4 import pack_mxfp4

HIDDEN, INNER = 72, 40


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- routing ----

RULES = {
    "softmax": (RoutingRule(3), 11),
    "renormalised": (RoutingRule(4, sums_to_one=True), 16),
    "one": (RoutingRule(1), 5),
    "factors": (RoutingRule(3, sums_to_one=True, factors=random(7, seed=3)), 7),
    "sigmoid": (RoutingRule(3, "sigmoid", sums_to_one=True, scale=2.5, correction=random(12, seed=1)), 12),
    "groups": (RoutingRule(4, "sigmoid", True, 1.5, random(18, seed=2) / 4, groups=6, kept_groups=3), 18),
    "all": (RoutingRule(6, "sigmoid", groups=3, kept_groups=2), 9),
}


def on_device(rule: RoutingRule, device: torch.device) -> RoutingRule:
    tensors = {"correction": rule.correction, "factors": rule.factors}
    return rule._replace(**{name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()})


@pytest.mark.parametrize("name", RULES)
def test_routing_is_that_of_plain_operations(device: torch.device, name: str) -> None:
    rule, experts = RULES[name]
    rule = on_device(rule, device)
    logits = random(40, experts + 3, seed=3).to(device)[:, :experts]
    got, expected = choose_experts(logits, rule), choose_plainly(logits, rule)
    places = got.ids.long().argsort(1), expected.ids.argsort(1)
    ids, weights = (
        [tensor.gather(1, at) for tensor, at in zip(pair, places, strict=True)]
        for pair in ((got.ids.long(), expected.ids), (got.weights, expected.weights))
    )
    assert torch.equal(*ids)
    torch.testing.assert_close(*weights)
    assert len(ids[0].unique(dim=0)) > 1


@pytest.mark.parametrize("choose", [choose_experts, choose_plainly])
@pytest.mark.parametrize("shared", ["plain", "gated"])
@pytest.mark.parametrize("name", RULES)
def test_a_shared_expert_is_the_last_one_of_each_row(
    device: torch.device, name: str, shared: str, choose: Callable[[Tensor, RoutingRule], Routing]
) -> None:
    """The others and their weights are those of the rule without it, whatever its own logit is."""
    rule, experts = RULES[name]
    rule, gates = on_device(rule, device), int(shared == "gated")
    logits = random(40, experts + gates + 2, seed=4).to(device)[:, : experts + gates]
    if gates:
        logits[:20, -1] *= 20
    alone, got = choose(logits[:, :experts], rule), choose(logits, rule._replace(shared=shared))
    assert got.ids.shape == got.weights.shape == (40, rule.top_k + 1)
    assert got.ids.is_contiguous()
    assert got.weights.is_contiguous()
    assert torch.equal(got.ids[:, :-1], alone.ids)
    torch.testing.assert_close(got.weights[:, :-1], alone.weights, rtol=1e-6, atol=0)
    assert (got.ids[:, -1] == experts).all()
    expected = 1 / (1 + (-logits[:, -1].double()).exp()) if gates else torch.ones(40, dtype=torch.float64)
    torch.testing.assert_close(got.weights[:, -1].double().cpu(), expected.cpu(), rtol=1e-6, atol=1e-9)


def test_rows_that_are_no_numbers_are_routed_to_experts_that_there_are(device: torch.device) -> None:
    """A row has different experts, and weights that are no numbers, which sampling sees."""
    logits = random(4, 12, seed=1).to(device)
    logits[0], logits[1, 3:] = float("nan"), float("nan")
    rules = RoutingRule(5), RoutingRule(5, "sigmoid", groups=4, kept_groups=2), RoutingRule(4, shared="gated")
    for rule in rules:
        weights, ids = choose_experts(logits, rule)
        assert ids.min() >= 0
        assert ids.max() < 12
        assert all(len(row.unique()) == 5 for row in ids)
        assert weights[0].isnan().all()
        assert not weights[3].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_one_launch_norms_and_routes_few_rows(device: torch.device, name: str, norms: bool, dtype: torch.dtype) -> None:
    """A hidden size of several steps, the last of them in part; the launch leaves its counters as they were."""
    rule, experts = RULES[name]
    rule, hidden = on_device(rule._replace(shared="gated" if norms else "none"), device), 604
    weight = random(experts + norms, hidden, seed=1, dtype=dtype).to(device) * hidden**-0.5
    bias = random(experts + norms, seed=2, dtype=dtype).to(device) / 4 if dtype == torch.bfloat16 else None
    norm = Norm(1 + random(hidden, seed=4, dtype=dtype).to(device) / 4, None, 1e-5) if norms else None
    router = pack([dense(weight)], [bias])
    for rows in (1, ROUTED_ROWS):
        x = random(rows, hidden + 4, seed=rows, dtype=dtype).to(device)[:, :hidden]
        assert takes_rows(rows, router, norm)
        arrivals = torch.zeros(4, dtype=torch.int32, device=device)
        normed, got = route_rows(
            x, norm, router, rule, arrivals, H200 if rows > 1 else replace(H200, multiprocessors=4)
        )
        wanted = x if norm is None else norm_rows(x, norm)
        torch.testing.assert_close(normed, wanted, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        logits = normed.float() @ weight.float().T + (0 if bias is None else bias.float())
        expected = choose_plainly(logits, rule)
        assert torch.equal(got.ids.long().sort(1)[0], expected.ids.sort(1)[0])
        torch.testing.assert_close(got.weights.sort(1)[0], expected.weights.sort(1)[0], rtol=1e-4, atol=1e-5)
        assert not arrivals.any()


def test_rows_that_one_launch_does_not_route() -> None:
    weight, gains = random(4, 8, seed=1), torch.ones(8)
    router, norm, counters = pack([dense(weight)], [None]), Norm(gains, gains, 1e-5), torch.zeros(8, dtype=torch.int32)
    assert takes_rows(ROUTED_ROWS, router, None)
    assert not takes_rows(ROUTED_ROWS + 1, router, None)
    assert not takes_rows(1, router, norm)
    with pytest.raises(ValueError, match="do not fit"):
        route_rows(random(1, 7, seed=1), None, router, RoutingRule(2), counters, H200)
    with pytest.raises(ValueError, match="do not fit"):
        route_rows(random(2, 8, seed=1), None, router, RoutingRule(2), counters[:1], H200)
    with pytest.raises(ValueError, match="4 experts"):
        route_rows(random(1, 8, seed=1), None, router, RoutingRule(5), counters, H200)


# ---- sorting ----


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "tile"), [(1, 5, 2, 16), (50, 7, 3, 16), (700, 3, 3, 32), (20, 257, 9, 16)]
)
def test_pairs_are_sorted_by_expert(device: torch.device, rows: int, experts: int, top_k: int, tile: int) -> None:
    ids = random(rows, experts, seed=1).topk(top_k, 1)[1].to(torch.int32).to(device)
    order, tiles, limit = sort_pairs(ids, experts, tile)
    flat = ids.flatten().cpu()
    assert torch.equal(order.cpu().long(), flat.sort(stable=True)[1])
    total = int(tiles[-1])
    assert total == sum(-(-int(count) // tile) for count in flat.bincount()) <= limit
    owner, first, count = tiles[:-1].view(3, limit)[:, :total].tolist()
    assert [e for e, n in zip(owner, count, strict=True) for _ in range(n)] == flat.sort()[0].tolist()
    assert [f + n for f, n in zip(first, count, strict=True)] == [*first[1:], rows * top_k]


# ---- products ----


def weights_of(packed: PackedWeight) -> Tensor:
    if packed.format == "dense":
        return packed.tensors["weight"]
    if packed.format == "int4":
        return unpack(packed)
    return unpack_float8([packed])[0].dequantize()


def plainly(
    x: Tensor, routing: Routing, up: Tensor, down: Tensor, activation: str, biases: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The results in float64, inner rows rounded to x's dtype."""
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for row in range(len(x)):
        for weight, e in zip(routing.weights[row].tolist(), routing.ids[row].tolist(), strict=True):
            inner = up[e].double() @ x[row].double() + (biases[0][e].double() if biases else 0)
            if activation.endswith("_mul"):
                gate, wide = inner.chunk(2)
                inner = torch.nn.functional.silu(gate) * wide
                if activation == "gelu_tanh_mul":
                    inner = torch.nn.functional.gelu(gate, approximate="tanh") * wide
                elif activation == "clamped_silu_mul":
                    gate = gate.clamp(max=7)
                    inner = gate * torch.sigmoid(1.702 * gate) * (wide.clamp(-7, 7) + 1)
            else:
                inner = torch.nn.functional.gelu(inner)
            inner = inner.to(x.dtype).double()
            out[row] += weight * (down[e].double() @ inner + (biases[1][e].double() if biases else 0))
    return out


def spread(rows: int, experts: int, top_k: int, seed: int = 5) -> Routing:
    return choose_plainly(random(rows, experts, seed=seed), RoutingRule(top_k, sums_to_one=True))


def to_one(rows: int, experts: int, top_k: int) -> Routing:
    """Every row goes to the last experts alone."""
    ids = torch.arange(experts - top_k, experts, dtype=torch.int32).expand(rows, top_k).contiguous()
    return Routing(torch.rand(rows, top_k, generator=torch.Generator().manual_seed(1)), ids)


CASES = {
    "one-row": (spread(1, 6, 3), "silu_mul", torch.float32, False),
    "one-row-bf16": (spread(1, 5, 2), "silu_mul", torch.bfloat16, True),
    "two-rows": (spread(2, 4, 2), "gelu_tanh_mul", torch.float32, True),
    "three-rows": (spread(3, 9, 2), "silu_mul", torch.bfloat16, False),
    "many-rows": (spread(45, 6, 2), "silu_mul", torch.float32, True),
    "one-expert": (to_one(37, 5, 1), "gelu", torch.bfloat16, True),
    "two-experts": (to_one(40, 7, 2), "silu_mul", torch.float32, False),
}


def in_mxfp4(weight: Tensor) -> PackedWeight:
    """Random codes with scales that make weights of them like others; the columns are those of the weight."""
    draw = torch.Generator().manual_seed(int(weight.float().abs().sum() * 1000))
    shape = len(weight), weight.shape[1] // 32
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=draw)
    return pack_mxfp4(blocks, torch.randint(119, 123, shape, dtype=torch.uint8, generator=draw))


FORMS: dict[str, tuple[Callable[[Tensor], PackedWeight], int, int]] = {
    "dense": (dense, 72, 40),
    "float8": (pack_float8, 72, 40),
    "mxfp4": (in_mxfp4, 96, 160),
    "int4": (partial(round_to_groups, INT4, size=32, scale_dtype=torch.float16), 96, 160),
    "int4 in whole rows": (partial(round_to_groups, INT4), 96, 160),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_mixtures_are_those_of_plain_operations(device: torch.device, case: str, name: str) -> None:
    (weights, ids), kind, dtype, biased = CASES[case]
    activation: Activation = kind  # type: ignore[assignment]
    form, hidden, inner = FORMS[name]
    experts, wide = int(ids.max()) + 2, inner * (2 if kind.endswith("_mul") else 1)
    up = [form(random(wide, hidden, seed=e, dtype=dtype) / 8) for e in range(experts)]
    down = [form(random(hidden, inner, seed=50 + e, dtype=dtype) / 6) for e in range(experts)]
    biases = random(experts, wide, seed=90, dtype=dtype), random(experts, hidden, seed=91, dtype=dtype)
    x = random(len(ids), hidden + 8, seed=92, dtype=dtype)[:, :hidden]
    coded = name not in ("dense", "float8")
    up_whole, down_whole = (
        torch.stack([weights_of(w).to(dtype) if coded else weights_of(w) for w in packed]) for packed in (up, down)
    )
    expected = plainly(x, Routing(weights, ids), up_whole, down_whole, kind, biases if biased else None)

    def moved(packed: PackedWeight) -> PackedWeight:
        tensors = {name: tensor.to(device) for name, tensor in packed.tensors.items()}
        return PackedWeight(packed.format, tensors, packed.out_features, packed.in_features)

    handle = stack_experts(
        [[moved(w)] for w in up], [moved(w) for w in down], activation,
        [[b.to(device)] for b in biases[0]] if biased else None,
        list(biases[1].to(device)) if biased else None,
    )  # fmt: skip
    assert all(isinstance(one.weight, CodedRows) == coded for one in (*handle.up, *handle.down))
    routing = Routing(weights.to(device), ids.to(device))
    before = random(len(ids), hidden, seed=93, dtype=dtype)
    for add in (False, True):  # by the kernels of the number of rows, and by those for any number
        out = before.to(device, copy=True)
        mix(x.to(device), routing, handle, out=out, add=add, gpu=INTERPRETER, invariant=add)
        wanted = expected + (before.double() if add else 0)
        tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
        assert (out.cpu().double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("most", [0, 600, 1200], ids=["by steps", "two and one", "all"])
@pytest.mark.parametrize("form", [lambda weight: weight, quantize], ids=["floats", "float8"])
def test_down_products_of_few_rows_load_some_experts_at_once(
    device: torch.device, form: Callable[[Tensor], Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts have 40 columns, for which a program loads 4 rows of 64."""
    monkeypatch.setattr(few_rows, "_MOST_TOGETHER", most)
    monkeypatch.setattr(few_rows, "_step", lambda inner: 64)
    x, down, bias = random(6, 40, seed=1), random(5 * HIDDEN, 40, seed=2), random(5 * HIDDEN, seed=3)
    packed = form(down)
    whole = packed.dequantize() if isinstance(packed, Quantized) else packed
    factors, ids = spread(2, 5, 3)
    each = torch.einsum("tkhi,tki->tkh", whole.view(5, HIDDEN, 40)[ids.long()].double(), x.view(2, 3, 40).double())
    each += bias.view(5, HIDDEN)[ids.long()].double()
    if isinstance(packed, Quantized):
        packed = Quantized(packed.values.to(device), packed.scale.to(device))
    else:
        packed = packed.to(device)
    handle = CudaLinear(packed, bias.to(device), len(down))
    out = torch.empty(2, HIDDEN, device=device)
    multiply_down(x.to(device), ids.to(device), factors.to(device), handle, out=out, add=False)
    torch.testing.assert_close(out.cpu().double(), (factors[..., None].double() * each).sum(1), rtol=1e-5, atol=1e-5)


def test_few_rows_read_no_codes_behind_the_last(device: torch.device) -> None:
    """Nine steps of K where eight are on the way at a time: the interpreter refuses to read beside a tensor."""
    inner, columns, ids = 9 * 1024, 8, torch.tensor([[1, 0]], dtype=torch.int32)
    weights = [in_mxfp4(torch.empty(columns, inner).fill_(seed)) for seed in (1, 2)]
    x = random(1, inner, seed=4)
    each = torch.stack([unpack(weight).double() @ x[0].double() for weight in weights])[ids[0].long()]
    out, total = torch.empty(2, columns, device=device), torch.empty(1, columns, device=device)
    rows = stack_codes(weights)
    coded = CudaLinear(CodedRows(rows.codes.to(device), rows.scales.to(device), inner, rows.fp4), None, 2 * columns)
    multiply_up(x.to(device), ids.to(device), coded, out=out, activation="none")
    torch.testing.assert_close(out.cpu().double(), each, rtol=1e-4, atol=1e-3)
    factors = torch.tensor([[0.25, 0.75]])
    pairs = x.expand(2, -1).contiguous().to(device)
    multiply_down(pairs, ids.to(device), factors.to(device), coded, out=total, add=False)
    torch.testing.assert_close(total.cpu().double(), factors.double() @ each, rtol=1e-4, atol=1e-3)


def test_codes_that_no_kernel_reads_are_unpacked() -> None:
    """Offsets, an order of columns, other tables and codes of 8 bits; and int4 if it is not to stay."""
    weight = round_to_groups(INT4, random(64, 96, seed=1), size=32)
    codes, scales = weight.tensors["codes"], weight.tensors["scales"]
    order, table = torch.arange(96, dtype=torch.int32), torch.linspace(-1, 1, 16)
    others = (
        make_grouped(INT4, codes, scales, scales), make_grouped(INT4, codes, scales, table=table),
        make_grouped(INT4, codes, scales, order=order), round_to_groups(INT8, random(64, 96, seed=1)),
    )  # fmt: skip
    for up, keeps in (*((other, True) for other in others), (weight, False)):
        handle = stack_experts([[up]] * 3, [weight] * 3, "gelu", keeps_codes=keeps)
        for one, packed in zip((*handle.up, *handle.down), (up, weight), strict=True):
            assert torch.equal(as_tensor(one.weight), unpack(packed).bfloat16().repeat(3, 1))


def test_powers_of_2_take_a_byte() -> None:
    """Scales that float32 has in full as powers of 2 are kept as exponents, and all others as they are."""
    exact = in_mxfp4(random(8, 64, seed=1))
    rows = stack_codes([exact, exact])
    assert rows.fp4
    assert rows.scales.dtype == torch.uint8
    assert torch.equal(torch.exp2(rows.scales.float() - 253), exact.tensors["scales"].repeat(2, 1))
    assert rows.nbytes == 16 * (64 + 4)  # a tile of codes, and two scales in a word of four bytes
    assert rows.group == 32
    for value in (2.0**-127, float("inf"), 0.75):
        scales = exact.tensors["scales"].clone()
        scales[3, 1] = value
        odd = make_grouped(INT4, exact.tensors["codes"], scales, table=exact.tensors["table"])
        assert torch.equal(stack_codes([odd]).scales, scales)


@pytest.mark.parametrize("shared", ["none", "plain"])
def test_a_row_depends_neither_on_the_others_nor_on_their_number_if_it_must_not(
    device: torch.device, shared: Literal["none", "plain"]
) -> None:
    """The last expert computes every row, or those that choose it."""
    up, down = random(6, 2 * INNER, HIDDEN, seed=1).to(device), random(6, HIDDEN, INNER, seed=2).to(device)
    handle = stack_experts([list(map(dense, w.chunk(2))) for w in up], list(map(dense, down)), "silu_mul")
    x, logits = random(40, HIDDEN, seed=3).to(device), random(40, 6 - (shared == "plain"), seed=5)
    weights, ids = choose_plainly(logits, RoutingRule(2, sums_to_one=True, shared=shared))
    weights, ids = weights.to(device), ids.to(device)

    def run(first: int, last: int) -> Tensor:
        out = torch.empty(last - first, HIDDEN, device=device)
        part = Routing(weights[first:last], ids[first:last])
        mix(x[first:last], part, handle, out=out, add=False, gpu=INTERPRETER, invariant=True)
        return out

    whole = run(0, 40)
    for first, last in ((0, 1), (39, 40), (3, 25)):
        assert torch.equal(run(first, last), whole[first:last])


def test_weights_that_lie_one_behind_another_are_not_copied() -> None:
    up, down = torch.zeros(3, 2 * INNER, HIDDEN), torch.zeros(3, HIDDEN, INNER)
    handle = stack_experts([list(map(dense, w.chunk(2))) for w in up], list(map(dense, down)), "silu_mul")
    assert as_tensor(handle.up[0].weight).data_ptr() == up.data_ptr()
    assert handle.up[0].weight.shape == (6 * INNER, HIDDEN)
    apart = stack_experts([[dense(w)] for w in up], [dense(w.clone()) for w in down], "gelu")
    assert as_tensor(apart.up[0].weight).data_ptr() == up.data_ptr()
    assert as_tensor(apart.down[0].weight).data_ptr() != down.data_ptr()


def test_tiles_hold_the_rows_of_nearly_every_expert() -> None:
    """Qwen3-30B-A3B at 64 and 256 rows, a prompt, and the memory of a card."""
    heights = [tiles_for(rows * 8, 128, (16, 16), H200).rows for rows in (3, 64, 256, 512, 8192)]
    assert heights == [16, 16, 32, 64, 128]
    assert {tiles_for(rows * 8, 128, (16, 16), H200, invariant=True) for rows in (1, 8192)} == {
        tiles_for(8, 128, (16, 16), H200)
    }
    for bits in ((16, 16), (8, 16), (32, 32)):
        for pairs in (8, 512, 1 << 16):
            tile = tiles_for(pairs, 128, bits, H200)
            step = (tile.columns * bits[0] + tile.rows * bits[1]) * tile.inner // 8
            assert step * tile.stages <= H200.tile_bytes
    assert FEW_ROWS < 16
