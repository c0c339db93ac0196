"""The benchmarks for the GPU, on the simulated device: what they count, and what they make of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode
import overlap
import prefill
import pytest
import replay
import streaming
import torch
from gpu_common import (
    PROMPT_LEN,
    consume_all,
    decode_bytes,
    floor_ms,
    greedy,
    kv_bytes_per_token,
    layer_parameters,
    pairs,
    prefill_flops,
    read_model,
    weight_bytes,
)
from steady import Point, make_window, observe

from asyncengine import testing
from asyncengine.errors import EngineError


def prompts(count: int) -> list[list[int]]:
    return [[300 + i] * PROMPT_LEN for i in range(count)]


def test_window_against_a_calculation_by_hand() -> None:
    def point(tokens: int, us: int) -> Point:
        return Point(tokens, us * 1000)

    # Followed from its 10th token on; the first delivery that counts brings the 26th, the last one the 46th.
    points = [point(11, 0), point(25, 900), point(26, 1000), point(36, 2100), point(46, 3000)]
    window = make_window(points, [10, 10, 7, 2], followed=10, prompt_len=128)
    assert window.steps == 20
    assert window.step_us == 100
    assert window.deliveries == 2
    # Tokens 27 to 46 take tokens 26 to 45 as input, before which are 128 + 25 to 128 + 44 tokens.
    assert window.contexts == [round(128 + 34.5)] * 2 + [round(125 + 34.5), round(120 + 34.5)]
    assert window.tokens_per_s == pytest.approx(40_000)
    with pytest.raises(ValueError, match="more tokens"):
        make_window(points[:3], [10], followed=10, prompt_len=128)


def simulated(**config: Any) -> testing.SimulatedEngine:
    return testing.SimulatedEngine(max_num_seqs=4, enable_prefix_caching=False, **config)


@pytest.mark.parametrize("driver", ["thread", "loop"])
def test_observe_sees_the_steps_in_which_all_decode(driver: str) -> None:
    async def main() -> None:
        async with simulated(step_latency_us=500, step_driver=driver) as engine:
            window, deltas = await observe(engine, 4, consume_all(engine, prompts(4), 100))
            assert deltas <= 400
            assert len(window.contexts) == 4
            assert 1 <= window.deliveries <= window.steps < 100
            assert PROMPT_LEN < min(window.contexts) <= max(window.contexts) < PROMPT_LEN + 100
            await testing.settle(engine)

    asyncio.run(main())


def test_observe_says_when_requests_never_decode_together() -> None:
    async def main(count: int, batch: int) -> None:
        async with simulated() as engine:
            await observe(engine, batch, consume_all(engine, prompts(count), 20))

    with pytest.raises(SystemExit, match="more tokens"):
        asyncio.run(main(2, 3))

    async def fails() -> None:
        raise EngineError("the load itself failed")

    async def failing() -> None:
        async with simulated() as engine:
            await observe(engine, 1, fails())

    with pytest.raises(EngineError, match="itself"):
        asyncio.run(failing())


def test_overlap_over_http_counts_every_token(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> dict[str, Any]:
        async with simulated(step_latency_us=2000) as engine:
            args = argparse.Namespace(tokens=100, replays=1)
            sample = {"case": "x:4", "in-process": await overlap.in_process(engine, 4, args, random.Random(0))}
            sample["SSE"] = await overlap.over_http(engine, 4, args, random.Random(0))
            assert (await engine.generate([300], greedy(2))).usage.completion_tokens == 2  # nothing is held back now
            return sample

    sample = asyncio.run(main())
    assert sample["SSE"]["failures"] == []
    assert sample["SSE"]["tokens per event"] >= 1
    assert 0 < sample["SSE"]["steps"] < 100
    figures = {figure.name: figure for figure in overlap.summarize([sample, sample])}
    assert figures["x:4 SSE: streams lost or short"].met is True
    assert figures["x:4 in-process: engine"].value == pytest.approx(sample["in-process"]["step_us"])


def test_overlap_compares_within_a_repeat() -> None:
    base = dict.fromkeys(("tokens/s", "process_cpu_us_per_token", "loop_cpu_us_per_token"), 1.0)
    runs = [base | {"step_us": s, "bare_us": b, "ratio": s / b} for s, b in ((101, 100), (210, 200), (50, 40))]
    figures = {f.name: f for f in overlap.summarize([{"case": "gpt2:64", "in-process": run} for run in runs])}
    assert figures["gpt2:64 in-process: engine over bare"].value == pytest.approx(1.05)
    assert figures["gpt2:64 in-process: engine over bare"].met is False
    assert figures["gpt2:64 in-process: bubble"].value == pytest.approx(100 * (1 - 1 / 1.05))


def test_ablation_compares_with_the_default() -> None:
    def sample(variant: str, step: float) -> dict[str, Any]:
        return {"case": "x:1", "variant": variant, "step_us": step, "tokens/s with prefill": 1000 / step}

    # The run broke off after the second variant.
    samples = [sample("default", s) for s in (90, 100, 300)] + [sample("one step in flight", 150)]
    figures = {figure.name: figure.value for figure in overlap.summarize_ablation(samples)}
    assert figures["x:1 one step in flight: step over default"] == pytest.approx(1.5)
    assert figures["x:1 one step in flight: output over default"] == pytest.approx(1 / 1.5)
    assert len(figures) == 8


def test_cases() -> None:
    assert overlap.parse_cases("gpt2:64,a:b/c:1") == [("gpt2", 64), ("a:b/c", 1)]
    for wrong in ("gpt2", "gpt2:0", ":4", "gpt2:x"):
        with pytest.raises(argparse.ArgumentTypeError, match="shape:batch"):
            overlap.parse_cases(wrong)


def test_streaming_statistics_by_hand() -> None:
    first = streaming.Trace(0.0, 0.001, 0.0015, [0.011, 0.021, 0.041], 4, 9, queue_s=0.002, prefill_s=0.006)
    second = streaming.Trace(1.0, 1.003, 1.004, [1.013, 1.023], 2, 9, queue_s=0.004, prefill_s=0.008)
    values = streaming.statistics([first, second])
    assert values["submit lag p50"] == pytest.approx(2)
    assert values["add_request p50"] == pytest.approx(0.75)
    assert values["queue wait p50"] == pytest.approx(3)
    assert values["prefill to first token p50"] == pytest.approx(7)
    assert values["TTFT p50"] == pytest.approx(10)
    assert values["TPOT p50"] == pytest.approx(10)
    assert values["ITL p50"] == pytest.approx(10)
    assert values["ITL max"] == pytest.approx(20)
    assert values["latency p50"] == pytest.approx(30)
    assert values["throughput"] == pytest.approx(6 / (1.023 - 0.001))
    assert values["tokens per delivery"] == pytest.approx(6 / 5)
    figures = {f.name: f for f in streaming.summarize("gpt2", [values, values | {"ITL max": 50.0}])}
    assert figures["ITL max"].value == 50
    assert figures["ITL p99 over p50"].value == pytest.approx(values["ITL p99"] / 10)
    assert figures["TTFT p50"].met is False


def test_streaming_plays_all_requests() -> None:
    async def main() -> list[streaming.Trace]:
        async with simulated(step_latency_us=200) as engine:
            return await streaming.play(engine, 6, 0.002, 9)

    traces = asyncio.run(main())
    assert [trace.tokens for trace in traces] == [9] * 6
    for trace in traces:
        assert trace.due <= trace.submitted <= trace.accepted <= trace.deliveries[0]
        assert trace.deliveries == sorted(trace.deliveries)
        assert min(trace.queue_s, trace.prefill_s) >= 0


def test_decode_step_is_the_difference_of_medians() -> None:
    assert decode.step_ms({64: [1.0, 9.0, 2.0], 256: [4.0, 3.92, 30.0]}) == pytest.approx(1000 * 2.0 / 192)


def test_decode_generates_and_reports_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> float:
        async with simulated() as engine:
            return await decode.generate(engine, random.Random(0), 3, 5)

    assert asyncio.run(main()) > 0
    result: dict[str, Any] = {
        "ready_s": 9.0,
        "first_token_s": 29.0,
        "step_ms": {1: 4.0, 8: 6.0},
        "floor_ms": {1: 3.4, 8: 3.5},
    }
    result["contexts"] = [{"batch": 1, "context": 256} | decode.achieved(read_model("llama-3.1-8b"), 1, 256, 4.0)]
    result["contexts"].append({"batch": 256, "context": 16384, "skipped": "it does not fit"})
    result["batch-invariant"] = {"step_ms": {1: 5.0, 8: 6.0}, "contexts": [result["contexts"][0] | {"ms": 6.0}]}
    result = json.loads(json.dumps(result))
    figures = {figure.name: figure for figure in decode.summarize("llama-3.1-8b", result)}
    assert figures["llama-3.1-8b, batch 1"].at_most == 3.9
    assert figures["llama-3.1-8b, batch 8"].met is False
    assert figures["llama-3.1-8b, batch 1, of the fastest peer's"].value == pytest.approx(4.0 / 4.84)
    assert figures["llama-3.1-8b, batch 8, of the fastest peer's"].met is False
    assert figures["llama-3.1-8b, process start to first token"].met is False
    assert figures["llama-3.1-8b, 1 x 256: of the bandwidth"].value == pytest.approx(100 * 3.42 / 4.0, rel=0.01)
    assert figures["llama-3.1-8b, batch 1, batch-invariant over default"].value == 1.25
    assert figures["llama-3.1-8b, 1 x 256, batch-invariant over default"].value == 1.5
    decode.print_table({"llama-3.1-8b": result})
    printed = capsys.readouterr().out
    lines = {line[:20].strip(): line[20:].split() for line in printed.splitlines() if line}
    assert lines["tokens/s"] == ["250", "1,333"]
    assert lines["of the bandwidth"] == ["85.0%", "58.3%"]
    assert "left out: it does not fit" in printed
    assert lines["asyncengine"] == ["4.000", "6.000", "9.0", "s"]
    assert lines["vLLM 0.26.0"] == ["4.900", "5.090", "65.0", "s"]
    assert lines["target"] == ["3.900", "4.000", "20.0", "s"]


def test_contexts_that_do_not_fit_are_left_out() -> None:
    assert decode.parse_counts("256,2k") == [256, 2048]
    assert decode.parse_counts("") == []
    info = SimpleNamespace(num_kv_blocks=1000, block_size=16, kv_capacity_tokens=16000)
    gpt2, llama = read_model("gpt2"), read_model("llama-3.1-8b")
    assert decode.reason_to_skip(gpt2, info, 1, 1024) is None  # type: ignore[arg-type]
    assert "1,024 positions" in str(decode.reason_to_skip(gpt2, info, 1, 1025))  # type: ignore[arg-type]
    assert decode.reason_to_skip(llama, info, 7, 2048) is None  # type: ignore[arg-type]
    assert "16,000 tokens, 7 such" in str(decode.reason_to_skip(llama, info, 8, 2048))  # type: ignore[arg-type]


def test_decode_sweeps_batches_and_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep replays the right batches and contexts over filled keys and values; the GPU itself is a stand-in."""
    memory = torch.full((2, 2, 4, 8), torch.nan)
    runner = SimpleNamespace(graphs=None, steps=SimpleNamespace(cache=SimpleNamespace(groups=memory)))
    replayed = []

    def bare(runner: Any, rows: list[replay.Row], replays: int, next_step: int, *, own_tables: bool) -> float:
        assert not memory.isnan().any()
        assert own_tables
        replayed.append((rows, replays, next_step))
        return 2000.0

    async def main() -> list[dict[str, Any]]:
        async with simulated() as engine:
            loaded = replace(engine._life.loaded(), keep_alive=runner)
            monkeypatch.setattr(engine._life, "loaded", lambda: loaded)
            args = argparse.Namespace(
                contexts=[256, 2048],
                batches=[1, 8],
                between=[3, 8, 9],
                replays=5,
                quantization="none",
                kv_cache_dtype="auto",
            )
            return await decode.sweep(engine, read_model("gpt2"), args)

    monkeypatch.setattr(replay, "bare_step_us", bare)
    points = asyncio.run(main())
    assert [rows for rows, _, _ in replayed] == [[(1, 255)] * batch for batch in (1, 3, 8)]
    assert [(p["batch"], p["context"], "skipped" in p) for p in points] == [
        (1, 256, False), (3, 256, False), (8, 256, False), (1, 2048, True), (8, 2048, True)
    ]  # fmt: skip
    assert points[2]["tokens/s"] == 4000
    assert points[2]["TB/s"] == pytest.approx((247e6 + 8 * 256 * 36864) / 2e-3 / 1e12, rel=0.01)


def test_decode_measures_both_modes_in_alternation(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int, int]] = []

    async def generate(engine: Any, rng: random.Random, batch: int, tokens: int) -> float:
        order.append((engine.name, batch, tokens))
        return tokens * (0.001 if engine.name == "a" else 0.002)

    monkeypatch.setattr(decode, "generate", generate)
    info = SimpleNamespace(kv_capacity_tokens=1)
    engines: Any = {mode: SimpleNamespace(name=name, model_info=info) for mode, name in (("x", "a"), ("y", "b"))}
    args = argparse.Namespace(batches=[2], short=1, long=3, repeats=2)
    measured = asyncio.run(decode.measure(engines, random.Random(0), args))
    assert order == [("a", 2, 1), ("b", 2, 1), *[("a", 2, 1), ("a", 2, 3), ("b", 2, 1), ("b", 2, 3)] * 2]
    assert measured["x"]["step_ms"] == {2: pytest.approx(1.0)}
    assert measured["y"]["step_ms"] == {2: pytest.approx(2.0)}


def test_prefill_through_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> float:
        async with simulated() as engine:
            return await prefill.generate(engine, random.Random(0), 3, 100)

    seconds = asyncio.run(main())
    assert seconds > 0
    c = read_model("llama-3.1-8b")
    # 2 x 7.5 billion parameters x 2,048 tokens in 68 ms are 450 TFLOP/s, with attention some more.
    result = {
        "matrix_rate": 700e12,
        "prompts": [prefill.engine_point(c, 2048, 16, [0.068 * 16], 700e12)],
        "chunks": [prefill.chunk_point(c, 2048, 14336, 100e3, 700e12)],
    }
    prefill.print_table("llama-3.1-8b", result)
    assert "16 prompts of 2048" in capsys.readouterr().out
    figures = {figure.name: figure for figure in prefill.summarize("llama-3.1-8b", result)}
    share = figures["llama-3.1-8b, prompts of 2048: of the matrix rate"]
    assert share.value == pytest.approx(100 * 2 * 6.98e9 * 2048 / 0.068 / 700e12, rel=0.05)
    assert share.met is True
    later = figures["llama-3.1-8b, chunk of 2048 after 14336: of the matrix rate"]
    assert later.value == pytest.approx(100 * (28.6e12 + 4 * 4096 * 32 * 2048 * 15360) / 0.1 / 700e12, rel=0.02)


def test_prefill_replays_the_chunks_that_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.full((2, 2, 4, 8), torch.nan)
    runner = SimpleNamespace(graphs=None, steps=SimpleNamespace(cache=SimpleNamespace(groups=memory)))

    def bare(runner: Any, rows: list[replay.Row], replays: int, next_step: int, *, own_tables: bool) -> float:
        assert not memory.isnan().any()
        return 1000.0 + rows[0].context

    async def main() -> list[dict[str, float]]:
        async with simulated(max_model_len=8300) as engine:
            loaded = replace(engine._life.loaded(), keep_alive=runner)
            monkeypatch.setattr(engine._life, "loaded", lambda: loaded)
            args = argparse.Namespace(replays=5)
            return await prefill.replay_chunks(engine, read_model("qwen3-0.6b"), 700e12, args)

    monkeypatch.setattr(replay, "bare_step_us", bare)
    points = asyncio.run(main())
    assert [(p["chunk"], p["context"], p["ms"]) for p in points] == [(2048, 0, 1.0), (2048, 6144, 7.144)]
    assert points[0]["tokens/s"] == 2_048_000
    assert points[0]["share"] == pytest.approx(points[0]["TFLOP/s"] / 700)


# ---- what a step must cost ----


def test_parameters_and_bytes() -> None:
    """Counts equal the published counts of parameters, less embeddings, norms and biases."""
    assert layer_parameters(read_model("gpt2")) == 12 * 12 * 768**2
    assert layer_parameters(read_model("qwen3-0.6b")) == pytest.approx(0.44e9, rel=0.01)
    llama = read_model("llama-3.1-8b")
    assert layer_parameters(llama) + 2 * llama.vocab_size * llama.hidden_size == pytest.approx(8.03e9, rel=0.001)
    assert weight_bytes(llama) == pytest.approx(15.0e9, rel=0.01)
    assert weight_bytes(llama, "fp8") == pytest.approx(8.03e9, rel=0.01)
    assert kv_bytes_per_token(llama) == 131072
    mixture = read_model("qwen3-30b-a3b")
    embeddings = 2 * mixture.vocab_size * mixture.hidden_size
    assert layer_parameters(mixture, rows=1000) + embeddings == pytest.approx(30.5e9, rel=0.005)
    assert layer_parameters(mixture) + embeddings == pytest.approx(3.35e9, rel=0.01)
    gemma = read_model("gemma-4-26b-a4b")  # an MLP beside the experts, heads of two sizes, keys that are values
    embeddings = gemma.vocab_size * gemma.hidden_size
    assert layer_parameters(gemma, rows=1000) + embeddings == pytest.approx(25.2e9, rel=0.005)
    assert layer_parameters(gemma) + embeddings == pytest.approx(3.8e9, rel=0.01)
    latent = read_model("glm-4.7-flash")
    embeddings = 2 * latent.vocab_size * latent.hidden_size
    assert layer_parameters(latent, rows=1000) + embeddings == pytest.approx(29.9e9, rel=0.01)
    assert kv_bytes_per_token(latent) == 47 * (512 + 64) * 2


@pytest.mark.parametrize(("shape", "floor"), [("gpt2", 0.058), ("qwen3-0.6b", 0.28), ("llama-3.1-8b", 3.42)])
def test_decode_floor(shape: str, floor: float) -> None:
    c = read_model(shape)
    assert floor_ms(c, 1, 256) == pytest.approx(floor, rel=0.03)
    assert decode_bytes(c, 8, 100) - decode_bytes(c, 8, 99) == 8 * kv_bytes_per_token(c)
    windowed = replace(c, layer_caches=tuple(spec._replace(window=50) for spec in c.kv_specs))
    assert decode_bytes(windowed, 8, 100) == decode_bytes(c, 8, 50)


def test_pairs_by_counting() -> None:
    for query, context, window in ((1, 0, 0), (3, 5, 0), (7, 0, 4), (6, 9, 4), (6, 2, 4)):
        seen = [min(position + 1, window or position + 1) for position in range(context, context + query)]
        assert pairs(query, context, window) == sum(seen)
    c = read_model("gpt2")
    halves = prefill_flops(c, 100, 0) + prefill_flops(c, 100, 100)
    assert halves - prefill_flops(c, 200, 0) == pytest.approx(2 * c.vocab_size * c.hidden_size)


def test_scripts_keep_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that fails does not take the others' figures with it."""
    path = tmp_path / "decode.json"
    result = {"ready_s": 1.0, "first_token_s": 2.0, "step_ms": {"1": 3.0}, "floor_ms": {"1": 1.0}}

    def worker(model: str, args: argparse.Namespace) -> dict[str, Any]:
        if model == "bad":
            raise SystemExit("no memory")
        return result

    monkeypatch.setattr(decode, "run_worker", worker)
    monkeypatch.setattr("sys.argv", ["bench/decode.py", "--model", "a", "--model", "bad", "--json", str(path)])
    with pytest.raises(SystemExit, match="no memory"):
        decode.main()
    record = json.loads(path.read_text())
    assert {figure["name"]: figure["value"] for figure in record["figures"]}["a, batch 1"] == 3.0
