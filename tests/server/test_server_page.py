"""The page at /: what it is served with, that its data needs a key, and that nobody pays for it who does not look."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from asyncengine.server.page import routes
from asyncengine.testing import SimulatedEngine
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, USER, serving

FILES = Path(routes.__file__).with_name("static")
WITH_KEY = {"Authorization": "Bearer key"}


async def test_files_are_public_and_cannot_do_harm() -> None:
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    async with serving(FakeEngine(), api_key="key") as site:
        for path, name in routes.FILES.items():
            reply = await site.get(path)
            assert (reply.status, reply.body) == (200, (FILES / name).read_bytes())
            assert reply.headers["Content-Type"] == f"{types[name.rpartition('.')[2]]}; charset=utf-8"
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            assert reply.headers["Referrer-Policy"] == "no-referrer"
            policy = dict(part.strip().split(" ", 1) for part in reply.headers["Content-Security-Policy"].split(";"))
            assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert "unsafe" not in reply.headers["Content-Security-Policy"]
            head = await site.request("HEAD", path)
            assert (head.status, head.body) == (200, b"")
            assert head.headers["Content-Length"] == reply.headers["Content-Length"]
        for path in ("/page/stats", "/page/model", "/page/nothing.js", "/page/../app.py", "/page/routes.py"):
            assert (await site.get(path)).status == 401
        assert (await site.get("/page/nothing.js", headers=WITH_KEY)).status == 404


async def test_files_are_sent_again_only_when_they_have_changed() -> None:
    async with serving(FakeEngine()) as site:
        first = await site.get("/")
        assert first.headers["Cache-Control"] == "no-cache"
        tag = first.headers["ETag"]
        for sent in (tag, f"W/{tag}", f'"other", {tag}'):
            again = await site.get("/", headers={"If-None-Match": sent})
            assert (again.status, again.body, again.headers["ETag"]) == (304, b"", tag)
        assert (await site.get("/", headers={"If-None-Match": '"other"'})).status == 200


def test_every_file_is_served_and_all_that_is_named_is_there() -> None:
    assert {path.name for path in FILES.iterdir()} == set(routes.FILES.values())
    named = re.findall(r'(?:src|href)="([^"#]+)"', (FILES / "index.html").read_text())
    named.remove("docs")  # the link to the description of the API, which is shown where there is one
    for path in FILES.glob("*.js"):
        named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text())]
    assert named
    assert {f"/{name}" for name in named} <= routes.FILES.keys()  # relative, and from this server


def test_nothing_turns_text_into_elements() -> None:
    html = (FILES / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<script(?! type=\"module\" src=)|<style", html)
    for path in FILES.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", path.read_text()
        )


async def test_files_travel_compressed_and_the_page_stays_small() -> None:
    async with serving(FakeEngine()) as site:
        total = 0
        for path, name in routes.FILES.items():
            plain = await site.get(path, headers={"Accept-Encoding": "br, gzip;q=0"})
            assert "Content-Encoding" not in plain.headers
            reply = await site.get(path, headers={"Accept-Encoding": "gzip, deflate, br"})
            assert (reply.headers["Content-Encoding"], reply.headers["Vary"]) == ("gzip", "Accept-Encoding")
            assert reply.body == plain.body == (FILES / name).read_bytes()  # the client has unpacked the first
            again = await site.get(path, headers={"Accept-Encoding": "gzip", "If-None-Match": reply.headers["ETag"]})
            assert (again.status, again.body) == (304, b"")
            assert reply.headers["ETag"] != plain.headers["ETag"]
            total += int(reply.headers["Content-Length"])
        assert total <= 50_000
    assert sum(path.stat().st_size for path in FILES.iterdir()) <= 110_000


def test_what_is_looked_up_by_id_is_there() -> None:
    there = re.findall(r'\sid="([^"]+)"', (FILES / "index.html").read_text())
    assert len(there) == len(set(there))
    for path in FILES.glob("*.js"):
        assert set(re.findall(r'(?:\$|\bon)\("([\w-]+)"', path.read_text())) <= set(there), path.name


def test_logic_of_conversations() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js on this machine")
    tests = Path(__file__).with_name("page_logic.mjs")
    run = subprocess.run([node, "--test", str(tests)], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


async def test_without_the_page_there_are_no_routes() -> None:
    async with serving(FakeEngine(), page=False) as site:
        for path in (*routes.FILES, "/page/stats", "/page/model"):
            assert (await site.get(path)).error["code"] == "not_found"


async def test_stats_say_what_the_page_draws() -> None:
    engine = FakeEngine()
    async with serving(engine) as site:
        await site.events(CHAT, messages=USER, max_tokens=5)
        reply = await site.get("/page/stats")
        assert reply.headers["Cache-Control"] == "no-store"
        stats = reply.json
        assert stats["health"] == "ready"
        assert (stats["running"], stats["waiting"], stats["generation_tokens"]) == (0, 0, 5)
        assert stats["on_host"] == 0
        assert stats["ttft"]["count"] == 1
        assert stats["itl"]["count"] == 4
        assert stats["ttft"]["seconds"] >= 0
        assert all(len(step) == 8 and step[1] > step[5] > 0 for step in stats["steps"])
        assert all(len(wake) == 3 and wake[0] > wake[2] for wake in stats["wakes"])
        blocks = stats["blocks"]
        assert (blocks["total"], blocks["free"], blocks["per_cell"]) == (64, 64, 1)
        assert base64.b64decode(blocks["cached"]) == bytes(60) + b"\xff" * 4
        model = (await site.get("/page/model")).json
        assert (model["name"], model["talks"], model["max_model_len"]) == ("fake", "chat", 256)
        assert model["device"] == "fake (cuda:1)"
        engine.tokenizer.has_chat_template = False
        assert (await site.get("/page/model")).json["talks"] == "text"


async def test_figures_of_a_real_engine() -> None:
    async with (
        SimulatedEngine(step_latency_us=100, skip_tokenizer_init=True) as engine,
        serving(engine) as site,  # type: ignore[arg-type]
    ):
        assert (await site.get("/page/model")).json["talks"] == "tokens"
        assert (await site.get("/page/stats")).json["steps"] == []  # from now on some are recorded
        await asyncio.gather(*(site.post("/v1/completions", prompt=[300 + i] * 40, max_tokens=9) for i in range(3)))
        await asyncio.sleep(0.02)
        first = (await site.get("/page/stats")).json
        await asyncio.sleep(0.05)
        second = (await site.get("/page/stats")).json  # the map is of the time of the first
        assert len(first["steps"]) >= 9
        assert first["wakes"]
        assert sum(base64.b64decode(second["blocks"]["cached"])) > 0


async def test_the_page_comes_before_the_model() -> None:
    async with serving(None) as site:
        assert (await site.get("/")).status == 200
        for path in ("/page/stats", "/page/model"):
            assert (await site.get(path)).json == {"health": "loading"}
