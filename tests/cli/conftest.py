"""Coroutine tests run as those of tests/server do."""

from tests.server.conftest import engines_close_at_rest, pytest_pyfunc_call  # noqa: F401  # for every test here
