"""One small round of the mix of features, so that it works when it is needed."""

from __future__ import annotations

import pytest

from tests.coroutines import run
from tests.soak.features import ENGINES, soak

LIMIT_S = 120.0


@pytest.mark.exhaustive
def test_a_round_of_mixed_features() -> None:
    mixes = run(soak(seed=1, rounds=1, seconds=LIMIT_S, size=40), LIMIT_S)
    assert [failure for mix in mixes.values() for failure in mix.failures] == []
    assert mixes.keys() == ENGINES.keys()
    assert all(mix.compared > 20 for mix in mixes.values())
    assert sum(mix.left for mix in mixes.values()) > 0
    features = {name for mix in mixes.values() for name in mix.features}
    assert {"n", "penalties", "words", "logprobs", "stops", "structure", "processor", "sampling", "greedy"} <= features
    assert all(mix.stats["failed_host_rows"] == 0 for mix in mixes.values())
    assert all(mix.stats["num_preemptions"] + mix.stats["moved_to_host"] > 0 for mix in mixes.values())
    assert sum(mix.stats["num_preemptions"] for mix in mixes.values()) > 20
    assert sum(mix.stats["moved_to_host"] for name, mix in mixes.items() if "hybrid" in name) > 0
    assert sum(mix.stats["blocks_to_disk"] for name, mix in mixes.items() if "disk" in name) > 0
