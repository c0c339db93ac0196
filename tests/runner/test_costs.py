"""Costs of steps: measured, kept, corrected, and heeded where a target asks for it."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, ConfigError, SamplingParams, _core, testing
from asyncengine._core import StepRecord
from asyncengine.api.model_info import ModelInfo
from asyncengine.bundled import path as bundled_path
from asyncengine.cli import main as cli
from asyncengine.cli.costs import _host_tables, compare
from asyncengine.config import EngineConfig
from asyncengine.runner.costs.cpu import HOST_TOKENS, Rows, Sizes, measure, time_host_attention
from asyncengine.runner.costs.table import Copy, CostFile, CostTable, HostAttention, Point, fit_copies
from asyncengine.runner.loop_config import hybrid_gain
from asyncengine.runner.steps.model_runner import read_model_config

MODEL = str(bundled_path())
SMALL: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 128, "cpu_threads": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))
    return tmp_path / "costs"


HYBRID: dict[str, Any] = {"hybrid_attention": "auto", "host_kv_memory_bytes": 1 << 20, "hybrid_workers": 3}


# ---- measuring ----


def linear_seconds(rows: Rows) -> float:
    """100 us a step, 10 us a token, 10 ns for each pair of a token and one before it or itself, on the average."""
    pairs = sum(tokens * (context + (tokens / 2 if tokens > 1 else 1)) for tokens, context in rows)
    return (1e5 + 1e4 * sum(tokens for tokens, _ in rows) + 10 * pairs) * 1e-9


def test_what_is_measured_of_a_machine_is_what_it_takes() -> None:
    sizes = Sizes(rows=(1, 8), chunks=(64, 16), num_blocks=64, block_size=16, max_len=512)
    table = measure(sizes, linear_seconds, end=1.0, clock=lambda: 0.0)
    assert [p.tokens for p in table.decode] == [1, 8]
    assert [p.tokens for p in table.prompt] == [16, 64]
    for points in (table.decode, table.prompt):
        for p in points:
            assert p.base_ns == pytest.approx(1e5 + 1e4 * p.tokens)
    assert [p.context_ns for p in table.decode] == pytest.approx([10, 10])
    assert [p.context_ns for p in table.prompt] == pytest.approx([160, 640])
    costs = table.native()
    assert costs.decode_ns(4, 100) == pytest.approx(1e5 + 4e4 + 1000, abs=2)
    assert costs.mixed_ns(40, 0, 0, costs.attention_ns(40, 100)) == pytest.approx(1e5 + 4e5 + 400 * 120, abs=2)


def test_measuring_ends_in_time_but_has_the_first_sizes() -> None:
    sizes = Sizes(rows=(1, 8, 4), chunks=(64, 16), num_blocks=64, block_size=16, max_len=512)
    table = measure(sizes, linear_seconds, end=0.0, clock=lambda: 1.0)
    assert [p.tokens for p in table.decode] == [1]
    assert [p.tokens for p in table.prompt] == [64]
    assert table.native().known


def test_steps_of_more_tokens_are_never_cheaper() -> None:
    sizes = Sizes(rows=(1, 2), chunks=(16, 32), num_blocks=64, block_size=16, max_len=64)
    seconds = iter([2e-3, 2e-3, 4e-3, 4e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    table = measure(sizes, lambda _: next(seconds), end=1.0, clock=lambda: 0.0)
    assert [p.base_ns for p in table.prompt] == pytest.approx([2e6, 2e6])
    assert [p.base_ns for p in table.decode] == pytest.approx([4e6, 4e6])


def test_copies_have_a_price_for_a_call_and_for_a_byte() -> None:
    assert fit_copies([]) == (0.0, 0.0)
    call, byte = fit_copies([Copy(1000, 6000), Copy(2000, 7000), Copy(101_000, 106_000)])
    assert (call, byte) == pytest.approx((5000, 1))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the shapes for which attention on the host is timed. A worker takes a nanosecond, and one more for each
    other worker."""
    calls: list[tuple[Any, ...]] = []

    def time_host_attention(heads: _core.HostShape, *shape: Any, float8: bool, pool: Any, num_layers: int) -> float:
        counts = (heads.num_q_heads, heads.num_kv_heads, heads.head_dim)
        calls.append((heads.dtype, *counts, *shape, float8, pool, num_layers))
        return float(shape[-2])

    monkeypatch.setattr("asyncengine.runner.costs.cpu.time_attention", time_host_attention)
    return calls


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "transposed"), [("float32", "auto", True), ("bfloat16", "fp8", False)]
)
def test_attention_on_the_host_is_measured_by_workers(
    timed: list[tuple[Any, ...]], dtype: str, kv_cache_dtype: Any, transposed: bool
) -> None:
    config = EngineConfig(model=MODEL, hybrid_workers=5, block_size=32, kv_cache_dtype=kv_cache_dtype)
    model = read_model_config(config)
    pool: Any = object()
    rates = time_host_attention(config, model, dtype, transposed_keys=transposed, pool=pool)
    assert [(r.workers, r.tokens, r.ns) for r in rates] == [(n, t, n) for n in (1, 2, 5) for t in HOST_TOKENS]
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    kind = {"float32": _core.Dtype.float32, "bfloat16": _core.Dtype.bfloat16}[dtype]
    of_pool = (pool, model.num_layers)
    assert timed[-1] == (kind, *heads, 32, transposed, 5, HOST_TOKENS[-1], kv_cache_dtype == "fp8", *of_pool)
    assert time_host_attention(config, replace(model, head_dim=7), dtype, transposed_keys=True) == []


PARTS = ("decode", "rest", "attention", "hybrid")
ATTENTION = [HostAttention(1, 100, 2.0), HostAttention(8, 100, 3.0), HostAttention(8, 900, 5.0)]


def test_a_worker_takes_what_about_as_many_were_measured_to_take() -> None:
    table = CostTable([], [], host_attention=ATTENTION)
    assert [table.attend_ns(workers) for workers in (1, 4, 5, 8, 99)] == [2, 2, 4, 4, 4]
    assert CostTable([], []).attend_ns(1) == 0


def test_the_link_is_one_more_who_attends() -> None:
    copies = [Copy(100, 60.0), Copy(1100, 1060.0)]  # a nanosecond a byte
    table = CostTable([], [], to_device=copies, host_attention=ATTENTION)
    assert table.attenders("workers", 8, 8.0) == (8, 4.0)
    assert table.attenders("link", 0, 8.0) == (1, 8.0)
    count, ns = table.attenders("both", 8, 8.0)
    assert (count, count / ns) == (9, pytest.approx(8 / 4 + 1 / 8))
    assert CostTable([], [], host_attention=ATTENTION).attenders("both", 8, 8.0) == (9, 0.0)
    assert CostTable([], [], to_device=copies).attenders("both", 8, 8.0) == (9, 0.0)


def test_what_attention_on_the_host_took_is_learned() -> None:
    stats = {f"{part}_cost_ppm": ppm for part, ppm in zip(PARTS, (1_100_000, 900_000, 10**6, 1_050_000), strict=True)}
    table = CostTable([], [], host_attention=ATTENTION)
    few = table.corrected(stats | {"host_attention_tokens": 10**6, "host_attention_ns": 9 * 10**6})
    assert few.attenders("workers", 8, 8.0) == (8, 4.0)
    assert few.factors == (1.1, 0.9, 1.0, 1.05)
    many = table.corrected(stats | {"host_attention_tokens": 10**8, "host_attention_ns": 9 * 10**8})
    assert many.attenders("workers", 8, 8.0) == (8, 9.0)
    assert many.attenders("both", 8, 8.0) == (9, 9.0)
    assert many.corrected(stats | {"host_attention_tokens": 0, "host_attention_ns": 0}).learned_attend_ns == 9.0


def test_the_gain_of_sequences_on_the_host_by_hand() -> None:
    """Ten rows of 1,000 tokens take 5 ms without lanes, and with eight 6: 0.8 for as many rows, 0.2 of their own."""
    points = [Point(1, 3.1e6, 100.0), Point(21, 5.1e6, 100.0)]
    costs = CostTable(points, points).native()
    hybrid = partial(_core.HybridConfig, lanes=8, exchange_ns=2e5)
    # Eight workers could do 6 ms * 8 / (4 ns * 10 layers * 1,000 tokens): all lanes make a token.
    eight = hybrid(layers=10, workers=8, attend_ns=4.0)
    assert eight.gain(costs, 10, 10_000) == pytest.approx(1.8 * 5 / 6 - 1)
    # One worker and 10,000 layers: 6 ms / (2 ns * 10,000 * 1,000), 0.3 tokens a step.
    assert hybrid(layers=10_000, attend_ns=2.0).gain(costs, 10, 10_000) == pytest.approx(1.03 * 5 / 6 - 1)
    assert hybrid(layers=10).gain(costs, 10, 10_000) is None
    assert eight.gain(_core.StepCosts(), 10, 10_000) is None
    # As learned, all steps take twice as long, and those with lanes a tenth more than that.
    learned = CostTable(points, points, factors=(2.0, 1.0, 1.0, 1.1)).native()
    assert learned.decode_ns(10, 10_000) == 2 * costs.decode_ns(10, 10_000) == 10_000_000
    assert learned.lanes_ns(10, 8, 10_000, 2e5) == pytest.approx(2.2 * 6e6)
    assert eight.gain(learned, 10, 10_000) == pytest.approx(1.8 * 5 / 6.6 - 1)
    # A row of 1,000 tokens takes a worker 1 ms in each of 5 layers, the sixth of a step. The host has room for 100 of
    # them, enough for all lanes, or for 10, each of which makes a token in 6 stages of 1.5 steps and that sixth.
    room = partial(hybrid, layers=5, workers=40, attend_ns=1e3)
    assert room().gain(costs, 10, 10_000) == pytest.approx(1.8 * 5 / 6 - 1)
    assert room(host_tokens=100_000).gain(costs, 10, 10_000) == pytest.approx(1.8 * 5 / 6 - 1)
    assert room(host_tokens=10_000).gain(costs, 10, 10_000) == pytest.approx(1.1 * 5 / 6 - 1)
    with pytest.raises(ValueError, match="must not be negative"):
        room(host_tokens=-1)
    with pytest.raises(ValueError, match="a row"):
        eight.gain(costs, 0, 10_000)


# ---- the file ----


def test_costs_are_kept_by_what_they_are_of(cache: Path) -> None:
    config = EngineConfig(model=MODEL)
    file = CostFile.find(config, "a model", "float32", "Some Card")
    points, copies = ([Point(1, 2.0, 3.0)], [Point(4, 5.0, 6.0)]), ([Copy(1, 2.0)], [Copy(1, 3.0)])
    table = CostTable(*points, *copies, 7.0, (1.0, 2.0, 3.0, 4.0), ATTENTION, 8.0)
    assert file.read() is None
    file.keep(table)
    assert file.read() == table
    assert [path.name for path in cache.iterdir()] == [file.path.name]
    for other in (
        CostFile.find(config, "another", "float32", "Some Card"),
        CostFile.find(config, "a model", "float32", "cpu"),
        CostFile.find(EngineConfig(model=MODEL, max_num_seqs=4), "a model", "float32", "Some Card"),
        CostFile.find(EngineConfig(model=MODEL, kv_cache_dtype="fp8"), "a model", "float32", "Some Card"),
        CostFile.find(EngineConfig(model=MODEL, **HYBRID), "a model", "float32", "Some Card"),
    ):
        assert other.read() is None


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', "no JSON"])
def test_a_file_of_no_use_is_measured_anew(cache: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file = CostFile.find(EngineConfig(model=MODEL), "a model", "float32", "cpu")
    cache.mkdir()
    file.path.write_text(text)
    assert file.read() is None
    assert "measured anew" in caplog.text


def test_points_that_do_not_ascend_are_of_no_use(cache: Path) -> None:
    file = CostFile.find(EngineConfig(model=MODEL), "a model", "float32", "cpu")
    file.keep(CostTable([Point(4, 1, 0), Point(2, 1, 0)], [Point(1, 1, 0)]))
    assert file.read() is None


def test_a_cache_that_cannot_be_written_is_a_warning(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    CostFile.find(EngineConfig(model=MODEL), "a model", "float32", "cpu").keep(CostTable([], []))
    assert "cannot be kept" in caplog.text


# ---- engines ----


def test_an_engine_measures_learns_and_keeps(cache: Path) -> None:
    async def run(**config: Any) -> tuple[int, ...]:
        async with AsyncEngine.from_pretrained(MODEL, progress=False, **SMALL, **config) as engine:
            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            streams = [engine.generate([5, 6, 7], params) for _ in range(3)]
            outputs = await asyncio.gather(*streams, engine.generate(list(range(300, 500)), params))
            return tuple(token for output in outputs for token in output.token_ids)

    plain = asyncio.run(run())
    assert not cache.exists()  # what nobody uses costs nothing
    assert asyncio.run(run(target_itl_ms=1.0)) == plain
    (path,) = cache.iterdir()
    first = json.loads(path.read_text())["costs"]
    assert first["factors"] != [1.0, 1.0, 1.0]
    assert asyncio.run(run(target_itl_ms_by_priority="0=3")) == plain
    second = json.loads(path.read_text())["costs"]
    assert second["decode"] == first["decode"]  # not measured again
    assert second["factors"] != first["factors"]


@pytest.mark.parametrize(
    ("config", "largest"),
    [({}, 512), ({"target_itl_ms": 20.0}, 150), ({"target_itl_ms": 20.0, "prefill_chunk_size": 60}, 60)],
    ids=str,
)
def test_chunks_beside_streams_heed_the_target(config: dict[str, Any], largest: int) -> None:
    async def main() -> list[StepRecord]:
        latency = {"step_latency_us": 5000.0, "token_latency_us": 100.0}
        async with testing.SimulatedEngine(**latency, **config) as engine, testing.no_leaks(engine):
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            async with aclosing(engine.stream([300] * 4, params)) as stream:
                await anext(stream)
                engine.snapshot()
                await engine.generate([301] * 1000, SamplingParams(max_tokens=1, ignore_eos=True))
            return [record for record in engine.snapshot().steps if record.rows == 2 and record.tokens > 2]

    records = asyncio.run(main())
    chunks = [record.tokens - record.decode_rows for record in records]
    assert sum(chunks) == 1000
    # The factors follow how late a busy machine's sleeps end.
    assert max(chunks) <= largest
    assert max(chunks) >= (largest if largest != 150 else 17)
    assert all((record.predicted_ns > 0) == bool(config) for record in records)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_itl_ms": 0}, "target_itl_ms must be in"),
        ({"target_itl_ms": "20"}, "target_itl_ms must be float"),
        ({"target_itl_ms_by_priority": "0:20"}, "must be like 0=20,1=50"),
        ({"target_itl_ms_by_priority": "0=-1"}, "milliseconds in"),
        ({"target_itl_ms_by_priority": "99999999999=1"}, "32 bits"),
    ],
    ids=str,
)
def test_targets_are_checked(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **config)


def test_targets_of_classes() -> None:
    assert EngineConfig(model="m", target_itl_ms_by_priority="0=20,-1=5.5").itl_targets_by_priority == {0: 20, -1: 5.5}
    assert not EngineConfig(model="m").needs_costs


# ---- asyncengine costs ----


def record(step: int, packed: int, ready: int, rows: int, decode_rows: int, predicted: int) -> StepRecord:
    return StepRecord(step, 0, packed, packed, ready, ready, rows, rows, decode_rows, predicted)


def test_a_step_begins_when_the_one_before_ends_or_it_is_launched() -> None:
    records = [
        record(1, 0, 100, 2, 2, 50),
        record(2, 10, 200, 2, 2, 50),  # queued behind the first
        record(3, 250, 400, 3, 2, 150),
        record(7, 250, 900, 3, 2, 150),  # nobody knows when the one before ended
        record(8, 300, 950, 3, 3, 0),  # nothing was foreseen
    ]
    assert [(p.kind, p.took_ns, p.error) for p in compare(records[::-1])] == [("decode", 100, 0.5), ("mixed", 150, 0.0)]


@pytest.mark.usefixtures("timed")
def test_the_command_prints_the_table_and_its_errors(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    flags = ["--device", "cpu", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--cpu-threads", "1"]
    assert cli.main(["costs", *flags, "--seconds", "0.5"]) == 0
    text = capsys.readouterr().out
    (path,) = cache.iterdir()
    for part in (str(path), "decode rows", "chunk of a prompt", "workers of the host", "p90 error"):
        assert part in text
    assert "sequences on the host add" not in text.replace("lanes for sequences on the host add to a step", "")
    assert cli.main(["costs", *flags, "--seconds", "0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["costs"]["prompt"][-1]["tokens"] == 64
    assert result["costs"]["host_attention"][0]["workers"] == 1
    assert (result["predictions"], result["hybrid_gain"]) == ({}, [])


def test_the_command_tells_what_hybrid_attention_would_gain() -> None:
    config = EngineConfig(model=MODEL, max_num_seqs=64, hybrid_form="workers", **HYBRID)
    info = ModelInfo(
        name="m", path=Path(), architecture="", dtype="float32", device="a GPU", vocab_size=9, max_model_len=4096,
        eos_token_ids=(), num_parameters=0, weight_bytes=0, num_kv_blocks=1280, block_size=16, kv_bytes_per_block=1024,
        num_kv_layers=2, can_decode_on_host=True, num_host_kv_blocks=4000,
    )  # fmt: skip
    points = [Point(1, 3e6, 0.1), Point(64, 5e6, 0.1)]
    table = CostTable(points, points, host_attention=ATTENTION)
    *_, gains = _host_tables(config, info, table)
    three = _core.HybridConfig(lanes=8, layers=2, workers=3, attend_ns=table.attend_ns(3), host_tokens=64_000)
    expected = [three.gain(table.native(), rows, 20480) for rows in (10, 5)]
    assert gains[1:] == [("2,048", "10", f"{expected[0]:+.1%}"), ("4,096", "5", f"{expected[1]:+.1%}")]
    assert hybrid_gain(config, info, table, 2048) == (10, expected[0])
    assert hybrid_gain(config, replace(info, device="cpu"), table, 2048) == (10, None)
    for other in (config, replace(config, hybrid_attention="off")):
        unable = replace(info, can_decode_on_host=other is not config)
        assert len(list(_host_tables(other, unable, table))) == 2
    assert list(_host_tables(config, info, CostTable(points, points))) == []
