"""The most probable tokens of a row: exactly those of a sort, ties by the lower id, whatever the tiles and groups."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncengine._core import STEP_INPUT_LAYOUT, EntryKind, Need
from asyncengine.kernels.cuda.sampling import logprobs
from asyncengine.kernels.cuda.sampling.features import allocate_features
from asyncengine.kernels.cuda.sampling.logprobs import store_logprobs
from asyncengine.kernels.cuda.step.ingest import StepSource
from asyncengine.kernels.cuda.step.tensors import allocate_step
from tests.kernels.poison import poison_new_memory

ROWS, REGION = 3, 44
TOPS = (20, 3, 0)


def records(logits: Tensor, chosen: list[int], device: torch.device) -> Tensor:
    """int32 [ROWS, REGION]: what the kernel leaves of logits [ROWS, V], with so many most probable tokens as TOPS."""
    step = allocate_step(ROWS, 1, ROWS, ROWS, device)
    features = allocate_features(ROWS, 32, 8, logits.shape[1], device)
    for slot, top in enumerate(TOPS):
        features.words[slot, STEP_INPUT_LAYOUT["parameter.top_logprobs"]] = top
        features.places[slot, int(EntryKind.parameters), 1] = STEP_INPUT_LAYOUT["parameter_words"]
    step.slots.needs.fill_(int(Need.logprobs))
    step.slots.last_token.copy_(torch.tensor(chosen))
    step.sample_slot.copy_(torch.arange(ROWS))
    step.sample_records.copy_(torch.tensor([[row * REGION, REGION] for row in range(ROWS)]))
    outputs = torch.zeros(1, ROWS + ROWS * REGION, dtype=torch.int64, device=device)
    source = StepSource(
        torch.zeros(1, 8, dtype=torch.int32, device=device), None, outputs, torch.tensor([1, 0, 2, 0], device=device)
    )
    logits = logits.to(device)
    for _ in range(2):  # counters are left as they were found
        outputs.zero_()
        store_logprobs(logits, logits, source, step, features, ROWS)
    return (outputs[0, ROWS:].view(ROWS, REGION) & 0xFFFFFFFF).to(torch.int32).cpu()


def rows_with_ties(vocab: int) -> Tensor:
    """Rows with ties: of few values; of none but -inf and zeros of both signs; all the same."""
    draw = torch.Generator().manual_seed(vocab)
    few = torch.randint(0, 6, (vocab,), generator=draw).float() - 2.0
    zeros = torch.tensor([-math.inf, 0.0, -0.0])[torch.randint(0, 3, (vocab,), generator=draw)]
    zeros[-1] = 0.0
    return torch.stack([few, zeros, torch.full((vocab,), 1.5)])


def rows_of_neighbours(vocab: int) -> Tensor:
    """The greatest in one group, at the end of the row, and one in each group."""
    draw = torch.Generator().manual_seed(vocab)
    rows = torch.randn(ROWS, vocab, generator=draw)
    first = min(vocab // 3, vocab - 1)
    rows[0, first : first + 40] += 20
    rows[1, -9:] += 20
    rows[2, ::16] += 20
    return rows


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [rows_with_ties, rows_of_neighbours])
@pytest.mark.parametrize(("vocab", "tile"), [(5, 64), (19, 64), (150, 16), (150, 64), (1000, 256), (9001, 4096)])
def test_the_most_probable_tokens_are_those_of_a_sort(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, make, vocab: int, tile: int
) -> None:
    poison_new_memory(monkeypatch)
    monkeypatch.setattr(logprobs, "_TILE", tile)
    rows, chosen = make(vocab), [vocab - 1, 0, vocab // 2]
    for order in range(ROWS):  # each row with each count
        logits = rows.roll(order, 0)
        for row, words in enumerate(records(logits, chosen, device)):
            top, x = min(TOPS[row], vocab), logits[row].double()
            assert int(words[0]) & 0xFFFFFF == 1 + 2 * (1 + top)
            assert int(words[1]) == 1 + int((x > x[chosen[row]]).sum())
            tokens, values = words[2 : 4 + 2 * top : 2], words[3 : 4 + 2 * top : 2].view(torch.float32)
            wanted = torch.sort(x + 0.0, descending=True, stable=True).indices[:top]
            assert tokens.tolist() == [chosen[row], *wanted.tolist()]
            torch.testing.assert_close(values.double(), x.log_softmax(0)[tokens.long()], atol=1e-5, rtol=1e-5)
