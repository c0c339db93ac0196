"""What steps take: measured, kept, corrected, and heeded where a target asks for it."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, ConfigError, SamplingParams, testing
from asyncengine.bundled import path as bundled_path
from asyncengine.cli import main as cli
from asyncengine.cli.costs import compare
from asyncengine.config import EngineConfig
from asyncengine.runner.cost_table import Copy, CostFile, CostTable, Point, fit_copies
from asyncengine.runner.costs import Rows, Sizes, host_attention, measure
from asyncengine.stats import StepRecord

MODEL = str(bundled_path())
SMALL: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 128, "cpu_threads": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))
    return tmp_path / "costs"


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


def test_host_attention_is_measured_by_threads() -> None:
    rates = host_attention(EngineConfig(model=MODEL, cpu_threads=2))
    assert [(r.threads, r.tokens) for r in rates] == [(1, 1024), (1, 16384), (2, 1024), (2, 16384)]
    assert all(r.bytes_per_s > 0 for r in rates)


# ---- the file ----


def test_costs_are_kept_by_what_they_are_of(cache: Path) -> None:
    config = EngineConfig(model=MODEL)
    file = CostFile.find(config, "a model", "float32", "Some Card")
    table = CostTable([Point(1, 2.0, 3.0)], [Point(4, 5.0, 6.0)], [Copy(1, 2.0)], [Copy(1, 3.0)], 7.0, (1.0, 2.0, 3.0))
    assert file.read() is None
    file.keep(table)
    assert file.read() == table
    assert [path.name for path in cache.iterdir()] == [file.path.name]
    for other in (
        CostFile.find(config, "another", "float32", "Some Card"),
        CostFile.find(config, "a model", "float32", "cpu"),
        CostFile.find(EngineConfig(model=MODEL, max_num_seqs=4), "a model", "float32", "Some Card"),
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


def test_the_command_prints_the_table_and_its_errors(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    flags = ["--device", "cpu", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--cpu-threads", "1"]
    assert cli.main(["costs", *flags, "--seconds", "0.5"]) == 0
    text = capsys.readouterr().out
    (path,) = cache.iterdir()
    for part in (str(path), "decode rows", "chunk of a prompt", "threads of the CPU", "p90 error"):
        assert part in text
    assert cli.main(["costs", *flags, "--seconds", "0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["costs"]["prompt"][-1]["tokens"] == 64
    assert result["predictions"] == {}
