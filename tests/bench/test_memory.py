"""bench/memory.py and its hybrid part, on the CPU: what they count, and what they make of it."""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_common
import memory
import memory_hybrid
import pytest
from memory_hybrid import Sample, Track

from asyncengine import _core, testing
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.config import EngineConfig
from asyncengine.runner.costs.table import Copy, CostTable, HostAttention, KnownCosts, Point

POINTS = [Point(1, 3.1e6, 100.0), Point(21, 5.1e6, 100.0)]
TABLE = CostTable(
    POINTS, POINTS, [Copy(1000, 1000.0), Copy(2000, 2000.0)], [Copy(1000, 1000.0)],
    host_attention=[HostAttention(1, 2048, 2.0)],
)  # fmt: skip


def values(figures: list[Figure]) -> dict[str, float]:
    assert len({figure.name for figure in figures}) == len(figures)
    return {figure.name: figure.value for figure in figures}


def arguments(**changed: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gpu_common.add_engine_options(parser)
    memory_hybrid.add_hybrid_options(parser)
    return argparse.Namespace(**vars(parser.parse_args([])) | {"model": "m", "repeats": 2, "disk": None} | changed)


def simulate(monkeypatch: pytest.MonkeyPatch, module: Any, **engine: Any) -> list[dict[str, Any]]:
    """Engines of the script are simulated ones; the configurations that it asked for."""
    asked: list[dict[str, Any]] = []
    simulated = ("num_kv_blocks", "host_kv_memory_bytes", "block_size", "disk_kv_path")

    @asynccontextmanager
    async def opened(model: str, args: argparse.Namespace, **config: Any) -> Any:
        asked.append(config)
        fields = {name: value for name, value in config.items() if name in simulated}
        async with testing.SimulatedEngine(**engine | fields) as running:
            yield running
            await testing.settle(running)

    monkeypatch.setattr(module, "opened", opened)
    return asked


@pytest.mark.parametrize(("only", "ran"), [((), ["prefix", "pressure", "resume"]), (("--only", "hybrid"), ["hybrid"])])
def test_hybrid_is_measured_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, only: tuple[str, ...], ran: list[str]
) -> None:
    assert list(memory.PARTS) == ["prefix", "pressure", "resume", "hybrid"]
    for name in memory.PARTS:

        async def part(args: argparse.Namespace, name: str = name) -> list[Figure]:
            return [Figure(name, args.pools[0], "GB")]

        monkeypatch.setitem(memory.PARTS, name, part)
    path = tmp_path / "memory.json"
    monkeypatch.setattr("sys.argv", ["bench/memory.py", "--pools", "1.5,2", *only, "--json", str(path)])
    memory.main()
    record = json.loads(path.read_text())
    assert [(figure["name"], figure["value"]) for figure in record["figures"]] == [(name, 1.5) for name in ran]


# ---- prefix and resume ----


def test_a_prefix_comes_from_each_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulate(monkeypatch, memory, step_latency_us=2000, num_kv_blocks=32, max_num_seqs=2, max_model_len=512)
    args = arguments(prefix=320, pool_gb=1.0, host_gb=1.6e-5, disk=str(tmp_path))  # 250 blocks of 64 bytes
    figures = values(asyncio.run(memory.prefix(args)))
    for place in ("computed", "on the GPU", "from the host", "from the disk"):
        assert figures[f"first token of 320, {place}"] > 0
    assert figures["of computing it, from the disk"] > 0
    assert not [name for name in figures if "predicted" in name]  # nobody measured


def test_a_preempted_sequence_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = simulate(monkeypatch, memory, step_latency_us=300, max_num_seqs=4, max_model_len=1024)
    args = arguments(resumed=[128], pool_gb=1.0, host_gb=1e-3)
    figures = values(asyncio.run(memory.resume(args)))
    assert [config["num_kv_blocks"] for config in asked] == [25, 25]
    assert ["host_kv_memory_bytes" in config for config in asked] == [False, True]
    for how in ("copied from the host", "computed again"):
        assert figures[f"next token of 128 when resumed, {how}"] > 0
    assert figures["copied over computed again, 128"] > 0


def test_predictions_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with testing.SimulatedEngine(num_kv_blocks=64) as engine:
            assert memory.predicted_ms(engine, 320, copied=True) is None
            know(monkeypatch, memory, TABLE)
            # Twenty blocks of 64 bytes at a nanosecond a byte, and a step that reads 320 tokens.
            assert memory.predicted_ms(engine, 320, copied=True) == pytest.approx((20 * 64 + 3.1e6 + 32000) / 1e6)
            recomputed = TABLE.native().recompute_ns(320, 0) / 1e6
            assert memory.predicted_ms(engine, 320, copied=False) == recomputed
            know(monkeypatch, memory, CostTable(POINTS, POINTS))
            assert memory.predicted_ms(engine, 320, copied=True) is None
        assert len(memory.with_prediction("x", [1.0], 2.0)) == 2

    asyncio.run(main())


def know(monkeypatch: pytest.MonkeyPatch, module: Any, table: CostTable) -> None:
    monkeypatch.setattr(module, "table_of", lambda engine: table)


# ---- hybrid ----


def test_time_per_token_by_hand() -> None:
    track = Track()
    for at, count, host in ((1.0, 5, 5), (1.2, 2, 0), (1.5, 2, 2)):
        track.add(at, count, host)
    assert (track.count, track.place) == (5, "host")  # three of five; of the first delta one
    assert track.tpot_ms == pytest.approx(500 / 4)
    track.add(2.0, 1, 0)
    assert track.place == "device"


def test_the_ways_differ_in_what_they_are_named_after() -> None:
    args = arguments(model="llama-3.1-8b", hybrid_workers=5)
    ways = (*memory_hybrid.ALONE, *memory_hybrid.HYBRID)
    made = {way: memory_hybrid.settings(args, way, 3.5, 2048, "auto") for way in ways}
    assert made["recompute"] == {
        "kv_cache_memory_bytes": 3_500_000_000,
        "max_num_seqs": 192,
        "prefill_chunk_size": None,
        "kv_cache_dtype": "auto",
        "max_model_len": 2048 + 512 + 16,
    }
    assert made["conservative"] == made["recompute"] | {"max_num_seqs": 10}  # of 2,560 tokens of 128 KiB
    assert made["swap"] == made["recompute"] | {"host_kv_memory_bytes": 40_000_000_000}
    hosts = made["swap"] | {"hybrid_lanes": None, "hybrid_workers": 5}
    assert made["auto"] == hosts | {"hybrid_attention": "auto"}
    for way in ("workers", "link", "both"):
        assert made[way] == hosts | {"hybrid_attention": "always", "hybrid_form": way}


def test_a_run_counts_the_tokens_of_its_window(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = simulate(monkeypatch, memory_hybrid, step_latency_us=500, max_num_seqs=4, max_model_len=512)
    args = arguments(
        model="gpt2", pools=[0.001, 1.0], contexts=[64], ways=["recompute", "swap"], in_flight=6, hybrid_output=32,
        warm_up=0.1, seconds=0.3, repeats=1, hybrid_host_gb=1e-3,
    )  # fmt: skip
    figures = values(asyncio.run(memory_hybrid.hybrid(args)))
    assert [config["kv_cache_memory_bytes"] for config in asked] == [10**9] * 2
    assert "0.001 GB, 64: left out" in capsys.readouterr().out
    for way in args.ways:
        # Steps of half a millisecond and more, each with a token of at most four sequences.
        assert 0 < figures[f"1 GB, 64: {way}"] < 4 / 0.5e-3
        assert figures[f"1 GB, 64: {way}: TPOT p50, device"] > 0.4
    assert not [name for name in figures if "host" in name]
    with pytest.raises(SystemExit, match="--ways: fast"):
        asyncio.run(memory_hybrid.hybrid(arguments(ways=["fast"])))


def test_a_client_that_fails_ends_the_run() -> None:
    async def main() -> None:
        async with testing.SimulatedEngine(max_model_len=64) as engine:
            args = arguments(in_flight=1, hybrid_output=400, warm_up=30.0, seconds=30.0)
            with pytest.raises(Exception, match="64"):
                await memory_hybrid.observe(engine, args, 264)

    asyncio.run(main())


def test_the_prediction_is_of_a_pool_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        model_info = argparse.Namespace(
            kv_capacity_tokens=10_500, num_kv_layers=10, kv_layer_token_bytes=64, device="a GPU",
            can_decode_on_host=True, num_host_kv_blocks=500,
        )  # fmt: skip
        config = EngineConfig(
            model="m", hybrid_attention="auto", hybrid_form="workers", hybrid_workers=4, host_kv_memory_bytes=1
        )

        @property
        def _life(self) -> Engine:
            return self

        def loaded(self) -> Any:
            ppm = dict.fromkeys((f"{part}_cost_ppm" for part in ("decode", "rest", "attention", "hybrid")), 1_000_000)
            stats = ppm | {"host_attention_tokens": 10**8, "host_attention_ns": 7 * 10**8}
            loop = argparse.Namespace(stats=lambda: stats)
            return argparse.Namespace(costs=KnownCosts(None, TABLE), step_loop=loop)  # type: ignore[arg-type]

    engine: Any = Engine()
    assert memory_hybrid.table_of(engine) is TABLE
    expected = [
        _core.HybridConfig(
            lanes=8, layers=10, workers=4, attend_ns=ns, exchange_ns=TABLE.exchange_ns, host_tokens=500 * 16
        ).gain(TABLE.native(), 10, 10_000)
        for ns in (TABLE.attend_ns(4), 7.0)
    ]  # fmt: skip
    assert memory_hybrid.predicted_gains(engine, 1000) == tuple(expected)
    Engine.config = replace(engine.config, hybrid_attention="off")
    assert memory_hybrid.predicted_gains(engine, 1000) == (None, None)


def test_hybrid_is_compared_with_the_best_of_the_gpu_alone() -> None:
    def sample(rate: float, device: float, host: float = 0.0, gain: float | None = None, failed: int = 0) -> Sample:
        places = {"device": [device], "host": [host] if host else []}
        return Sample(rate, places, 7 if host else 0, failed, None if gain is None else 2 * gain, gain)

    samples = {
        "recompute": [sample(90, 4.0), sample(110, 4.2)],
        "swap": [sample(100, 5.0), sample(120, 5.2)],
        "auto": [sample(143, 5.3, 140.0, 0.5), sample(143, 5.5, 160.0, 0.5, failed=2)],
    }
    made = memory_hybrid.summarize("1 GB, 2,048", samples)
    figures = values(made)
    assert figures["1 GB, 2,048: recompute"] == 100
    assert figures["1 GB, 2,048: auto over swap"] == pytest.approx(1.3)
    assert figures["1 GB, 2,048: auto: predicted gain"] == 50
    assert figures["1 GB, 2,048: auto: gain predicted at the start"] == 100
    assert figures["1 GB, 2,048: auto: of the predicted gain"] == pytest.approx(0.6)
    assert figures["1 GB, 2,048: auto: TPOT p50 on the device over swap"] == pytest.approx(5.4 / 5.1)
    assert figures["1 GB, 2,048: auto: TPOT p50, host"] == 150
    assert figures["1 GB, 2,048: auto: TPOT p99, host"] == pytest.approx(159.8)
    assert figures["1 GB, 2,048: auto: sequences on the host"] == 7
    assert {f.name: f.met for f in made if f.met is not None} == {
        "1 GB, 2,048: auto over swap": True,
        "1 GB, 2,048: auto: of the predicted gain": False,
        "1 GB, 2,048: auto: TPOT p50 on the device over swap": False,
        "1 GB, 2,048: auto: attention that failed": False,
    }
    assert values(memory_hybrid.summarize("x", {"auto": samples["auto"]}))["x: auto"] == 143
