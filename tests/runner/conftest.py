"""Coroutine tests run as those of tests/engine do, Triton's kernels as those of tests/kernels."""

from tests.engine.conftest import engines_close_at_rest, pytest_pyfunc_call  # noqa: F401  # for every test here
from tests.kernels.conftest import device  # noqa: F401
