"""The lanes of a step on the device: what ingest makes of their table, and who leaves and enters behind a layer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from asyncengine import _core
from asyncengine.kernels.cuda.rows.lanes import HostLanes, exchange, gather_results
from asyncengine.kernels.cuda.rows.rotary import rotary_store_kv
from asyncengine.kernels.cuda.sampling.features import allocate_features, follow
from asyncengine.kernels.cuda.step.ingest import StepSource, ingest, make_source
from asyncengine.kernels.cuda.step.tensors import DeviceStep, allocate_step
from asyncengine.kernels.ops import AttentionLayer, HeadNorms
from asyncengine.runner.steps.buckets import ANY_CONTEXT, Bucket, choose_buckets, token_buckets
from tests.kernels.lanes import Row, Table, read_mailbox, step_input

BLOCK, SLOTS, TOKENS, LANES, LAYERS = 16, 6, 12, 3, 4
NOBODY = (-1, 0)
PROMPT = Row(slot=0, context=0, tokens=[7, 8, 9], blocks=[4])
DECODE = Row(slot=2, context=17)
ENDS = Row(slot=5, context=30, lane=1)


def table_of(**entries: tuple[int, int]) -> Table:
    """Entries by s<stage>l<lane>."""
    table = [[NOBODY] * LANES for _ in range(LAYERS + 1)]
    for name, entry in entries.items():
        stage, lane = name[1:].split("l")
        table[int(stage)][int(lane)] = entry
    return table


def take_in(device: torch.device, words: Tensor, **how: int) -> tuple[StepSource, DeviceStep]:
    """A step with lanes, of which everything that ingest has to write was something else."""
    step = allocate_step(SLOTS, 8, 4, TOKENS, device, how.get("samples", 0), lanes=(LAYERS + 1, LANES))
    for name in ("input_ids", "positions", "slot_mapping", "token_slot", "row_query_len", "sample_slot", "lane_slots"):
        getattr(step, name).fill_(77)
    assert step.lane_positions is not None
    step.lane_positions.fill_(77)
    step.slots.last_token.copy_(torch.arange(SLOTS) + 100)
    step.slots.block_tables.copy_(torch.arange(SLOTS)[:, None] * 8 + torch.arange(8))
    inputs = torch.zeros(1, 512, dtype=torch.int32, device=device)
    inputs[0, : len(words)] = words.to(device)
    source = make_source(inputs, torch.zeros(1, 64, dtype=torch.int64, device=device), device, fetch=False)
    ingest(source, step, BLOCK, needs=how.get("needs", 0))
    return source, step


@pytest.mark.parametrize("samples", [0, 8], ids=["one sample a row", "several"])
def test_ingest_takes_the_table(device: torch.device, samples: int) -> None:
    table = table_of(s0l0=(3, 40), s0l2=(1, 9), s2l0=(4, 11), s4l1=(5, 30))
    _, step = take_in(device, step_input(9, [DECODE, PROMPT, ENDS], table), samples=samples)
    assert step.lane_slots is not None
    assert step.lane_positions is not None
    assert step.lane_slots.tolist() == [[slot for slot, _ in stage] for stage in table]
    assert step.lane_positions.tolist() == [[position for _, position in stage] for stage in table]
    unused, first = [0] * (TOKENS - LANES - 4), TOKENS - LANES
    assert step.input_ids.tolist() == [102, 7, 8, 9, *unused, 103, 0, 101]
    assert step.positions.tolist() == [17, 0, 1, 2, *unused, 40, 0, 9]
    assert step.token_slot.tolist() == [2, 0, 0, 0, *([-1] * (TOKENS - 4))]
    assert step.slot_mapping.tolist() == [17 * BLOCK + 1, 64, 65, 66, *([-1] * (TOKENS - 4))]
    assert step.row_slot.tolist() == [2, 0, 5, -1]
    assert step.row_query_len.tolist() == [1, 3, 0, 0]
    assert step.row_query_start.tolist() == [0, 1, first + 1, 0]
    assert step.sample_index.tolist()[:4] == [0, 3, first + 1, 0]
    assert step.sample_slot.tolist()[:4] == [2, 0, 5, -1]
    assert step.sample_position.tolist()[:4] == [18, 3, 31, 0]


@pytest.mark.parametrize("words", [torch.zeros(64, dtype=torch.int32), step_input(1, [DECODE], [])], ids=["0", "one"])
def test_a_step_without_a_table_has_empty_lanes(device: torch.device, words: Tensor) -> None:
    """A graph with lanes is captured with such a step."""
    _, step = take_in(device, words)
    assert step.lane_slots is not None
    assert (step.lane_slots == -1).all()
    assert (step.lane_positions == 0).all()
    assert (step.input_ids[-LANES:] == 0).all()


def test_tables_larger_than_the_step_are_whole(device: torch.device) -> None:
    stages, lanes = 50, 8
    step = allocate_step(SLOTS, 8, 4, 16, device, lanes=(stages, lanes))
    table = [[((s + lane) % SLOTS, s * lanes + lane) for lane in range(lanes)] for s in range(stages)]
    inputs = step_input(3, [DECODE], table).to(device)[None]
    source = make_source(inputs, torch.zeros(1, 64, dtype=torch.int64, device=device), device, fetch=False)
    ingest(source, step, BLOCK)
    assert step.lane_positions is not None
    assert step.lane_positions.flatten().tolist() == list(range(stages * lanes))
    assert source.header.tolist() == [3, 1 % len(inputs)]
    assert source.state[2:].tolist() == [2, 0]  # every program has arrived


def test_histories_go_on_with_the_token_that_a_lane_ends(device: torch.device) -> None:
    """The token that a lane ends is not the lane's input, which is of a row at the first stage."""
    needs = int(_core.Need.penalties)
    words = step_input(2, [DECODE, ENDS], table_of(s0l1=(3, 4), s4l1=(5, 30)))
    source, step = take_in(device, words, needs=needs)
    features = allocate_features(SLOTS, 16, 64, 200, device)
    step.slots.needs.fill_(needs)
    features.history_len[2], features.history_len[5] = 17, 30
    follow(source, step, features)
    assert features.history_len.tolist() == [0, 0, 18, 0, 0, 31]
    assert features.history[2, 17] == 102
    assert features.history[5, 30] == 105
    assert features.counts[5, 105] == 2


# ---- behind a layer ----


@dataclass(frozen=True, slots=True)
class Case:
    heads: tuple[int, int]
    dim: int
    norms: bool
    rotates: bool
    width: int
    norms_values: bool = False


CASES = [Case((4, 2), 16, False, True, 40), Case((5, 5), 12, False, False, 60), Case((6, 2), 128, True, True, 1100)]
CASES.append(Case((3, 3), 512, True, True, 40, norms_values=True))
DTYPES = [torch.float32, torch.bfloat16]


class Behind:
    """A layer's heads, results and residual with lanes of three rows: the one of lane 1 leaves and nobody enters."""

    number = 2
    leaving = ((1, 20), (4, 3), NOBODY)
    entering = (2, -1, 3)

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(dtype).to(device)

        queries, keys = case.heads
        all_heads = queries + 2 * keys
        self.case, self.dtype, self.step_number = case, dtype, (5 << 32) | 7
        self.heads = random(TOKENS, all_heads * case.dim)
        self.x, self.residual = random(TOKENS, queries * case.dim), random(TOKENS, case.width)
        norms = HeadNorms(random(case.dim), random(case.dim), 1e-6) if case.norms else None
        if norms is not None and case.norms_values:
            norms = norms._replace(v=random(case.dim))
        angles = torch.outer(torch.arange(64.0), torch.rand(case.dim // 2, generator=draw))
        table = torch.cat([angles.cos(), angles.sin()], 1).to(device) if case.rotates else None
        self.layer = AttentionLayer(queries, norms, table, 0.25, 0)
        words = case.dim if dtype == torch.float32 else case.dim // 2
        mailboxes = torch.zeros(SLOTS, all_heads, words, dtype=torch.int64, pin_memory=device.type == "cuda")
        results = random(SLOTS, queries * case.dim).cpu()
        header = torch.tensor([self.step_number, 0], device=device)
        self.lanes = HostLanes.allocate(
            mailboxes,
            results.pin_memory() if device.type == "cuda" else results,
            header, layers=LAYERS, lanes=LANES, width=case.width,
        )  # fmt: skip
        self.lanes.saved.copy_(random(SLOTS, case.width))
        self.step = allocate_step(SLOTS, 8, 4, TOKENS, device, lanes=(LAYERS + 1, LANES))
        assert self.step.lane_slots is not None
        assert self.step.lane_positions is not None
        for lane, (slot, position) in enumerate(self.leaving):
            self.step.lane_slots[self.number, lane], self.step.lane_positions[self.number, lane] = slot, position
            self.step.lane_slots[self.number + 1, lane] = self.entering[lane]

    def run(self, *, pdl: bool = False) -> None:
        gather_results(self.lanes, self.step, pdl=pdl)
        exchange(self.heads, self.x, self.residual, self.layer, self.number, self.lanes, self.step, pdl=pdl)
        if self.heads.is_cuda:
            torch.cuda.synchronize()

    def rotated(self, token: int, position: int) -> Tensor:
        """The heads [heads, D] of a token as they are where attention has its own kernel for this."""
        heads = self.heads[token].view(1, -1, self.case.dim).clone()
        queries, keys = self.case.heads
        if self.layer.cos_sin is None:
            return heads[0].cpu()
        shape = (1, keys, 16, self.case.dim)
        k, v = (torch.zeros(shape, dtype=self.dtype, device=heads.device) for _ in range(2))
        q_norm, k_norm, eps, v_norm = self.layer.norms or (None, None, 0.0, None)
        at = torch.tensor([position], dtype=torch.int32, device=heads.device)
        place = torch.zeros(1, dtype=torch.int64, device=heads.device)
        rotary_store_kv(heads, queries, q_norm, k_norm, eps, self.layer.cos_sin, at, place, k, v, v_norm=v_norm)
        return torch.cat([heads[0, :queries], k[0, :, 0], v[0, :, 0]]).cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_leave_with_their_heads_and_residual(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    behind = Behind(case, dtype, device)
    heads, residual, saved = (t.clone() for t in (behind.heads, behind.residual, behind.lanes.saved))
    behind.run()
    left = {}
    for lane, (slot, position) in enumerate(behind.leaving):
        if slot >= 0:
            token = TOKENS - LANES + lane
            left[slot] = read_mailbox(behind.lanes.mailboxes[slot], dtype, behind.step_number & 0xFFFFFFFF)
            assert torch.equal(left[slot], behind.rotated(token, position))
            assert torch.equal(behind.lanes.saved[slot], residual[token])
    others = [slot for slot in range(SLOTS) if slot not in left]
    assert (behind.lanes.mailboxes[others] == 0).all()
    assert torch.equal(behind.lanes.saved[others], saved[others])
    assert torch.equal(behind.heads, heads)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_what_leaves_is_what_the_reference_rotates(dtype: torch.dtype, device: torch.device) -> None:
    """The rows are compared with the reference, and not only with another kernel of ours."""
    behind = Behind(CASES[2], dtype, device)
    behind.run()
    (slot, position), token = behind.leaving[0], TOKENS - LANES
    heads = behind.heads[token : token + 1].cpu().view(1, -1, behind.case.dim).float()
    queries, keys = behind.case.heads
    norms, table = behind.layer.norms, behind.layer.cos_sin
    assert norms is not None
    assert table is not None
    expected = []
    for part, gain in ((heads[:, :queries], norms.q), (heads[:, queries : queries + keys], norms.k)):
        normed = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + norms.eps) * gain.cpu().float()
        low, high = normed.to(dtype).float().chunk(2, -1)
        cosine, sine = table[position].cpu().chunk(2)
        expected.append(torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1))
    expected.append(heads[:, queries + keys :])
    got = read_mailbox(behind.lanes.mailboxes[slot], dtype, behind.step_number & 0xFFFFFFFF).float()
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, torch.cat(expected, 1)[0], rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_enter_with_their_result_and_residual(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    behind = Behind(case, dtype, device)
    x, residual, saved = (t.clone() for t in (behind.x, behind.residual, behind.lanes.saved))
    behind.run()
    for lane, slot in enumerate(behind.entering):
        if slot >= 0:
            token = TOKENS - LANES + lane
            x[token], residual[token] = behind.lanes.results[slot].to(device), saved[slot]
    assert torch.equal(behind.x, x)  # of others, and of lanes that nobody enters, what was there
    assert torch.equal(behind.residual, residual)


# ---- buckets ----


def test_buckets_have_a_second_version_with_lanes() -> None:
    def choose(lanes: int) -> list[Bucket]:
        return choose_buckets(16, 64, 1024, lambda rows: 100 if rows < 8 else 0, lambda tokens: 50, lanes)

    plain, both = choose(0), choose(3)
    assert [b for b in both if not b.lanes] == plain
    with_lanes = [b for b in both if b.lanes]
    assert with_lanes == [b._replace(lanes=3) for b in plain if b.max_tokens > 3]
    assert with_lanes[-1] == Bucket(16, 64, False, ANY_CONTEXT, 3)
    assert [b.max_tokens for b in both] == sorted(b.max_tokens for b in both)
    assert token_buckets(both) == token_buckets(plain)
    assert any(b.lanes and b.single_token_rows and b.max_context < ANY_CONTEXT for b in both)
