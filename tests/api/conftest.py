"""Coroutine tests run as those of tests/engine do."""

from tests.at_rest import engines_close_at_rest  # noqa: F401  # for every test here
from tests.engine.conftest import pytest_pyfunc_call  # noqa: F401
