"""Coroutine tests run as those of tests/engine do."""

from tests.engine.conftest import engines_close_at_rest, pytest_pyfunc_call  # noqa: F401  # for every test here
