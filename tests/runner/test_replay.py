"""bench/replay.py: its StepInput is one that the kernels read, and the engine goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncengine import SamplingParams, testing
from asyncengine.runner.costs import cuda
from asyncengine.runner.costs.cpu import Sizes, measure
from asyncengine.runner.steps.buckets import ANY_CONTEXT, Bucket, choose_buckets
from asyncengine.runner.steps.device_steps import ARGMAX, DeviceSteps
from asyncengine.text.tokenizer import placeholder_tokenizer
from tests.kernels.simulated_cuda import _quietly, make_engine
from tests.models import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import replay

CONTEXTS = [5, 17, 33]
CONFIG: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_blocks": 24, "max_model_len": 64, "dtype": "float32",
    "enable_prefix_caching": False, "step_timeout_s": 600.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny.build_model("qwen3", num_hidden_layers=1).save_pretrained(path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "config", [{"staging": "ahead"}, {"staging": "mapped"}, {"staging": "pageable", "steps_in_flight": 1}], ids=str
)
def test_replays_run_the_step_and_leave_the_engine_as_it_was(checkpoint: Path, config: dict[str, Any]) -> None:
    async def main() -> None:
        async with make_engine(str(checkpoint), **CONFIG, **config) as engine:
            params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            before = await engine.generate([5, 9, 2, 7], params)
            await testing.settle(engine)
            replayed(engine._life.loaded().keep_alive, engine.stats().num_steps + 1)
            for _ in range(2):  # the first of them may be at any place of the ring
                after = await engine.generate([5, 9, 2, 7], params)
                assert after.token_ids == before.token_ids

    asyncio.run(main())


def replayed(backend: Any, next_step: int) -> None:
    """Replays on the machine that there is, and what the last of them left on it."""
    if torch.cuda.is_available():
        steps = backend.steps
        assert replay.bare_step_us(backend, replay.decode_rows(CONTEXTS), 3, next_step) > 0
    else:
        steps = backend[0]
        buckets = [Bucket(2, 2, True), Bucket(4, 4, True, max(CONTEXTS) - 1), Bucket(4, 4, True), Bucket(4, 64, False)]
        rows = replay.decode_rows(CONTEXTS)
        bucket = buckets[replay.choose_bucket(buckets, rows)]
        assert bucket is buckets[2]
        with replay.staged(steps, rows, next_step, lambda: None), np.errstate(all="ignore"):
            for _ in range(len(steps.source.inputs)):
                steps.run(bucket, ARGMAX)
    expect_decode_step(steps)
    assert steps.source.state.tolist() == [0, 0, next_step, 0]


def expect_decode_step(steps: DeviceSteps) -> None:
    state, rows = steps.state, len(CONTEXTS)
    assert state.row_slot[:rows].tolist() == [0, 1, 2]
    assert state.row_query_len[:rows].tolist() == [1] * rows
    assert state.row_context_len[:rows].tolist() == CONTEXTS
    assert state.positions[:rows].tolist() == CONTEXTS
    assert state.sample_index[:rows].tolist() == [0, 1, 2]
    assert state.sample_position[:rows].tolist() == [context + 1 for context in CONTEXTS]
    slots = state.slot_mapping[:rows].tolist()
    assert [slot % 16 for slot in slots] == [context % 16 for context in CONTEXTS]
    assert len({slot // 16 for slot in slots}) == rows  # every row writes to a block of its own


def test_check_notices_steps_that_did_not_run(checkpoint: Path) -> None:
    async def main() -> None:
        async with make_engine(str(checkpoint), **CONFIG) as engine:
            backend: Any = engine._life.loaded().keep_alive
            on_gpu = torch.cuda.is_available()
            steps = backend.steps if on_gpu else backend[0]
            synchronize = torch.cuda.synchronize if on_gpu else lambda: None
            rows = replay.decode_rows(CONTEXTS)
            with pytest.raises(RuntimeError, match="did not do"), replay.staged(steps, rows, 1, synchronize):
                pass
            with pytest.raises(ValueError, match="do not fit"):
                replay.stage(steps, replay.decode_rows([300, 300]))

    asyncio.run(main())


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_costs.py measures")
def test_costs_are_measured_of_the_engines_steps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of every size is a step that the kernels run; the clock is a stand-in."""
    timed: list[int] = []

    def launch_us(launch: Any, replays: int, cuda_stream: Any, *, warm_up: int) -> float:
        launch(warm_up + replays)
        timed.append(replays)
        return 5.0

    async def main() -> None:
        async with make_engine(str(checkpoint), **CONFIG) as engine:
            steps: DeviceSteps = engine._life.loaded().keep_alive[0]  # type: ignore[index]
            buckets = choose_buckets(4, 24, 64, nothing, nothing)
            run = partial(_quietly, lambda bucket: steps.run(buckets[bucket], ARGMAX))
            machine = cuda.Machine(steps, buckets, run, None)  # type: ignore[arg-type]
            sizes = Sizes.of(engine.config, engine.model_info, 1000)
            table = measure(sizes, partial(cuda.time_step, machine), 1.0, lambda: 0.0)
            assert [point.tokens for point in table.decode] == [1, 4]
            assert [point.tokens for point in table.prompt] == [16, 24]
            assert {point.base_ns for point in (*table.decode, *table.prompt)} == {5000.0}
            assert timed == [2] * 8
            steps.restart()
            params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            assert len((await engine.generate([5, 9, 2, 7], params)).token_ids) == 3

    monkeypatch.setattr(cuda, "launch_us", launch_us)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    asyncio.run(main())


def nothing(rows: int) -> int:
    return 0


def test_lanes_cost_what_a_step_of_as_many_tokens_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def bucket(tokens: int, lanes: int = 0, *, decodes: bool = True, context: int = ANY_CONTEXT) -> Any:
        return SimpleNamespace(max_tokens=tokens, lanes=lanes, single_token_rows=decodes, max_context=context)

    rows_of: list[int] = []

    def time_bucket(machine: cuda.Machine, planned: list[replay.Row], index: int) -> float:
        """A microsecond for a token, and ten for a bucket with lanes."""
        rows_of.append(len(planned))
        chosen: Any = machine.buckets[index]
        return 1e-6 * (chosen.max_tokens + 10 * bool(chosen.lanes))

    def machine(*buckets: Any) -> Any:
        return SimpleNamespace(buckets=buckets)

    lanes = [bucket(16, 8), bucket(32, 8), bucket(64, 8), bucket(24, 8, decodes=False)]
    without = [bucket(16, context=64), bucket(16), bucket(40), bucket(64, decodes=False)]
    monkeypatch.setattr(cuda, "_time_bucket", time_bucket)
    info: Any = SimpleNamespace(block_size=16, num_kv_blocks=20)
    assert cuda.lane_pairs([*lanes, *without]) == [(0, 5), (1, 6)]
    # Ten microseconds, and of the second pair eight less.
    assert cuda.time_exchange(machine(*lanes, *without), info) == pytest.approx((10 + 2) / 2 * 1e3)
    assert rows_of == [8, 8, 20, 20]
    assert cuda.time_exchange(machine(*without), info) == 0
    assert cuda.time_exchange(machine(Bucket(1, 1, True)), info) == 0


@pytest.mark.sampled(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="bench/states.py replays")
@pytest.mark.parametrize("variant", ["glm4-moe-lite", "qwen3.5"])
def test_steps_of_latents_and_of_states_are_replayed(tmp_path: Path, variant: str) -> None:
    """Latents have no plane of keys to ask for the size of a block, and a state starts as that of an empty text."""
    tiny.build_model(variant).save_pretrained(tmp_path)
    placeholder_tokenizer(tiny.VOCAB_SIZE).backend.save(str(tmp_path / "tokenizer.json"))

    async def main() -> None:
        async with make_engine(str(tmp_path), **CONFIG) as engine:
            steps: DeviceSteps = engine._life.loaded().keep_alive[0]  # type: ignore[index]
            rows = replay.decode_rows(CONTEXTS)
            for states in steps.cache.states:
                states.fill_(0xFF)  # NaN
            with replay.staged(steps, rows, 1, lambda: None, own_tables=True), np.errstate(all="ignore"):
                for _ in range(len(steps.source.inputs)):
                    steps.run(Bucket(4, 4, True), ARGMAX)
            assert steps.state.positions[: len(rows)].tolist() == CONTEXTS

    asyncio.run(main())


def test_a_replayed_step_may_compute_prompts(checkpoint: Path) -> None:
    rows = [replay.Row(1, 17), replay.Row(7, 16), replay.Row(3, 0)]

    async def main() -> None:
        async with make_engine(str(checkpoint), **CONFIG) as engine:
            backend: Any = engine._life.loaded().keep_alive
            if torch.cuda.is_available():
                assert replay.bare_step_us(backend, rows, 3, 1, own_tables=True) > 0
                steps = backend.steps
            else:
                steps = backend[0]
                buckets = choose_buckets(CONFIG["max_num_seqs"], CONFIG["max_num_batched_tokens"], 64, nothing, nothing)
                chosen = buckets[replay.choose_bucket(buckets, rows)]
                assert not chosen.single_token_rows
                with replay.staged(steps, rows, 1, lambda: None, own_tables=True), np.errstate(all="ignore"):
                    for _ in range(len(steps.source.inputs)):
                        steps.run(chosen, ARGMAX)
            state = steps.state
            assert state.row_query_len[:3].tolist() == [1, 7, 3]
            assert state.row_context_len[:3].tolist() == [17, 16, 0]
            assert state.positions[:11].tolist() == [17, *range(16, 23), *range(3)]
            assert state.input_ids[1:11].tolist() == list(range(10))
            assert state.sample_index[:3].tolist() == [0, 7, 10]
            assert state.sample_position[:3].tolist() == [18, 23, 3]
            written = state.slot_mapping[:11].tolist()
            assert len(set(written)) == 11

    asyncio.run(main())


def test_the_bucket_is_the_first_that_fits() -> None:
    buckets = choose_buckets(4, 24, 1024, lambda rows: 40 // rows, nothing)
    assert buckets[replay.choose_bucket(buckets, replay.decode_rows([5, 10, 5]))] == Bucket(4, 4, True, 10)
    assert buckets[replay.choose_bucket(buckets, replay.decode_rows([5, 11, 5]))] == Bucket(4, 4, True, ANY_CONTEXT)
    assert buckets[replay.choose_bucket(buckets, [replay.Row(2, 0)])] == Bucket(4, 8, False, ANY_CONTEXT)
    buckets = choose_buckets(4, 24, 1024, nothing, lambda tokens: 400 // tokens)
    assert buckets[replay.choose_bucket(buckets, [replay.Row(2, 42)])] == Bucket(4, 8, False, 42)
    assert buckets[replay.choose_bucket(buckets, [replay.Row(2, 43)])] == Bucket(4, 8, False, ANY_CONTEXT)
    assert buckets[replay.choose_bucket(buckets, [replay.Row(12, 0)])] == Bucket(4, 16, False, 9)
    assert buckets[replay.choose_bucket(buckets, [replay.Row(17, 0)])] == Bucket(4, 24, False, ANY_CONTEXT)
    assert buckets[replay.choose_bucket(buckets, [replay.Row(17, 0)])] == Bucket(4, 24, False, ANY_CONTEXT)
