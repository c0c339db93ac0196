"""Edits of logits and log probabilities on the device: against a plain reference, over several steps of a slot."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncengine._core import STEP_INPUT_LAYOUT, EntryKind, Need, RecordKind
from asyncengine.kernels.cuda.sampling import edits, features, logprobs
from asyncengine.kernels.cuda.sampling.edits import edit, withhold
from asyncengine.kernels.cuda.sampling.features import SlotFeatures, allocate_features, follow
from asyncengine.kernels.cuda.sampling.logprobs import store_logprobs
from asyncengine.kernels.cuda.sampling.sample import sample
from asyncengine.kernels.cuda.step.ingest import StepSource
from asyncengine.kernels.cuda.step.tensors import allocate_step
from tests.kernels.poison import poison_new_memory

VOCAB, LONGEST, SLOTS, HEADS, REGION = 150, 96, 6, 4, 60
HEAD_WORDS, NO_MASK = STEP_INPUT_LAYOUT["mask_head_words"], STEP_INPUT_LAYOUT["no_mask"]
NEEDS = int(Need.temperature | Need.filters | Need.penalties | Need.bias | Need.logprobs | Need.mask)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)
    for module in (edits, logprobs):
        monkeypatch.setattr(module, "_TILE", 64)
    for module in (edits, features):
        monkeypatch.setattr(module, "_CHUNK", 16)


def bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def bitmap(tokens: list[int]) -> list[int]:
    words = [0] * -(-VOCAB // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return [word - (1 << 32) if word >> 31 else word for word in words]


class Sequence:
    """Settings of one slot, its tokens so far, and the logits that it must then have."""

    def __init__(self, draw: random.Random) -> None:
        self.prompt = [draw.randrange(VOCAB // 4) for _ in range(draw.randrange(1, 40))]
        self.output: list[int] = [draw.randrange(VOCAB // 4) for _ in range(draw.choice([0, 0, 9]))]
        some = [draw.randrange(VOCAB) for _ in range(20)]
        self.penalties = draw.choice([(0.0, 0.0, 1.0), (0.5, 0.0, 1.0), (-0.7, 0.3, 1.0), (1.0, 0.2, 1.7)])
        self.bias = {token: draw.uniform(-3, 3) for token in some[: draw.choice([0, 3, 20])]}
        self.ngram = draw.choice([0, 1, 2, 3])
        tail = (self.prompt + self.output)[-2:]
        self.banned = draw.choice([[], [[some[3]], [*tail, some[4]], [*tail[::-1], 7, some[5]]]])
        self.min_tokens = draw.choice([0, 2, 11])
        self.allowed = draw.choice([[], sorted({*some, 1, 2, 140})])
        self.top, self.named = draw.choice([0, 1, 5, 20]), some[: draw.choice([0, 2])]
        self.processed, self.heat = draw.random() < 0.5, draw.choice([0.0, 0.7])
        self.mask = draw.choice([[], sorted({*some[:9], 3, 140})])
        self.needs = int(Need.penalties | Need.bias | Need.logprobs) | (int(Need.mask) if self.mask else 0)

    def entries(self) -> list[int]:
        layout = STEP_INPUT_LAYOUT
        parameters = [0] * layout["parameter_words"]
        given = dict(zip(("presence", "frequency", "repetition"), map(bits, self.penalties), strict=True))
        named = {f"{name}_penalty": value for name, value in given.items()} | {
            "prompt_len": len(self.prompt), "min_tokens": self.min_tokens, "no_repeat_ngram": self.ngram,
            "top_logprobs": self.top, "flags": layout["parameter.processed_logprobs"] if self.processed else 0,
        }  # fmt: skip
        for name, value in named.items():
            parameters[layout[f"parameter.{name}"]] = value
        chain = [
            (EntryKind.token_history, self.prompt + self.output),
            (EntryKind.parameters, parameters),
            (EntryKind.bias, [word for token, value in self.bias.items() for word in (token, bits(value))]),
            (EntryKind.banned_words, [x for word in self.banned for x in (len(word), *word)]),
            (EntryKind.end_tokens, [5, 6, VOCAB + 3]),
            (EntryKind.allowed_tokens, bitmap(self.allowed) if self.allowed else []),
            (EntryKind.named_tokens, self.named),
        ]
        return [word for kind, payload in chain for word in (int(kind) << 24 | len(payload), *payload)]

    def edited(self, logits: Tensor) -> Tensor:
        x, ids = logits.double().clone(), self.prompt + self.output
        presence, frequency, repetition = self.penalties
        for token in set(ids):
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        for token in set(self.output):
            x[token] -= frequency * self.output.count(token) + presence
        for token, value in self.bias.items():
            x[token] += value
        n = self.ngram
        for i in range(len(ids) - n + 1 if n else 0):
            if ids[i : i + n - 1] == ids[len(ids) - n + 1 :]:
                x[ids[i + n - 1]] = -math.inf
        for word in self.banned:
            if len(word) == 1 or ids[-len(word) + 1 :] == word[:-1]:
                x[word[-1]] = -math.inf
        if len(self.output) < self.min_tokens:
            x[[5, 6]] = -math.inf
        for allowed in filter(None, (self.allowed, self.mask)):
            x[[token for token in range(VOCAB) if token not in allowed]] = -math.inf
        return x

    def check_record(self, words: list[int], token: int, logits: Tensor) -> None:
        x = self.edited(logits) / (self.heat or 1.0) if self.processed else logits.double()
        wanted = x.log_softmax(0)
        count = 1 + 2 * (1 + self.top + len(self.named))
        assert words[0] == count | int(RecordKind.logprobs) << 24
        assert words[1] == 1 + int((x.float() > x[token].float()).sum())
        found = words[2 : 1 + count]
        tokens, values = found[::2], [struct.unpack("<f", struct.pack("<i", word))[0] for word in found[1::2]]
        assert tokens[0] == token
        assert tokens[1 + self.top :] == self.named
        assert values == pytest.approx(wanted[tokens].tolist(), abs=1e-4)
        assert values[1 : 1 + self.top] == pytest.approx(wanted.topk(self.top).values.tolist(), abs=1e-4)
        assert len(set(tokens[1 : 1 + self.top])) == self.top
        assert words[1 + count] == 0


class World:
    """Rows 0 to 3 are of slots 4, 2, 0 and 1; the last of them asks for nothing."""

    slots = (4, 2, 0, 1)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step = allocate_step(SLOTS, 1, HEADS, HEADS, device)
        self.features: SlotFeatures = allocate_features(SLOTS, 512, LONGEST, VOCAB, device)
        self.inputs = torch.zeros(1, 2048, dtype=torch.int32, device=device)
        self.outputs = torch.zeros(2, HEADS + HEADS * REGION, dtype=torch.int64, device=device)
        self.source = StepSource(self.inputs, None, self.outputs, torch.tensor([9, 0, 10, 0], device=device))
        self.board = torch.full((SLOTS, HEAD_WORDS + 32), -1, dtype=torch.int32, device=device)
        rows = torch.arange(HEADS)
        self.step.row_slot.copy_(torch.tensor(self.slots))
        self.step.sample_slot.copy_(torch.tensor(self.slots))
        self.step.row_query_start.copy_(rows)
        self.step.row_query_len.fill_(1)
        self.step.sample_records.copy_(torch.stack([rows * REGION, torch.full([HEADS], REGION)], 1))

    def fill(self, row: int, sequence: Sequence | None) -> None:
        slots, slot = self.step.slots, self.slots[row]
        slots.needs[slot] = sequence.needs if sequence else 0
        slots.temperature[slot] = sequence.heat if sequence else 0.0
        slots.seed[slot] = 3
        words = sequence.entries() if sequence else []
        self.step.row_entries[row] = torch.tensor([64 + 400 * row, len(words)])
        self.inputs[0, 64 + 400 * row :][: len(words)] = torch.tensor(words, dtype=torch.int32)

    def run(self, sequences: list[Sequence | None], logits: Tensor) -> list[int]:
        """The tokens; checks the edited logits and the records."""
        for row, one in enumerate(sequences):
            if one is None:
                continue
            ids = one.prompt + one.output
            self.step.input_ids[row], self.step.row_context_len[row] = ids[-1], len(ids) - 1
            self.step.sample_position[row] = len(ids)
            words = bitmap(one.mask)
            self.board[self.slots[row], HEAD_WORDS:][: len(words)] = torch.tensor(words, dtype=torch.int32)
            self.board[self.slots[row], 0] = 2 * len(ids)
        moved = logits.to(self.device, copy=True)
        follow(self.source, self.step, self.features)
        raw = edit(moved, self.board, self.step, self.features)
        sample(moved, self.step, self.source.header, self.outputs, needs=NEEDS)
        store_logprobs(moved, raw, self.source, self.step, self.features, HEADS)
        words = self.outputs[0].tolist()
        tokens = [struct.unpack("<i", struct.pack("<I", word & 0xFFFFFFFF))[0] for word in words]
        for row, one in enumerate(sequences):
            if one is None:
                assert torch.equal(moved[row].cpu(), logits[row])
                assert words[HEADS + row * REGION :][:REGION] == [0] * REGION
                continue
            wanted = one.edited(logits[row])
            assert torch.allclose(moved[row].cpu().double(), wanted, atol=1e-5)
            if one.heat == 0 and wanted.isfinite().any():
                assert tokens[row] == int(wanted.argmax())
            if wanted.isfinite().any():
                one.check_record(tokens[HEADS + row * REGION :], tokens[row], logits[row])
        self.step.row_entries[:, 1] = 0
        return tokens[:HEADS]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(30 if torch.cuda.is_available() else 6))
def test_slots_and_their_successors(device: torch.device, seed: int) -> None:
    """Each slot has a sequence of four steps, then another one."""
    draw, world = random.Random(seed), World(device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        sequences: list[Sequence | None] = [Sequence(draw), Sequence(draw), Sequence(draw), None]
        world.step.slots.finished.zero_()
        for row, one in enumerate(sequences):
            world.fill(row, one)
        for _ in range(4):
            tokens = world.run(sequences, torch.randn(HEADS, VOCAB, generator=generator) * 3)
            for one, token in zip(sequences, tokens, strict=True):
                if one is not None:
                    one.output.append(max(token, 0))
    counts = world.features.counts[list(World.slots[:3])].cpu()
    for row, one in enumerate(sequences[:3]):
        assert one is not None
        ids, prompt = one.prompt + one.output[:-1], set(one.prompt)
        assert counts[row].tolist() == [2 * one.output[:-1].count(t) + (t in prompt) for t in range(VOCAB)]
        assert world.features.history[World.slots[row]][: len(ids)].tolist() == ids


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_ends_the_row_whatever_is_banned(device: torch.device, bad: float) -> None:
    draw, world = random.Random(1), World(device)
    sequence = Sequence(draw)
    sequence.allowed, sequence.mask, sequence.top = [1, 2, 3], [], 1
    sequence.banned, sequence.bias, sequence.needs = [[77]], {}, int(Need.penalties | Need.bias)
    world.fill(0, sequence)
    logits = torch.zeros(HEADS, VOCAB)
    logits[0, 77] = bad
    world.step.sample_slot[1:] = -1
    world.step.row_slot[1:] = -1
    moved = logits.to(device)
    follow(world.source, world.step, world.features)
    edit(moved, world.board, world.step, world.features)
    sample(moved, world.step, world.source.header, world.outputs, needs=NEEDS)
    assert int(world.outputs[0, 0]) & 0xFFFFFFFF == 0xFFFFFFFF
    assert world.step.slots.finished[world.slots[0]] == 1


def test_a_record_without_room_is_left_out(device: torch.device) -> None:
    world = World(device)
    sequence: Any = Sequence(random.Random(2))
    sequence.top, sequence.named = 5, []
    world.fill(0, sequence)
    world.step.sample_records[0, 1] = 13
    world.step.sample_slot[1:] = -1
    moved = torch.randn(HEADS, VOCAB).to(device)
    follow(world.source, world.step, world.features)
    raw = edit(moved, world.board, world.step, world.features)
    sample(moved, world.step, world.source.header, world.outputs, needs=NEEDS)
    store_logprobs(moved, raw, world.source, world.step, world.features, HEADS)
    assert world.outputs[0, HEADS:].tolist() == [0] * (HEADS * REGION)


@pytest.mark.parametrize("room", [VOCAB + 1, VOCAB + 2, VOCAB])
def test_a_row_whose_mask_is_made_of_its_logits_gives_them(device: torch.device, room: int) -> None:
    world = World(device)
    sequence = Sequence(random.Random(3))
    sequence.needs, sequence.mask = int(Need.mask | Need.logits | Need.penalties | Need.bias), []
    world.fill(0, sequence)
    world.step.sample_slot[1:] = -1
    world.step.sample_records[0, 0], world.step.sample_records[0, 1] = 7, room
    world.step.sample_position[0] = len(sequence.prompt + sequence.output)
    logits = torch.randn(HEADS, VOCAB).to(device)
    wanted = sequence.edited(logits[0].cpu()).float()
    follow(world.source, world.step, world.features)
    edit(logits, world.board, world.step, world.features)
    sample(logits, world.step, world.source.header, world.outputs, needs=NEEDS)
    withhold(logits, world.source, world.step, world.features, HEADS)
    words = (world.outputs[0] & 0xFFFFFFFF).to(torch.int32).cpu()
    fits = room > VOCAB
    assert int(words[0]) == STEP_INPUT_LAYOUT["deferred" if fits else "not_finite"]
    if fits:
        region = words[HEADS + 7 :]
        assert int(region[0]) == int(RecordKind.logits) << 24 | VOCAB
        torch.testing.assert_close(region[1 : 1 + VOCAB].view(torch.float32), wanted)
        assert room == VOCAB + 1 or int(region[1 + VOCAB]) == 0
    assert world.step.slots.finished[world.slots[0]]


@pytest.mark.parametrize(("head", "waits"), [(-1, True), (2 * 4, True), (2 * 5, False), (2 * 5 + 1, False)])
def test_a_row_waits_for_the_mask_of_its_position(device: torch.device, head: int, waits: bool) -> None:
    world = World(device)
    sequence = Sequence(random.Random(3))
    sequence.needs, sequence.heat = int(Need.mask), 0.0
    world.fill(0, sequence)
    world.step.sample_slot[1:] = -1
    world.step.sample_position[0] = 5
    world.board[world.slots[0], HEAD_WORDS] = 1 << 9
    world.board[world.slots[0], 0] = head
    moved = torch.zeros(HEADS, VOCAB)
    moved[0, 11] = 1.0
    moved = moved.to(device)
    follow(world.source, world.step, world.features)
    edit(moved, world.board, world.step, world.features)
    sample(moved, world.step, world.source.header, world.outputs, needs=NEEDS)
    withhold(moved, world.source, world.step, world.features, HEADS)
    token = int(world.outputs[0, 0]) & 0xFFFFFFFF
    assert token == (NO_MASK & 0xFFFFFFFF if waits else 11 if head % 2 else 9)
    assert world.step.slots.finished[world.slots[0]] == waits


def test_logits_of_another_vocabulary_are_refused(device: torch.device) -> None:
    world = World(device)
    with pytest.raises(ValueError, match=str(VOCAB)):
        edit(torch.zeros(HEADS, VOCAB + 1, device=device), world.board, world.step, world.features)
