"""bench/long_prompt.py: what it counts between tokens, and what it makes of it."""

from __future__ import annotations

import argparse
import asyncio
import random

import long_prompt
import pytest
from long_prompt import NO_TARGET, Turn

from asyncengine import testing


def test_intervals_are_those_of_tokens_in_the_time() -> None:
    ms = 1_000_000
    first = [(1, 0), (1, 2 * ms), (2, 6 * ms), (1, 9 * ms), (1, 50 * ms)]
    second = [(1, 1 * ms), (1, 4 * ms)]
    assert long_prompt.intervals([first, second], 2 * ms, 9 * ms) == ([2, 2, 2, 3, 3], 1)
    assert long_prompt.intervals([[]], 0, 1) == ([], 0)


def test_a_turn_follows_streams_beside_the_prompt() -> None:
    args = argparse.Namespace(prompt=900, streams=3, decode_s=0.2)

    async def main() -> Turn:
        config = {"max_model_len": 8192, "enable_prefix_caching": False, "target_itl_ms": 10.0}
        latency = {"step_latency_us": 2000.0, "token_latency_us": 50.0, "read_kv": False}
        async with testing.SimulatedEngine(**latency, **config) as engine, testing.no_leaks(engine):  # type: ignore[arg-type]
            return await long_prompt.take_turn(engine, random.Random(0), args)

    turn = asyncio.run(main())
    assert len(turn.decode_ms) > 3
    assert len(turn.beside_ms) >= 3 * 900 // 200
    assert min(turn.beside_ms) > 2
    assert turn.beside_s > 0


def test_figures_have_their_targets() -> None:
    turns = {
        NO_TARGET: [Turn(7.0, 8.0, [4.0], [30.0, 50.0], 0)],
        "target": [Turn(7.0, 10.0, [4.0], [18.0, 20.0], 0)],
    }
    figures = {figure.name: figure for figure in long_prompt.summarize(turns, 20.0)}
    assert figures["target 20 ms: beside the prompt, p99"].at_most == pytest.approx(22)
    assert figures["target 20 ms: beside the prompt, p99"].met
    assert figures["no target: beside the prompt, p99"].met is None
    assert figures["what the prompt loses to the target"].value == pytest.approx(25)
