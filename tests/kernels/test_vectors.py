"""Hidden states as records, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from asyncengine._core import Need, RecordKind
from asyncengine.kernels.cuda.sampling import vectors
from asyncengine.kernels.cuda.sampling.results import NO_TOKEN, NOT_FINITE
from asyncengine.kernels.cuda.sampling.vectors import add_up, store_vectors
from asyncengine.kernels.cuda.step.tensors import allocate_step

STEP, RING, RECORDS = 7, 1, 6
OLD = -5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 48, 1030])
def test_vectors_become_records(device: torch.device, width: int, dtype: torch.dtype) -> None:
    rows = 6
    step = allocate_step(rows, 1, rows, rows, device)
    step.sample_slot.copy_(torch.tensor([3, 0, 5, -1, 2, 1]))
    step.slots.needs.fill_(int(Need.vector))
    step.slots.needs[0] = int(Need.temperature)
    # Room left, no vector, room for it alone, no sample, a row that is not finite, too little room.
    region = width + 3
    words = [region, 0, width + 1, region, region, width]
    step.sample_records.copy_(torch.tensor([[i * region, count] for i, count in enumerate(words)]))
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    hidden[4, -1] = float("inf")
    out = torch.full((2, RECORDS + rows * region), OLD, dtype=torch.int64, device=device)
    header = torch.tensor([STEP, RING], device=device)
    store_vectors(hidden, step, header, out, RECORDS)

    def word(payload: int) -> int:
        return STEP << 32 | payload & 0xFFFFFFFF

    bits = hidden.float().view(torch.int32).tolist()
    expected = [OLD] * out.shape[1]
    for sample, head in ((0, NO_TOKEN), (2, NO_TOKEN), (4, NOT_FINITE), (5, NOT_FINITE)):
        expected[sample] = word(head.value)
    for sample in (0, 2):
        record = [width | RecordKind.vector << 24, *bits[sample]]
        begin = RECORDS + sample * region
        expected[begin : begin + 1 + width] = map(word, record)
    expected[RECORDS + width + 1] = word(0)
    assert out[RING].tolist() == expected
    assert (out[0] == OLD).all()
    assert step.sample_slot.tolist() == [-1, 0, -1, -1, -1, -1]
    assert step.slots.finished.tolist() == [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_over_the_parts_of_prompts(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 0 goes on, row 1 begins over what another sequence left, row 2 wants its own state, row 3 has ended."""
    monkeypatch.setattr(vectors, "_COLUMNS", 16)
    monkeypatch.setattr(vectors, "_TOKENS", 4)
    width, lengths, contexts, slots = 40, [5, 9, 1, 0], [3, 0, 6, 4], [2, 0, 3, 1]
    step = allocate_step(4, 1, 4, 16, device)
    starts = [0, 5, 14, 15]
    for name, values in (("slot", slots), ("query_start", starts), ("query_len", lengths), ("context_len", contexts)):
        getattr(step, f"row_{name}").copy_(torch.tensor(values))
    step.sample_slot.copy_(torch.tensor([2, 0, 3, -1]))
    step.sample_index.copy_(torch.tensor([4, 13, 14, 0]))
    step.sample_position.copy_(torch.tensor([8, 9, 7, 0]))
    step.slots.needs.fill_(int(Need.vector | Need.mean))
    step.slots.needs[3] = int(Need.vector)
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(16, width, generator=draw).to(device, dtype)
    sums = torch.randn(4, width, generator=draw).to(device)
    before = sums.clone()
    step.sample_records.copy_(torch.tensor([[i * (width + 2), width + 2] for i in range(4)]))
    out = torch.zeros(1, 4 + 4 * (width + 2), dtype=torch.int64, device=device)
    add_up(hidden, step, sums)
    store_vectors(hidden, step, torch.tensor([STEP, 0], device=device), out, 4, sums)
    words = (out[0, 4:] & 0xFFFFFFFF).to(torch.int32).view(4, width + 2)[:, 1:-1].contiguous().view(torch.float32)
    x = hidden.float()
    torch.testing.assert_close(words[0], (before[2] + x[:5].sum(0)) / 8)
    torch.testing.assert_close(words[1], x[5:14].sum(0) / 9)
    torch.testing.assert_close(words[2], x[14])
    assert torch.equal(sums[[1, 3]], before[[1, 3]])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    step = allocate_step(1, 1, 1, 1, device)
    header = torch.zeros(2, dtype=torch.int64, device=device)
    words = torch.zeros(1, 8, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="2 rows"):
        store_vectors(torch.zeros(2, 3, device=device), step, header, words, 1)
    with pytest.raises(ValueError, match="int64"):
        store_vectors(torch.zeros(1, 3, device=device), step, header, words.int(), 1)
