"""Coroutine tests: on asyncio's own loop, or on uvloop where the test asks for it with ``loop_name``."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvloop

from tests.at_rest import engines_close_at_rest  # noqa: F401  # for every test here
from tests.coroutines import run

TIME_LIMIT_S = 100.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test; every task it started must have ended by itself."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    factory = uvloop.new_event_loop if arguments.get("loop_name") == "uvloop" else asyncio.SelectorEventLoop

    async def test() -> None:
        await pyfuncitem.obj(**arguments)
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"

    run(test(), TIME_LIMIT_S, factory)
    return True
