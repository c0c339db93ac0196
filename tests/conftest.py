"""Hypothesis: the same examples in every run unless HYPOTHESIS_PROFILE=explore asks for new ones.

Without a GPU the Triton kernels run in Triton's interpreter, which is decided when a kernel's module is imported.

Torch gets one thread, here and in processes that tests start: there is a worker of pytest for every core.

A test that is marked ``sampled(n)`` has many like cases: one of n runs. All of them run with
--exhaustive (make exhaustive) and where there is a GPU, and so do tests that are marked ``exhaustive``. Tests that
count examples or turns by tests/amounts.py take more of them then.

Nothing that collection imports is ever garbage. No garbage is looked for until it has ended, and then only among what
is newer.
"""

import gc
import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import amounts

gc.disable()

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

_common = {
    "deadline": None,  # a busy machine is no failure
    "suppress_health_check": [HealthCheck.too_slow],
    "print_blob": True,
}
settings.register_profile("repeatable", derandomize=True, database=None, **_common)
settings.register_profile("explore", max_examples=1000, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="all cases of all tests, of which make test runs some")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--exhaustive"):
        os.environ[amounts.EXHAUSTIVE] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refuse_shared_names(items)
    if not amounts.has_all_cases():
        leave_out_like_cases(config, items)


def leave_out_like_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked exhaustive, and all but each n-th of the other cases of a test marked sampled(n)."""
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        mark = item.get_closest_marker("sampled")
        if item.get_closest_marker("exhaustive"):
            left_out.append(item)
            continue
        if mark is not None and seen[test] % mark.args[0]:
            left_out.append(item)
        seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def refuse_shared_names(items: list[pytest.Item]) -> None:
    """Refuse tests that share a node ID: xdist would run one of them and leave out the others without a word."""
    shared = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if shared:
        raise pytest.UsageError(f"several tests have the same node ID: {', '.join(shared)}")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
