"""Service to operators of the server: a line for each request, probes, metrics without a key, the socket's mode."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncengine.errors import ConfigError
from asyncengine.server.config import ServerConfig
from asyncengine.testing import SimulatedEngine
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, serving
from tests.server.server_process import FAKE, process

ID = {"X-Request-Id": "mine"}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Fields of the access log's lines so far, with their level."""
    own = [record for record in caplog.records if record.name == "asyncengine.access"]
    return [record.__dict__["fields"] | {"level": record.levelname} for record in own]


async def test_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncengine.access")
    async with serving(FakeEngine("Once upon a time.", ends=True)) as site:
        asked = {"prompt": "abc", "max_tokens": 3, "n": 2}
        assert (await site.request("POST", COMPLETIONS, json=asked, headers=ID)).status == 200
        await site.events(CHAT, messages=USER, max_tokens=2)
        assert (await site.post(COMPLETIONS, prompt="abc", temperature=9)).status == 400
        assert (await site.get("/v1/models/fake")).status == 200
        assert (await site.get("/no%0Aroute")).status == 404
        for quiet in ("/health", "/live", "/metrics"):
            await site.get(quiet)
    plain, chat, refused, model, unknown = lines(caplog)
    assert plain.pop("seconds") >= plain.pop("first_token_s") >= 0
    assert plain == {
        "method": "POST", "route": COMPLETIONS, "status": 200, "prompt_tokens": 3, "completion_tokens": 6,
        "cached_tokens": 1, "request_id": "mine", "level": "INFO",
    }  # fmt: skip
    assert (chat["route"], chat["status"], chat["completion_tokens"]) == (CHAT, 200, 2)
    assert (refused["route"], refused["status"]) == (COMPLETIONS, 400)
    assert "prompt_tokens" not in refused
    assert (model["method"], model["route"], model["status"]) == ("GET", "/v1/models/", 200)
    assert (unknown["route"], unknown["status"]) == (r"'/no\nroute'", 404)
    assert "\n" not in caplog.records[-1].getMessage()


async def test_lines_of_vectors_have_tokens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncengine.access")
    async with SimulatedEngine(replies=["x"], max_model_len=64) as engine, serving(engine) as site:  # type: ignore[arg-type]
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/embeddings", {"input": ["abc", "de"]}),
            ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
            ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ]
        usages = [(await site.post(path, **fields)).json["usage"] for path, fields in asked]
        assert (await site.post("/v1/embeddings", input="a" * 99)).status == 400
    *answered, refused = lines(caplog)
    assert [line["prompt_tokens"] for line in answered] == [usage["prompt_tokens"] for usage in usages]
    assert answered[0]["prompt_tokens"] == 5
    assert {line["completion_tokens"] for line in answered} == {0}
    assert "prompt_tokens" not in refused


async def test_a_client_that_leaves_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncengine.access")
    async with serving(FakeEngine(step_s=0.01, max_model_len=10**6)) as site:
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                await site.post(COMPLETIONS, prompt="abc", max_tokens=10**5)
        async with asyncio.timeout(10):
            await site.server.app.idle()
    assert [line["status"] for line in lines(caplog)] == [499]


@pytest.mark.parametrize("form", ["text", "json"])
async def test_the_log_of_a_process(form: str) -> None:
    async with process(FAKE, "--log-format", form) as server:
        await server.read_log("ready on")
        async with aiohttp.ClientSession() as session:
            for i in range(50):  # more than one statement may log in a second
                asked = {"prompt": "abc", "max_tokens": 2}
                headers = {"X-Request-Id": f"request-{i}"}
                async with session.post(server.url + COMPLETIONS, json=asked, headers=headers) as reply:
                    assert reply.status == 200
        await server.read_log("request-49")
        own = [line for line in server.log if "asyncengine.access" in line]
    assert [re.search(r"request-\d+", line)[0] for line in own] == [f"request-{i}" for i in range(50)]  # type: ignore[index]
    if form == "text":
        assert re.fullmatch(
            r"[\d-]+ [\d:,]+ INFO asyncengine.access: POST /v1/completions 200, 3 -> 2 tokens \(1 cached\), "
            r"first \d+\.\d{3} s, \d+\.\d{3} s, request-0\n",
            own[0],
        )
        return
    for line in server.log:
        assert {"time", "level", "logger", "message"} <= json.loads(line).keys()
    first = json.loads(own[0])
    assert (first["level"], first["status"], first["prompt_tokens"], first["completion_tokens"]) == ("INFO", 200, 3, 2)


async def test_probes() -> None:
    engine = FakeEngine()
    async with serving(None, api_key="key") as site:

        async def statuses() -> list[int]:
            return [(await site.get(path)).status for path in ("/live", "/ready")]

        assert await statuses() == [200, 503]
        assert (await site.get("/live")).json == {"status": "loading"}
        site.server.app.engine = engine  # type: ignore[assignment]
        assert await statuses() == [200, 200]
        site.server.app.draining = True
        assert await statuses() == [200, 503]
        engine.health = "dead"
        assert await statuses() == [503, 503]


async def test_metrics_without_a_key() -> None:
    for public, status in ((False, 401), (True, 200)):
        async with serving(FakeEngine(), api_key="key", public_metrics=public) as site:
            assert (await site.get("/metrics")).status == status
            assert (await site.get("/v1/models")).status == 401


async def test_the_mode_of_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with serving(FakeEngine(), uds=str(path), uds_mode="660"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    for mode, uds in (("888", "x"), ("66", "x"), ("660", None)):
        with pytest.raises(ConfigError, match="uds_mode"):
            ServerConfig(uds=uds, uds_mode=mode)
