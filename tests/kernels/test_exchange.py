"""Exchange between GPUs in Triton's interpreter: one rank after the other, with what the others would have sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncengine.kernels.cuda.comm import exchange as comm
from asyncengine.kernels.cuda.comm import peers, sums
from asyncengine.kernels.cuda.comm.exchange import (
    Exchange,
    allocate,
    begin_together,
    connect,
    connect_alone,
    end_together,
)
from asyncengine.kernels.cuda.comm.peers import FEW, GATHER, MANY
from asyncengine.kernels.cuda.comm.sums import CHUNK, MAX_CHUNKS
from asyncengine.kernels.cuda.linear.formats.registry import FORMATS
from asyncengine.kernels.cuda.linear.plan import CUBLAS, Plan
from asyncengine.kernels.cuda.linear.residual import Residual
from asyncengine.kernels.cuda.rows.norms import norm_rows
from asyncengine.kernels.cuda.sampling.filters import LAST_INDEX
from asyncengine.kernels.cuda.sampling.sample import Ranks
from asyncengine.kernels.cuda.step.tensors import Slots, allocate_step
from asyncengine.kernels.ops import Norm
from asyncengine.kernels.weight import DENSE
from tests.kernels.interpreter import repair_interpreter

CPU = torch.device("cpu")
WIDTH = 48


@pytest.fixture(autouse=True)
def interpreter() -> None:
    repair_interpreter()


def made(ranks: int, rows: int = 4, dtype: torch.dtype = torch.bfloat16, logits: int = 0) -> list[Exchange]:
    exchanges = [allocate(rank, ranks, rows, WIDTH, dtype, CPU, logits=logits, pdl=False) for rank in range(ranks)]
    connect(exchanges)
    begin_together(exchanges)
    return exchanges


def let_all_send(exchanges: list[Exchange], products: list[Tensor]) -> None:
    """Send the parts of all ranks before one waits: their kernels run, and their numbers of calls are put back."""
    kept = [exchange.calls.clone() for exchange in exchanges]
    for exchange in exchanges:
        exchange.together.zero_()
    for exchange, product in zip(exchanges, products, strict=True):
        exchange.reduce(product.clone())
    for exchange, calls in zip(exchanges, kept, strict=True):
        exchange.calls.copy_(calls)
        exchange.together.fill_(1)


def norms(dtype: torch.dtype) -> list[Norm | None]:
    gain, shift = torch.linspace(0.5, 2, WIDTH), torch.linspace(-1, 1, WIDTH)
    return [None, Norm(gain, None, 1e-5), Norm(gain.to(dtype), shift.to(dtype), 1e-5), Norm(gain.to(dtype), None, 1.0)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("packets", [True, False], ids=["packets", "flags"])
@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, torch.bfloat16), (3, torch.bfloat16), (2, torch.float16), (2, torch.float32)]
)
def test_sums_are_those_of_torch_in_the_order_of_the_ranks(
    ranks: int, dtype: torch.dtype, packets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of different sizes follow each other, onto a residual and not, and through every kind of norm."""
    monkeypatch.setattr(comm, "FEW_ROWS", 256 if packets else 0)
    exchanges = made(ranks, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for rows, norm in zip((1, 4, 2, 4), norms(dtype), strict=True):
        products = [torch.randn(rows, WIDTH, generator=generator).to(dtype) for _ in range(ranks)]
        residual = torch.randn(rows, 2 * WIDTH, generator=generator).to(dtype)[:, :WIDTH]
        total = products[0].float()
        for product in products[1:]:
            total = total + product.float()
        let_all_send(exchanges, products)
        for rank, (exchange, product) in enumerate(zip(exchanges, products, strict=True)):
            onto = residual.clone() if rank % 2 else None
            normed = exchange.reduce(product, onto=onto, norm=norm)
            wanted = (total if onto is None else total + residual.float()).to(dtype)
            assert torch.equal(product if onto is None else onto, wanted)
            if norm is None:
                assert normed is None
            else:
                assert normed is not None
                assert torch.equal(normed, norm_rows(wanted, norm))
    of_first_program = 0 if packets else FEW.value
    assert {int(exchange.calls[of_first_program]) for exchange in exchanges} == {4}


def test_programs_of_many_rows_send_the_next_while_they_add_up() -> None:
    """The first program has more rows than go before a flag."""
    rows = CHUNK * MANY.value + 1
    exchanges = made(2, rows)
    products = [torch.randn(rows, WIDTH).bfloat16() for _ in range(2)]
    wanted = (products[0].float() + products[1].float()).bfloat16()
    let_all_send(exchanges, products)
    for exchange, product in zip(exchanges, products, strict=True):
        exchange.reduce(product)
        assert torch.equal(product, wanted)
        assert exchange.flags[1 - exchange.rank, :2, 0].tolist() == [MAX_CHUNKS + 2, MAX_CHUNKS + 1]


def test_numbers_of_calls_wrap_around_and_leave_out_that_of_empty_packets() -> None:
    exchanges = made(2)
    for last, then in ((2**31 - 1, -(2**31)), (-1, 2)):
        for exchange in exchanges:
            exchange.calls.fill_(last)
        products = [torch.full((1, WIDTH), float(i + 1)).bfloat16() for i in range(2)]
        let_all_send(exchanges, products)
        exchanges[0].reduce(products[0])
        assert products[0].eq(3).all()
        assert int(exchanges[0].calls[0]) == then


@pytest.mark.parametrize("few_rows", [256, 0], ids=["packets", "flags"])
def test_a_rank_alone_waits_for_nobody_and_a_release_ends_a_wait(
    few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "FEW_ROWS", few_rows)
    for module in (peers, sums):  # a look takes the interpreter as long as a thousand take a GPU
        monkeypatch.setattr(module, "PATIENCE", 20)
    exchanges = made(2)
    for exchange in exchanges:
        connect_alone(exchange)
        exchange.together.zero_()
    product = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    exchanges[0].reduce(product)
    assert not exchanges[1].flags.any(), "nothing leaves a rank that is alone"
    assert not exchanges[1].packets.any()
    released = torch.ones(1, dtype=torch.int32)
    connect(exchanges, released=released.data_ptr())
    begin_together(exchanges)
    exchanges[0].reduce(product)  # the other never comes
    end_together(exchanges)
    exchanges[0].reduce(product)


@pytest.mark.parametrize("plan", [CUBLAS, Plan("tma", 64, 64, 4, 16)], ids=["a kernel of its own", "its end"])
def test_the_norm_behind_a_sum_is_part_of_the_sum(plan: Plan) -> None:
    """Whatever plan the next projection has, for weights that read plain rows. Rows of an index are normed apart."""
    x, norm = torch.randn(3, WIDTH).bfloat16(), Norm(torch.rand(WIDTH), None, 1e-5)
    normed = norm_rows(x + 1, norm)
    asked: list[Norm | None] = []

    def add(reader: Norm | None) -> Tensor | None:
        asked.append(reader)
        residual.x += 1
        return None if reader is None else normed

    residual = Residual(x)
    residual.put_off(add, norms=True)
    assert residual.read(norm, plan, FORMATS[DENSE]).x is normed
    assert residual.state == "plain"
    residual.put_off(add, norms=True)
    assert residual.read_by_kernel(norm) is normed
    residual.put_off(add, norms=True)
    last = residual.read_by_kernel(norm, torch.tensor([2]))
    assert torch.equal(last, norm_rows(x[2:], norm))
    assert asked == [norm, norm, None]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_logits_of_all_ranks_come_to_the_first(ranks: int) -> None:
    columns, generator = 1100, torch.Generator().manual_seed(0)
    exchanges = made(ranks, logits=3 * ranks * columns)
    for rows in (3, 1):
        parts = [torch.randn(rows, columns, generator=generator) for _ in range(ranks)]
        for exchange, part in reversed(list(zip(exchanges, parts, strict=True))):
            found = exchange.gather(part, columns)
        assert torch.equal(found, torch.cat(parts, 1))
        tiles = [torch.tensor([[LAST_INDEX.value - 7 - rank]] * rows) for rank in range(ranks)]
        for exchange, own in reversed(list(zip(exchanges, tiles, strict=True))):
            merged = exchange.gather(Ranks(own), columns)
        assert isinstance(merged, Ranks)
        firsts = [7 + rank * (columns + 1) for rank in range(ranks)]
        assert (LAST_INDEX.value - merged.tiles).tolist() == [firsts] * rows
    with pytest.raises(ValueError, match=r"\[4, 1100\] of each of . ranks do not fit into"):
        exchanges[0].gather(torch.zeros(4, columns), columns)


def slots(tokens: list[int]) -> Slots:
    own = allocate_step(len(tokens), 1, len(tokens), len(tokens), CPU).slots
    own.last_token.copy_(torch.tensor(tokens))
    own.finished.copy_(torch.tensor(tokens) % 2)
    return own


def test_the_tokens_of_the_first_rank_come_to_all() -> None:
    exchanges, own = made(3), [slots([5, 6, 7]), slots([0, 0, 0]), slots([1, 1, 1])]
    connect(exchanges, own)
    for exchange, its in zip(exchanges, own, strict=True):
        exchange.share(its)
    for its in own:
        assert its.last_token.tolist() == [5, 6, 7]
        assert its.finished.tolist() == [1, 0, 1]
    others = FEW.value + MANY.value + GATHER.value
    assert [exchange.calls.tolist() for exchange in exchanges] == [[0] * others + [1]] * 3


def test_a_product_that_does_not_fit_is_refused() -> None:
    exchange = made(2)[0]
    with pytest.raises(ValueError, match="does not fit into inboxes"):
        exchange.reduce(torch.zeros(4, 2 * WIDTH, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="does not fit into inboxes"):
        exchange.reduce(torch.zeros(2 * MANY.value, WIDTH, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="contiguous rows"):
        exchange.reduce(torch.zeros(4, 2 * WIDTH, dtype=torch.bfloat16)[:, :WIDTH])
    many = allocate(0, 2, 1 << 16, 2, torch.bfloat16, CPU, pdl=False)
    with pytest.raises(ValueError, match="a sum has at most 32768 rows, got 32769"):
        many.reduce(torch.zeros(32769, 2, dtype=torch.bfloat16))
