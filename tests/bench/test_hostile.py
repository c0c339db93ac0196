"""bench/hostile.py: its loads meet a real server, its watch sees a loop that is held up."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter

import hostile
import pytest
from hostile_requests import at_once, completion, half_sent, loads

GOOD = completion(b'{"prompt": "One day", "max_tokens": 2}')


def test_a_load_is_measured_beside_small_requests() -> None:
    run = hostile.measure(at_once([GOOD, completion(b"{"), b"HELLO\r\n\r\n"], 2))
    assert run.statuses == {"200": 1, "400": 2}
    assert run.small_requests > 0
    assert run.small_failed == {}
    assert run.slowest_small_ms > 0
    assert run.max_lag_ms >= 0
    figures = {figure.name: figure for figure in hostile.summarize("load", [run, run])}
    assert figures["load: small requests that failed"].met


def test_half_sent_requests_wait_for_the_rest() -> None:
    outcome = half_sent(GOOD, 3, 0.1)
    with hostile.Server("bundled") as server:
        assert outcome(server.address).statuses == Counter({"waiting": 3})


def test_the_watch_sees_a_loop_that_is_held_up(capsys: pytest.CaptureFixture[str]) -> None:
    async def hold() -> None:
        watch = hostile.Watch()
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # noqa: ASYNC251 - on purpose
        await asyncio.sleep(0.02)
        watch.answer("reset")
        watch.answer("report")
        watch.close()

    asyncio.run(hold())
    seen, after = map(json.loads, capsys.readouterr().out.splitlines())
    assert seen["max_lag_ms"] > 150
    assert any("in hold" in line for line in seen["stack"])
    assert after["max_lag_ms"] < seen["max_lag_ms"]
    assert after["stack"] == []


def test_every_load_of_the_issue_is_there() -> None:
    assert len(loads()) >= 14
    for name in ("15 MB of [", "2,048 prompts × n = 128", "a model's name of 1 MB"):
        assert callable(loads()[name]())
