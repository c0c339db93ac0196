"""Exchange between GPUs in Triton's interpreter: one rank after the other, with what the others would have sent."""

from __future__ import annotations

import pytest
import torch

from asyncengine.kernels.cuda.comm.exchange import (
    BLOCKS,
    Exchange,
    allocate,
    begin_together,
    connect,
    connect_alone,
    end_together,
)
from asyncengine.kernels.cuda.step.tensors import Slots, allocate_step
from tests.kernels.interpreter import repair_interpreter

CPU = torch.device("cpu")
WIDTH = 48


@pytest.fixture(autouse=True)
def interpreter() -> None:
    repair_interpreter()


def made(ranks: int, rows: int = 4) -> list[Exchange]:
    return [allocate(rank, ranks, rows * WIDTH, torch.bfloat16, CPU, pdl=False) for rank in range(ranks)]


def let_all_send(exchanges: list[Exchange], products: list[torch.Tensor]) -> None:
    """Send the parts of all ranks before one waits: their kernels run, and their numbers of calls are put back."""
    kept = [exchange.calls.clone() for exchange in exchanges]
    for exchange in exchanges:
        exchange.together.zero_()
    for exchange, product in zip(exchanges, products, strict=True):
        exchange.reduce(product.clone())
    for exchange, calls in zip(exchanges, kept, strict=True):
        exchange.calls.copy_(calls)
        exchange.together.fill_(1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_torch_in_the_order_of_the_ranks(ranks: int) -> None:
    exchanges = made(ranks)
    connect(exchanges)
    begin_together(exchanges)
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 4, 2, 4):  # calls of different sizes follow each other
        products = [torch.randn(rows, WIDTH, generator=generator).bfloat16() for _ in range(ranks)]
        residual = torch.randn(rows, WIDTH, generator=generator).bfloat16()
        total = products[0].float()
        for product in products[1:]:
            total = total + product.float()
        let_all_send(exchanges, products)
        for rank, (exchange, product) in enumerate(zip(exchanges, products, strict=True)):
            onto = residual.clone() if rank % 2 else None
            exchange.reduce(product, onto=onto)
            wanted = total if onto is None else total + residual.float()
            assert torch.equal(product if onto is None else onto, wanted.bfloat16())
    assert {int(exchange.calls[0]) for exchange in exchanges} == {4}


def test_numbers_of_calls_wrap_around() -> None:
    exchanges = made(2)
    connect(exchanges)
    begin_together(exchanges)
    for exchange in exchanges:
        exchange.calls.fill_(2**31 - 1)
        exchange.flags.fill_(2**31 - 1)
    products = [torch.full((1, WIDTH), float(i + 1)).bfloat16() for i in range(2)]
    let_all_send(exchanges, products)
    exchanges[0].reduce(products[0])
    assert products[0].eq(3).all()
    assert int(exchanges[0].calls[0]) == -(2**31)


def test_a_rank_alone_waits_for_nobody_and_a_release_ends_a_wait() -> None:
    exchanges = made(2)
    for exchange in exchanges:
        connect_alone(exchange)
    product = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    exchanges[0].reduce(product)
    assert not exchanges[1].flags.any(), "nothing leaves a rank that is alone"
    released = torch.ones(1, dtype=torch.int32)
    connect(exchanges, released=released.data_ptr())
    begin_together(exchanges)
    exchanges[0].reduce(product)  # the other never comes
    end_together(exchanges)
    exchanges[0].reduce(product)


def slots(tokens: list[int]) -> Slots:
    own = allocate_step(len(tokens), 1, len(tokens), len(tokens), CPU).slots
    own.last_token.copy_(torch.tensor(tokens))
    own.finished.copy_(torch.tensor(tokens) % 2)
    return own


def test_the_tokens_of_the_first_rank_come_to_all() -> None:
    exchanges, own = made(3), [slots([5, 6, 7]), slots([0, 0, 0]), slots([1, 1, 1])]
    connect(exchanges, own)
    begin_together(exchanges)
    for exchange, its in zip(exchanges, own, strict=True):
        exchange.share(its)
    for its in own:
        assert its.last_token.tolist() == [5, 6, 7]
        assert its.finished.tolist() == [1, 0, 1]
    assert [int(exchange.calls[BLOCKS]) for exchange in exchanges] == [1, 1, 1]


def test_a_product_that_does_not_fit_is_refused() -> None:
    exchange = made(2)[0]
    connect_alone(exchange)
    with pytest.raises(ValueError, match="does not fit into inboxes"):
        exchange.reduce(torch.zeros(BLOCKS * 4096 + 1, 1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="contiguous rows"):
        exchange.reduce(torch.zeros(4, 2 * WIDTH, dtype=torch.bfloat16)[:, :WIDTH])
