"""The benchmarks run, count what they claim to count, and notice what is wrong. No timing is asserted."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.lengths import Lengths
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.cli.benchmarks.serve import Options, Outcome, measure, print_block
from asyncengine.cli.benchmarks.sse_client import SseResult, Target, read_sse
from asyncengine.cli.main import main
from asyncengine.errors import ConfigError

BLOCK = """\
Successful requests: Failed requests: Benchmark duration (s): Total input tokens: Total generated tokens:
Request throughput (req/s): Output token throughput (tok/s): Peak output token throughput (tok/s):
Peak concurrent requests: Total token throughput (tok/s):
Mean TTFT (ms): Median TTFT (ms): P99 TTFT (ms): Mean TPOT (ms): Median TPOT (ms): P99 TPOT (ms):
Mean ITL (ms): Median ITL (ms): P99 ITL (ms): Mean E2EL (ms): Median E2EL (ms): P99 E2EL (ms):"""


def figures_of(path: Path) -> dict[str, float]:
    """The figures of a saved record, which must have everything that a record must have."""
    record = json.loads(path.read_text())
    assert {"command", "commit", "date", "versions", "hardware", "repeats", "settings"} <= record.keys()
    assert {"python", "torch", "asyncengine"} <= record["versions"].keys()
    assert {"processor", "instruction sets", "cores", "MemTotal"} <= record["hardware"].keys()
    assert all(figure["unit"] for figure in record["figures"])
    return {figure["name"]: figure["value"] for figure in record["figures"]}


def test_core_measures_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "core.json"
    sizes = ["--num-seqs", "16", "--num-seqs", "256", "--num-seqs", "300"]
    assert main(["bench", "core", "--repeats", "2", *sizes, "--json", str(path)]) == 0
    figures = figures_of(path)
    assert set(figures) == {
        *(f"decode step, {n} sequences{wants}" for n in (16, 256, 300) for wants in ("", " with log probabilities")),
        "cost per sequence, 300 over 256",
        "prefix match, 8192 tokens",
    }
    assert all(value > 0 for value in figures.values())
    assert "target" not in capsys.readouterr().out


def test_latency_and_throughput_of_the_bundled_model(tmp_path: Path) -> None:
    small = ["--input-len", "4-6", "--output-len", "3", "--cpu-threads", "1"]
    path = tmp_path / "latency.json"
    assert main(["bench", "latency", "--num-prompts", "2", *small, "--json", str(path)]) == 0
    figures = figures_of(path)
    assert {f"{name} {which}" for name in ("TTFT", "TPOT", "ITL") for which in ("mean", "p50", "p95", "p99")} == set(
        figures
    )
    assert main(["bench", "throughput", "--num-prompts", "3", "--repeats", "1", *small, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    ((_, prompt_tokens, generated),) = record["rounds"]
    assert 12 <= prompt_tokens <= 18
    assert generated == 9


def test_serve_starts_a_server_and_prints_the_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serve.json"
    monkeypatch.setattr("sys.argv", ["asyncengine", "bench", "serve", "--api-key", "hidden"])
    options = ["--num-prompts", "4", "--output-len", "5", "--input-len", "3", "--max-concurrency", "2"]
    arguments = ["--", "--cpu-threads", "1", "--api-key", "hidden"]
    assert main(["bench", "serve", *options, "--api-key", "hidden", "--json", str(path), *arguments]) == 0
    figures = figures_of(path)
    assert figures["Successful requests"] == 4
    assert figures["Failed requests"] == 0
    assert figures["Total generated tokens"] == 20
    assert figures["Peak concurrent requests"] == 2
    assert "hidden" not in path.read_text()
    assert labels(capsys.readouterr().out) == BLOCK.replace("\n", " ")


def labels(block: str) -> str:
    return " ".join(line.rpartition(":")[0] + ":" for line in block.splitlines() if ":" in line)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--num-prompts", "0"],
        ["serve", "--num-warmups", "-1"],
        ["serve", "--request-rate", "0"],
        ["serve", "--input-len", "9-3", "--url", "http://127.0.0.1:9", "--model", "m"],
        ["serve", "--url", "ftp://127.0.0.1"],
        ["serve", "--url", "http://127.0.0.1:9", "--", "model"],
        ["latency", "--num-prompts", "0"],
        ["latency", "--num-warmups", "-1"],
        ["throughput", "--num-prompts", "-3"],
        ["throughput", "--repeats", "0"],
        ["core", "--num-seqs", "16", "--num-seqs", "0"],
        ["core", "--steps", "0"],
        ["core", "--repeats", "0"],
    ],
)
def test_wrong_options_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert "asyncengine: error:" in capsys.readouterr().err


# ---- the client, against a server that does what it is told ----

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(value: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": value, "finish_reason": reason}], "usage": None})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"
GOOD = text("Hel") + text("lo", "length") + USAGE + DONE


def chunked(body: bytes, size: int) -> bytes:
    """``body`` in chunks of ``size`` bytes, which cut events anywhere."""
    pieces = (body[i : i + size] for i in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def answered_with(response: bytes, piece: int = 1 << 16) -> SseResult:
    """Return the client's result for a response that arrives in pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for i in range(0, len(response), piece):
            writer.write(response[i : i + piece])
            await writer.drain()
            if piece < len(response):
                await asyncio.sleep(0)

    return asyncio.run(with_server(serve, lambda url: read_sse(Target.parse(url, "/v1/completions"), b"\r\n\r\n", 5)))


async def with_server(serve: Callable[..., Any], use: Callable[[str], Any]) -> Any:
    """Let ``serve(reader, writer)`` answer connections while ``use(url)`` runs."""
    connections: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        await serve(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        result = await use(f"http://{host}:{port}")
        await asyncio.gather(*connections)
        return result


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("piece", [3, 1 << 16])
def test_client_reads_streams_however_they_are_cut(chunk: int, piece: int) -> None:
    result = answered_with(HEAD + chunked(b": ping\n\n" + GOOD, chunk), piece)
    assert result.failure is None
    assert "".join(result.texts) == "Hello"
    assert len(result.text_times) == 2
    assert (result.prompt_tokens, result.completion_tokens, result.finish_reason) == (3, 2, "length")


def test_client_reads_chat_and_streams_that_are_not_chunked() -> None:
    delta = {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]}
    result = answered_with(b"HTTP/1.0 200 OK\r\n\r\n" + event(delta) + USAGE + DONE)
    assert result.failure is None
    assert result.texts == ["Hi"]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (b"HTTP/1.1 503 Busy\r\n\r\n{}", "HTTP status 503: {}"),
        (HEAD + chunked(text("Hel"), 1 << 16), "lost before [DONE]"),
        (HEAD + chunked(GOOD, 1 << 16)[:-40], "lost before [DONE]"),
        (HEAD + chunked(text("Hello") + USAGE + DONE, 1 << 16), "no finish_reason"),
        (HEAD + chunked(text("Hello", "stop") + DONE, 1 << 16), "no usage"),
        (HEAD + chunked(event({"error": {"message": "dead"}}), 1 << 16), "error event: {'message': 'dead'}"),
        (HEAD + chunked(GOOD + text("more"), 1 << 16), "an event after [DONE]"),
        (HEAD + chunked(b"data: {\n\n", 1 << 16), "malformed"),
        (b"nonsense\r\n\r\n", "malformed"),
        (b"", "lost before [DONE]"),
    ],
)
def test_client_says_why_a_stream_is_not_complete(response: bytes, reason: str) -> None:
    failure = answered_with(response).failure
    assert failure is not None
    assert reason in failure


def test_client_gives_up_on_a_stream_that_does_not_end() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await reader.read()

    result = asyncio.run(with_server(serve, lambda url: read_sse(Target.parse(url, "/"), b"\r\n\r\n", 0.05)))
    assert "did not end within 0.05 s" in (result.failure or "")


def test_serve_counts_short_streams_as_failed() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunked(GOOD, 1 << 16))

    def run(output_len: str) -> Outcome:
        options = Options(num_prompts=3, output_len=output_len, num_warmups=0, model="m")
        outcome: Outcome = asyncio.run(with_server(serve, lambda url: measure(options, url, None)))
        return outcome

    assert run("2").failures == []
    assert run("5").failures == ["the stream is short: 2 of 5 tokens"] * 3


# ---- arithmetic ----


def test_outcome_against_a_calculation_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    def good(start: float, times: list[float], tokens: int) -> SseResult:
        return SseResult(
            start, times, ["x"] * len(times), times[-1], prompt_tokens=10, completion_tokens=tokens,
            finish_reason="length", done=True,
        )  # fmt: skip

    lost = SseResult(0.5, ended=0.6, error="lost")
    # Two tokens in the last event of the second stream.
    outcome = Outcome([good(0.0, [0.1, 0.2, 0.4], 3), good(0.3, [0.5, 1.3], 3), lost], 2.0)
    figures = outcome.figures()
    values = {figure.name: figure.value for figure in figures}
    assert values["Successful requests"] == 2
    assert values["Failed requests"] == 1
    assert values["Total input tokens"] == 20
    assert values["Total generated tokens"] == 6
    assert values["Request throughput (req/s)"] == 1
    assert values["Output token throughput (tok/s)"] == 3
    assert values["Total token throughput (tok/s)"] == 13
    assert values["Peak output token throughput (tok/s)"] == 3 + 1.5
    assert values["Peak concurrent requests"] == 2
    assert values["Mean TTFT (ms)"] == pytest.approx(150)
    assert values["Mean TPOT (ms)"] == pytest.approx((150 + 400) / 2)
    assert values["Median ITL (ms)"] == pytest.approx(200)
    assert values["Mean E2EL (ms)"] == pytest.approx((400 + 1000) / 2)
    print_block(figures)
    assert labels(capsys.readouterr().out) == BLOCK.replace("\n", " ")


@pytest.mark.parametrize("seconds", [0.05, 0.3, 0.999, 1.0, 1.5, 2.999, 7.3])
def test_the_peak_is_no_less_than_the_mean(seconds: float) -> None:
    for places in ([0.0], [0.999], [0.0, 0.999], [i / 40 for i in range(40)], []):
        times = [100 + seconds * place for place in places]
        stream = SseResult(100.0, times, ["x"] * len(times), 100 + seconds, completion_tokens=80)
        stream.done, stream.finish_reason = True, "length"
        values = {f.name: f.value for f in Outcome([stream], seconds).figures()}
        mean, peak = (values[f"{name} token throughput (tok/s)"] for name in ("Output", "Peak output"))
        assert mean == pytest.approx(80 / seconds)
        assert peak >= mean * (1 - 1e-9)
        if seconds >= 1 and len(places) == 1:
            assert 80 / 2 < peak <= 80  # of a part that is at least a second long


def test_outcome_of_nothing_but_failures_is_still_a_report(tmp_path: Path) -> None:
    figures = Outcome([SseResult(0.0, ended=1.0)], 1.0).figures()
    report.write(tmp_path / "x.json", report.record("x", figures, repeats=1, settings={}))
    assert figures_of(tmp_path / "x.json")["Mean TTFT (ms)"] is None


def test_percentiles_and_targets() -> None:
    assert report.percentile([4, 1, 3, 2], 50) == 2.5
    assert report.percentile([4, 1, 3, 2], 100) == 4
    assert report.percentile([7], 99) == 7
    assert math.isnan(report.percentile([], 50))
    assert Figure("x", 2, "s").met is None
    assert Figure("x", 2, "s", at_most=2).met is True
    assert Figure("x", 2, "s", at_least=3).met is False


def test_lengths() -> None:
    assert Lengths.parse("input_len", "16") == Lengths(16, 16)
    assert Lengths.parse("input_len", "16-128") == Lengths(16, 128)
    for wrong in ("", "0", "3-2", "-4", "a-b", "1-2-3"):
        with pytest.raises(ConfigError, match="input_len"):
            Lengths.parse("input_len", wrong)
