"""Attention over latents in both forms at once: the operation of a GPU against that of the CPU."""

from __future__ import annotations

import pytest
import torch

from asyncengine import _core
from asyncengine.kernels.cpu.reference import ReferenceOps
from asyncengine.kernels.cuda.attention import expanded
from asyncengine.kernels.cuda.attention.context import ContextPlan, find_expanded_rows
from asyncengine.kernels.cuda.attention.expanded import ExpandedPlan, choose_expanded, expanded_attention
from asyncengine.kernels.cuda.attention.latent import LatentPlan
from asyncengine.kernels.cuda.attention.latent_run import LatentPlans, attend, choose_plans
from asyncengine.kernels.cuda.gpu import A100, H200, L40S
from asyncengine.kernels.cuda.step.tensors import allocate_step
from asyncengine.kernels.float8 import FLOAT8
from asyncengine.kernels.float8_cache import with_inverses
from asyncengine.kernels.latent import LatentLayer
from asyncengine.kernels.ops import LayerLatentCache
from asyncengine.models.rotary import RopeConfig, rotary_table
from tests.kernels.test_latent import random

BLOCK_SIZE, BLOCKS = 4, 12
ROWS = ((5, 1), (7, 1), (0, 1), (0, 7), (9, 20), (0, 37))
"""Tokens before each row, and tokens of the row: decodes, a prompt of one token, prompts, and a later chunk."""
LATER = ((5, 1), (9, 20), (0, 7), (21, 6), (3, 2), (40, 8), (0, 1), (33, 4))
"""Several later chunks, one of them too short to be expanded where 4 tokens are the least."""
HEADS, RANK, ROPE = 3, 24, 8


class Both:
    """A step on the CPU and on the device, over caches of the same numbers."""

    def __init__(
        self, sizes: tuple[int, int], device: torch.device, dtype: torch.dtype, *, float8: bool,
        steps: tuple[tuple[int, int], ...] = ROWS,
    ) -> None:  # fmt: skip
        key_dim, value_dim = sizes
        self.of_rows = steps
        self.count = sum(length for _, length in steps)
        host = torch.device("cpu")
        table = torch.randperm(len(steps) * BLOCKS, generator=torch.Generator().manual_seed(1)).view(-1, BLOCKS)
        up = random(HEADS, key_dim + value_dim, RANK, seed=2, device=host, dtype=dtype) / 4
        latents = random(table.numel(), BLOCK_SIZE, RANK + ROPE, seed=3, device=host, dtype=dtype)
        scales = with_inverses(torch.tensor([[2.0**-6], [2.0**-5]])) if float8 else None
        self.host_cache = LayerLatentCache((32 * latents).to(FLOAT8) if float8 else latents, scales)
        gains = random(RANK, seed=4, device=host, dtype=dtype)
        cos_sin = rotary_table(RopeConfig(dim=ROPE), ROPE, 64)
        self.host_layer = LatentLayer(HEADS, RANK, ROPE, gains, 1e-6, cos_sin, 0.3, up)
        self.layer = self.host_layer._replace(
            norm_weight=gains.to(device), cos_sin=cos_sin.to(device), up=up.to(device)
        )
        self.cache = LayerLatentCache(*(x if x is None else x.to(device, copy=True) for x in self.host_cache))
        # Behind the step's tokens are others of no row.
        self.q = random(self.count + 5, HEADS, key_dim + ROPE, seed=5, device=host, dtype=dtype)
        self.rows = random(self.count + 5, RANK + ROPE + 8, seed=6, device=host, dtype=dtype)[:, 8:]
        self.step = allocate_step(len(steps) + 2, BLOCKS, len(steps) + 2, self.count + 5, device)
        self._fill(table)

    def _fill(self, table: torch.Tensor) -> None:
        starts, positions, slots = [0], [], []
        self.step.slots.block_tables[: len(table)] = table.to(self.step.slots.block_tables)
        self.step.row_query_start.fill_(1 << 20)
        self.step.row_context_len.fill_(1 << 20)
        self.step.positions.fill_(1 << 20)
        for row, (context, length) in enumerate(self.of_rows):
            own = self.step.row_query_start, self.step.row_query_len, self.step.row_context_len
            for tensor, value in zip(own, (starts[-1], length, context), strict=True):
                tensor[row] = value
            self.step.token_slot[starts[-1] : starts[-1] + length] = row
            span = range(context, context + length)
            positions += span
            slots += [int(table[row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
            starts.append(starts[-1] + length)
        self.step.positions[: self.count] = torch.tensor(positions).to(self.step.positions)
        self.step.slot_mapping[: self.count] = torch.tensor(slots).to(self.step.slot_mapping)
        tables = [own.tolist() for own in table]
        contexts = [context for context, _ in self.of_rows]
        self.batch = _core.StepBatch([0] * self.count, positions, slots, starts, contexts, tables, [])

    def on_host(self) -> torch.Tensor:
        ops = ReferenceOps()
        key_dim = self.q.shape[2] - ROPE
        layer = self.host_layer._replace(up=ops.make_latent_up(self.host_layer.up, key_dim))
        q, rows = (x[: self.count].clone() for x in (self.q, self.rows))
        return ops.latent_attention(q, rows, layer, self.host_cache, self.batch).float()

    def on_device(self, plans: LatentPlans) -> torch.Tensor:
        device = self.step.positions.device
        q, rows = (x.to(device, copy=True) for x in (self.q, self.rows))
        return attend(q, rows, self.layer, self.cache, self.step, plans)[: self.count].float().cpu()


ABSORBED = LatentPlan(1, 16, 16, 4, 1, 2)
PLANS = {"small tiles": ExpandedPlan(16, 16, 4, 1), "tiles of several turns": ExpandedPlan(32, 16, 4, 2)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("float8", [False, True], ids=["", "float8"])
@pytest.mark.parametrize(("name", "sizes"), [("small tiles", (12, 16)), ("tiles of several turns", (24, 40))])
@torch.inference_mode()
def test_both_forms_together_are_the_operation_of_the_cpu(
    device: torch.device, name: str, sizes: tuple[int, int], float8: bool
) -> None:
    both = Both(sizes, device, torch.float32, float8=float8)
    expected = both.on_host()
    got = both.on_device(LatentPlans(ABSORBED, PLANS[name]))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    stored, on_host = both.cache.latents.float().cpu(), both.host_cache.latents.float()
    # A number whose last bit is another may be the next one of float8.
    torch.testing.assert_close(stored, on_host, atol=1e-5, rtol=0.13 if float8 else 1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
@torch.inference_mode()
def test_the_expanded_form_in_bfloat16_is_near_that_of_the_cpu(device: torch.device, name: str) -> None:
    both = Both((24, 40), device, torch.bfloat16, float8=False)
    expected = both.on_host()
    got = both.on_device(LatentPlans(ABSORBED, PLANS[name]))
    assert float((got - expected).norm() / expected.norm()) < 0.02


@torch.inference_mode()
def test_only_chunks_that_begin_their_text_are_expanded(device: torch.device) -> None:
    both = Both((12, 16), device, torch.float32, float8=False)
    out = torch.full((both.count + 5, HEADS, 16), 7.0, device=device)
    q, rows = both.q.to(device), both.rows.to(device)
    found = find_expanded_rows(both.step, None)
    expanded_attention(q, rows, both.layer, both.cache, both.step, found, out, PLANS["small tiles"])
    written = (out != 7).flatten(1).any(1).nonzero().flatten().tolist()
    assert written == [2, *range(3, 10), *range(30, 67)]
    for name, wrong in (("q", {"q": q[1:]}), ("rows", {"rows": rows[:, 1:]}), ("out", {"out": out[1:]})):
        operands = {"q": q, "rows": rows, "layer": both.layer, "step": both.step, "out": out} | wrong
        with pytest.raises(ValueError, match=f"^({name}|q) must be"):
            expanded_attention(**operands, cache=both.cache, found=found, plan=PLANS["small tiles"])


CONTEXTS = {
    "one part": ContextPlan(4, 160, 1, 16, 4, 1),
    "parts within rows": ContextPlan(4, 16, 10, 16, 100, 1),
    "room for some": ContextPlan(4, 32, 4, 16, 1, 1),
    "no room": ContextPlan(4, 16, 1, 16, 1, 1),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("float8", [False, True], ids=["", "float8"])
@pytest.mark.parametrize("name", CONTEXTS)
@torch.inference_mode()
def test_later_chunks_attend_over_their_expanded_context(device: torch.device, name: str, float8: bool) -> None:
    both = Both((24, 40), device, torch.float32, float8=float8, steps=LATER)
    expected = both.on_host()
    got = both.on_device(LatentPlans(ABSORBED, PLANS["tiles of several turns"]._replace(context=CONTEXTS[name])))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_rows_are_expanded_as_far_as_there_is_room(device: torch.device) -> None:
    both = Both((12, 16), device, torch.float32, float8=False, steps=LATER)
    places = {name: find_expanded_rows(both.step, plan).places.tolist() for name, plan in CONTEXTS.items()}
    assert places["one part"][:8] == places["parts within rows"][:8] == [-1, 0, 16, 16, -1, 48, 96, 96]
    assert places["room for some"][:8] == [-1, 0, 16, 16, -1, 48, 96, -1]
    assert places["no room"][:8] == [-1, 0, 16, -1, -1, -1, 96, -1]
    assert all(found[8:] == [-1, -1] for found in places.values())
    marked = find_expanded_rows(both.step, CONTEXTS["no room"]).token_rows[: both.count].tolist()
    assert marked == [-1] + 20 * [1] + 7 * [2] + 16 * [-1] + [6] + 4 * [-1]


@torch.inference_mode()
def test_a_context_without_numbers_spoils_no_other_row(device: torch.device) -> None:
    """Contexts lie side by side in the scratch memory, and a tile of one reaches into the next."""
    both = Both((24, 40), device, torch.float32, float8=False, steps=LATER)
    expected = both.on_host()
    blocks = both.step.slots.block_tables[3, : 21 // BLOCK_SIZE].long()
    both.cache.latents[blocks] = float("nan")
    got = both.on_device(LatentPlans(ABSORBED, PLANS["small tiles"]._replace(context=CONTEXTS["parts within rows"])))
    own = torch.zeros(both.count, dtype=torch.bool)
    own[28:34] = True
    torch.testing.assert_close(got[~own], expected[~own], atol=1e-4, rtol=1e-4)
    assert got[own].isnan().any()


def test_steps_that_may_have_long_prompts_have_a_plan_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LatentLayer(20, 512, 64, torch.empty(0), 1e-6, torch.empty(0), 0.1, torch.empty(20, 448, 512))
    of = [choose_expanded(2048, 192, layer, 256, torch.bfloat16, gpu) for gpu in (H200, A100, L40S)]
    assert [plan and plan.tokens for plan in of] == [128, 64, 64]
    own = "expanded latents [128 tokens of a head x 32, 8 warps, 2 stages] for chunks that begin their text"
    assert str(of[0]) == f"{own}, and for those of 399 tokens after up to 4 x 8192 others (formula)"
    assert str(choose_expanded(1024, 192, layer, 256, torch.bfloat16, H200)).count("1 x 8192") == 1
    assert str(choose_expanded(512, 192, layer, 256, torch.bfloat16, H200)) == f"{own} (formula)"
    narrow = layer._replace(rank=200)
    assert str(choose_expanded(2048, 192, narrow, 256, torch.bfloat16, H200)) == f"{own} (formula)"
    assert choose_expanded(256, 192, layer, 256, torch.bfloat16, H200) is None
    step, q = allocate_step(4, 1, 4, 64, torch.device("meta")), torch.empty(64, 20, 256, device="meta")
    monkeypatch.setattr(expanded, "LEAST_TOKENS", 64)
    for single, expands in ((True, False), (False, True)):
        plans = choose_plans(q, layer, step, H200, single_token_rows=single, float8=False)
        assert (plans.expanded is not None) is expands
