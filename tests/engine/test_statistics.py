"""Statistics of an engine: every statistic of the core, and the place where each token was made."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncengine import SamplingParams, _core, testing
from asyncengine.api.outputs import FinishReason, RequestTiming, Usage
from asyncengine.api.stats import DebugStats, EngineStats
from asyncengine.engine.stream import RequestStream
from asyncengine.server.metrics import Metrics
from asyncengine.text.tokenizer import placeholder_tokenizer

STATS = Path(__file__).resolve().parents[2] / "csrc/core/stats.inl"
NOT_EXPORTED = {
    "failed_steps", "decode_cost_ppm", "rest_cost_ppm", "attention_cost_ppm", "hybrid_cost_ppm", "host_attention_ns",
    "host_attention_tokens",
}  # fmt: skip
HOST_ROWS = {"num_host_rows", "host_row_tokens", "moved_to_host", "moved_from_host", "failed_host_rows"}


def test_every_statistic_of_the_core_is_told() -> None:
    """Numbers, as the server exports them, are of those that the core counts."""
    named = set(re.findall(r"^STAT\((\w+)\)", STATS.read_text(), re.MULTILINE))
    told = {field.name for cls in (EngineStats, DebugStats) for field in fields(cls)}
    assert named - told == NOT_EXPORTED
    assert named >= HOST_ROWS

    async def main() -> tuple[EngineStats, dict[str, int]]:
        async with testing.SimulatedEngine() as engine:
            await engine.generate([300], SamplingParams(max_tokens=3, ignore_eos=True))
            return engine.stats(), engine._life.loaded().step_loop.stats()

    stats, snapshot = asyncio.run(main())
    assert set(snapshot) == named
    assert stats.generation_tokens == 3
    assert stats.host_row_tokens == 0
    info = SimpleNamespace(block_size=16, num_kv_blocks=64, kv_bytes_per_sequence=4096)
    engine: Any = SimpleNamespace(engine_stats=lambda: [stats], model_info=info)
    text = Metrics(lambda: engine, lambda: "m", lambda: 0).render().decode()
    for name in HOST_ROWS:
        counter = "" if name == "num_host_rows" else "_total"
        assert f'\nasyncengine:{name}{counter}{{model_name="m"}} 0.0\n' in text


@pytest.mark.parametrize("driver", ["thread", "loop"])
def test_tokens_of_each_step_are_a_histogram(driver: str) -> None:
    async def main() -> EngineStats:
        async with testing.SimulatedEngine(prefill_chunk_size=32, step_driver=driver) as engine:
            assert engine.stats().step_tokens.total == 0
            await engine.generate([300] * 50, SamplingParams(max_tokens=4, ignore_eos=True))
            return engine.stats()

    stats = asyncio.run(main())
    bounds, counts, total = stats.step_tokens
    assert list(bounds) == sorted(bounds)
    assert dict(zip((*bounds, None), counts, strict=True)) == dict.fromkeys((*bounds, None), 0) | {1: 3, 32: 2}
    assert total == 50 + 3  # the last token is not computed on
    assert sum(counts) == stats.num_steps == 5
    engine: Any = SimpleNamespace(
        engine_stats=lambda: [stats],
        model_info=SimpleNamespace(block_size=16, num_kv_blocks=64, kv_bytes_per_sequence=4096),
    )
    lines = Metrics(lambda: engine, lambda: "m", lambda: 0).render().decode().splitlines()
    name = "asyncengine:iteration_tokens_total"
    for bound, count in (("1.0", 3), ("16.0", 3), ("32.0", 5), ("16384.0", 5), ("+Inf", 5)):
        assert f'{name}_bucket{{le="{bound}",model_name="m"}} {float(count)}' in lines
    assert f'{name}_sum{{model_name="m"}} 53.0' in lines


# ---- where tokens were made ----


class Owner:
    """An engine of one stream."""

    rank = 0

    def check_loop(self) -> None: ...
    def forget(self, key: int) -> None: ...
    def drop(self, key: int) -> None: ...
    def stop_sequence(self, key: int, index: int) -> None: ...
    def fail(self, key: int, error: Exception) -> None: ...


def news(
    tokens: list[int], host_tokens: int, finish: _core.FinishReason, index: int = 0, records: tuple[Any, ...] = ()
) -> Any:
    fields: Any = (1, index, tokens, finish, 10, 20, 5, 0, (), records, host_tokens)
    return _core.SequenceNews(fields)


def make_stream(params: SamplingParams) -> RequestStream:
    return RequestStream(Owner(), placeholder_tokenizer(testing.VOCAB_SIZE), 1, "a", [300], params, 0.0)


def test_deltas_and_the_timing_say_how_many_tokens_the_host_made() -> None:
    goes_on, ends = _core.FinishReason.none, _core.FinishReason.length

    async def main() -> None:
        stream = make_stream(SamplingParams(max_tokens=9, n=2))
        stream.feed(news([300, 301], 0, goes_on))
        stream.feed(news([300], 1, goes_on, index=1))
        assert [(d.index, d.host_tokens) for d in [await anext(stream), await anext(stream)]] == [(0, 0), (1, 1)]
        stream.feed(news([302, 303], 2, goes_on))
        stream.feed(news([304, 305, 306], 1, goes_on))
        delta = await anext(stream)
        assert (len(delta.token_ids), delta.host_tokens) == (5, 3)
        stream.feed(news([300], 0, ends, index=1))
        stream.feed(news([307, 308], 2, ends))
        *_, last = [delta async for delta in stream]
        assert last.host_tokens == 2
        timing = last.timing
        assert timing is not None
        assert (timing.completion_tokens, timing.host_tokens, timing.decoded_on) == (9, 5, "host")

    asyncio.run(main())


def test_tokens_behind_a_stop_string_count_nowhere() -> None:
    async def main() -> None:
        tokenizer = placeholder_tokenizer(testing.VOCAB_SIZE)
        word = tokenizer.decode([302]).strip()
        stream = make_stream(SamplingParams(max_tokens=9, stop=[word]))
        stream.feed(news([301], 1, _core.FinishReason.none))
        stream.feed(news([302, 303, 304], 3, _core.FinishReason.none))
        stream.feed(news([305], 1, _core.FinishReason.length))
        (output,) = (await stream.collect()).outputs
        assert output.token_ids == (301, 302)
        assert output.finish_reason is FinishReason.STOP
        assert stream._timing().host_tokens == 2

    asyncio.run(main())


@pytest.mark.parametrize(("host_tokens", "place"), [(0, "device"), (5, "device"), (6, "host"), (10, "host")])
def test_latencies_have_a_class_for_each_place(host_tokens: int, place: str) -> None:
    metrics = Metrics(lambda: None, lambda: "m", lambda: 0)
    metrics.of(0).request_finished(RequestTiming(0.0, 0.0, 1.0, 2.8, 10, host_tokens), Usage(3, 10))
    metrics.of(0).tokens_came(0.9, 9, min(host_tokens, 9))
    text = metrics.render().decode()

    def value(name: str, at: str) -> float:
        found = re.search(rf'^asyncengine:{name}{{decoded_on="{at}",model_name="m"}} (\S+)$', text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    other = {"device": "host", "host": "device"}[place]
    assert value("request_time_per_output_token_seconds_sum", place) == pytest.approx(0.2)
    assert value("request_time_per_output_token_seconds_count", other) == 0
    assert value("inter_token_latency_seconds_count", "host") == min(host_tokens, 9)
    assert value("inter_token_latency_seconds_count", "device") == 9 - min(host_tokens, 9)
    assert value("inter_token_latency_seconds_sum", "host") == pytest.approx(0.1 * min(host_tokens, 9))
