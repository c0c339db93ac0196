"""Costs of steps, measured on the GPU, and chunks that heed a target."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.bundled import path as bundled_path


def test_costs_are_measured_and_the_engine_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCENGINE_CACHE", str(tmp_path))
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)

    async def run(target_itl_ms: float | None) -> tuple[int, ...]:
        model = str(bundled_path())
        async with AsyncEngine.from_pretrained(model, progress=False, target_itl_ms=target_itl_ms) as engine:
            costs = engine._life.loaded().costs
            if target_itl_ms is None:
                assert costs is None
            else:
                assert costs is not None
                table = costs.table
                assert len(table.decode) > 2
                assert len(table.prompt) > 2
                assert all(point.base_ns > 1000 for point in (*table.decode, *table.prompt))
                assert [copy.num_bytes for copy in table.to_device] == [copy.num_bytes for copy in table.to_host]
                assert all(copy.ns > 0 for copy in (*table.to_device, *table.to_host))
                assert table.crossing_ns > 0
                assert engine._life.loaded().step_loop.stats()["num_steps"] == 0
            async with aclosing(engine.stream([5, 6, 7], params)) as stream:
                await anext(stream)
                output = await engine.generate(list(range(300, 600)), params)
            return output.token_ids

    plain = asyncio.run(run(None))
    assert len(asyncio.run(run(5.0))) == len(plain)
    assert len(asyncio.run(run(5.0))) == len(plain)  # with what was kept
    assert len(list((tmp_path / "costs").iterdir())) == 1
