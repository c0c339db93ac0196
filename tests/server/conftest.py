"""Coroutine tests run on uvloop, the loop of the real server."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.at_rest import engines_close_at_rest  # noqa: F401  # for every test here
from tests.coroutines import run

TEST_TIMEOUT_S = 30.0
SETTLING_TICKS = 100  # connections and generators that were just closed end their tasks


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test; every task it started must have ended by itself."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def test() -> None:
        await pyfuncitem.obj(**arguments)
        for _ in range(SETTLING_TICKS):
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if not left:
                break
            await asyncio.sleep(0)
        assert not left, f"tasks left behind: {left}"

    run(test(), TEST_TIMEOUT_S)
    return True
