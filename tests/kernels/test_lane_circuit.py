"""Sequences that decode in lanes get the tokens that they get in rows of their own; the test attends for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncengine import _core
from asyncengine.config import EngineConfig
from asyncengine.kernels.cuda.attention import choose
from asyncengine.kernels.cuda.gpu import describe
from asyncengine.kernels.cuda.ops import CudaOps, CudaOptions
from asyncengine.kernels.cuda.rows.lanes import HostLanes
from asyncengine.models.config import ModelConfig
from asyncengine.runner.loop_config import step_loop_config
from asyncengine.runner.start.graphs import loaded_libcudart
from asyncengine.runner.state import memory
from asyncengine.runner.steps.buckets import Bucket
from asyncengine.runner.steps.device_steps import VARIANTS, DeviceSteps, StepBuffers, step_buckets
from asyncengine.runner.steps.model_runner import LoadedModel, load_model
from tests.kernels.lanes import Row, Table, read_mailbox, step_input
from tests.kernels.simulated_cuda import poison
from tests.models import tiny

LANES, BLOCK = 2, 16
LATER = [4, 4, 9]
"""A prompt of slot 2 that is computed beside lanes."""
PROMPTS = {0: [5, 9, 2, 7, 7, 1, 30, 2, 17, 40, 41, 42, 3, 3, 8, 11, 12, 19], 1: [100, 3, 77], 3: [8, 60, 61, 62, 5]}
"""Prompts by slot. The first one decodes on the device throughout; the others' lengths cross no block's end."""
ON_DEVICE, HOSTED, COUNT = 0, (3, 1), 4


@dataclass(slots=True)
class HostRow:
    """Place of a row in the circuit, and its keys and values [tokens, Hk, D] of each layer."""

    slot: int
    position: int
    keys: list[Tensor]
    values: list[Tensor]
    stage: int = 0
    left_in: int = 0
    """number of the step whose mailbox is to be attended for; 0: none"""
    tokens: list[int] = field(default_factory=list)


class Machine:
    """Steps with lanes of a model, one at a time."""

    def __init__(self, path: Path, **config: Any) -> None:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_kv_blocks": 8, "max_model_len": 64}
        small: dict[str, Any] = sizes | {
            "hybrid_attention": "always",
            "hybrid_lanes": LANES,
            "host_kv_memory_bytes": 1 << 20,
        }
        self.config = EngineConfig(model=str(path), **small | config)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.simulation = _core.SimulatedDevice(vocab_size=2)
        on_gpu = device.type == "cuda"
        self.native = _core.CudaDevice(loaded_libcudart(), 0) if on_gpu else _core.CudaDevice.simulated(self.simulation)
        invariant = self.config.batch_invariant
        ops = CudaOps(device, CudaOptions(batch_invariant=invariant, gpu=describe(device)))
        self.loaded: LoadedModel = load_model(self.config, ops)
        self.model: ModelConfig = self.loaded.config
        self.buckets = step_buckets(self.config, self.loaded, ops, LANES)
        info = self.loaded.info(self.config, 8, 1)
        staging = _core.Staging(self.native, step_loop_config(self.config, info), "ahead")
        buffers = StepBuffers.allocate(staging, 4, device)
        self.lanes = self._lanes(buffers.source.header)
        cache = memory.allocate(self.config, self.model, 8, self.loaded.dtype, ops)
        self.steps = DeviceSteps(self.config, self.loaded, ops, buffers, cache, self.lanes)
        poison(self.steps)
        self.number = 0
        self.ran: list[Bucket] = []

    def _lanes(self, header: Tensor) -> HostLanes:
        model, dtype = self.model, self.loaded.dtype
        words = model.head_dim * dtype.itemsize // 4
        heads = model.num_heads + 2 * model.num_kv_heads
        mailboxes = torch.zeros(4, heads, words, dtype=torch.int64, pin_memory=header.is_cuda)
        results = torch.full((4, model.num_heads * model.head_dim), float("nan"), dtype=dtype)
        results = results.pin_memory() if header.is_cuda else results
        lanes = HostLanes.allocate(
            mailboxes, results, header, layers=model.num_layers, lanes=LANES, width=model.hidden_size
        )
        lanes.saved.fill_(float("nan"))
        return lanes

    def run(self, rows: list[Row], table: Table, needs: int = VARIANTS[0]) -> list[int]:
        """A step: what it samples, in the order of rows. Numbers do not fit into 32 bits."""
        self.number += 1
        number = (1 << 32) + self.number
        words = step_input(number, rows, table)
        source = self.steps.source
        source.inputs[:, : len(words)] = words.to(source.inputs.device)
        bucket = self._bucket(rows, bool(table))
        self.ran.append(bucket)
        with np.errstate(all="ignore"):
            self.steps.run(bucket, needs)
        if source.state.is_cuda:
            torch.cuda.synchronize()
        out = source.outputs[int(source.header[1]), : len(rows)].cpu()
        assert (out >> 32 == self.number).all()
        return [int(word) & 0xFFFFFFFF for word in out]

    def _bucket(self, rows: Iterable[Row], with_lanes: bool) -> Bucket:
        """Choose a bucket as GraphExecutor::bucket_for does."""
        rows, lanes = list(rows), LANES if with_lanes else 0
        plain = [row for row in rows if row.lane < 0]
        tokens = sum(len(row.tokens) or 1 for row in plain)
        longest = max((row.context for row in plain), default=0)
        return next(
            b
            for b in self.buckets
            if len(rows) <= b.max_rows and tokens + lanes <= b.max_tokens and longest <= b.max_context
            and b.lanes == lanes and (tokens == len(plain) or not b.single_token_rows)
        )  # fmt: skip

    def take_to_host(self, slot: int, tokens: int) -> HostRow:
        """The row's keys and values. The device's copies of them are NaN from now on."""
        blocks = self.steps.state.slots.block_tables[slot, : -(-tokens // BLOCK)].long()
        planes: list[list[Tensor]] = [[], []]
        for layer in self.steps.cache.layers:
            for plane, cached in zip(planes, (layer.k, layer.v), strict=True):
                plane.append(cached[blocks].transpose(1, 2).flatten(0, 1)[:tokens].cpu())
                cached[blocks] = float("nan")
        return HostRow(slot, tokens, *planes)

    def attend(self, row: HostRow) -> None:
        """Attend as a worker does, for the layer that the row has left."""
        model, layer = self.model, row.stage - 1
        heads = read_mailbox(self.lanes.mailboxes[row.slot], self.loaded.dtype, row.left_in)
        q, k, v = heads.split([model.num_heads, model.num_kv_heads, model.num_kv_heads])
        row.keys[layer] = torch.cat([row.keys[layer], k[None]])
        row.values[layer] = torch.cat([row.values[layer], v[None]])
        window = model.layer_windows[layer] or row.position + 1
        group = model.num_heads // model.num_kv_heads
        keys, values = (x[layer][-window:].float().repeat_interleave(group, 1) for x in (row.keys, row.values))
        scores = torch.einsum("hd,thd->ht", q.float(), keys) * model.layer_scales[layer]
        self.lanes.results[row.slot] = torch.einsum("ht,thd->hd", scores.softmax(1), values).flatten()
        row.left_in = 0

    def plan_lanes(self, rows: Iterable[HostRow]) -> tuple[Table, list[Row]]:
        """Lanes for these rows, which are ready; of those that end a token also rows."""
        stages = self.model.num_layers + 1
        table: Table = [[(-1, 0)] * LANES for _ in range(stages)]
        ending = []
        for row in rows:
            lane = table[row.stage].index((-1, 0))
            table[row.stage][lane] = row.slot, row.position
            if row.stage == stages - 1:
                ending.append(Row(row.slot, row.position, lane=lane))
        return table, ending

    def advance(self, rows: Iterable[HostRow], sampled: dict[int, int]) -> None:
        """The rows that were in the step: they have left, or ended a token."""
        for row in rows:
            if row.stage == self.model.num_layers:
                row.tokens.append(sampled[row.slot])
                row.stage, row.position = 0, row.position + 1
            else:
                row.stage, row.left_in = row.stage + 1, self.number


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Any]] = {}

    def get(variant: str) -> tuple[Path, Any]:
        if variant not in made:
            path = tmp_path_factory.mktemp(variant)
            layers: dict[str, Any] = {"n_layer" if variant.startswith("gpt2") else "num_hidden_layers": 2}
            if "layer_types" in tiny.VARIANTS[variant][1]:
                layers["layer_types"] = ["full_attention", "sliding_attention"]
            model = tiny.build_model(variant, **layers)
            model.save_pretrained(path)
            made[variant] = path, model
        return made[variant]

    return get


CASES = [
    ("llama", "fused", {"dtype": "float32"}),
    ("qwen3-window-biased", "work lists", {"dtype": "float32"}),
    ("gpt2", "fixed splits", {"dtype": "float32", "batch_invariant": True}),
    ("gemma3-scaled", "a rotary table for each layer", {"dtype": "float32"}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("variant", "attention", "config"), CASES, ids=[f"{v} {a}" for v, a, _ in CASES])
def test_rows_in_lanes_get_their_tokens(checkpoint: Any, monkeypatch: pytest.MonkeyPatch, variant, attention, config):
    if attention == "work lists":
        monkeypatch.setattr(choose, "few_keys_context", lambda rows, shape, gpu: 0)
    path, model = checkpoint(variant)
    machine = Machine(path, **config)
    blocks = {0: [3, 6], 1: [1], 3: [5]}
    prompts = [Row(slot, 0, prompt, blocks[slot]) for slot, prompt in PROMPTS.items()]
    expected = {slot: tiny.generate(model, prompt, COUNT) for slot, prompt in PROMPTS.items()}
    got = {slot: [token] for slot, token in zip(PROMPTS, machine.run(prompts, []), strict=True)}
    hosted = [machine.take_to_host(slot, len(PROMPTS[slot])) for slot in HOSTED]
    steps = 0
    while any(len(row.tokens) < COUNT - 1 for row in hosted):
        # The second row is a step behind, and in one step it has no result yet.
        late = steps == 0 or steps == 4
        ready = [row for row in hosted[: 1 if late else None] if len(row.tokens) < COUNT - 1]
        for row in ready:
            if row.left_in:
                machine.attend(row)
        table, ending = machine.plan_lanes(ready)
        done = len(got[ON_DEVICE])
        decoding = [Row(ON_DEVICE, len(PROMPTS[ON_DEVICE]) + done - 1)] if done < COUNT else []
        fresh = [Row(2, 0, LATER, [7])] if steps == 2 else []
        planned = [*decoding, *fresh, *ending]
        needs = VARIANTS[-1 if attention == "fused" and steps % 4 == 2 else 0]
        sampled = dict(zip([row.slot for row in planned], machine.run(planned, table, needs), strict=True))
        got |= {row.slot: [sampled[row.slot]] for row in fresh}
        if decoding:
            got[ON_DEVICE].append(sampled[ON_DEVICE])
        machine.advance(ready, sampled)
        steps += 1
    got |= {row.slot: got[row.slot] + row.tokens for row in hosted}
    assert got == expected | {2: tiny.generate(model, LATER, 1)}
    assert {bucket.lanes for bucket in machine.ran} == {0, LANES}
    assert steps > (COUNT - 1) * (machine.model.num_layers + 1)  # and not as many as one row after the other
