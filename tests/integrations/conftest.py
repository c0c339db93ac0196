"""Coroutine tests run on uvloop, with a time limit."""

from __future__ import annotations

import inspect

import pytest

from tests.at_rest import engines_close_at_rest  # noqa: F401  # for every test here
from tests.coroutines import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run(pyfuncitem.obj(**arguments), 300.0)
    return True
