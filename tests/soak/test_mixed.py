"""Some seconds of the soak, so that it works when it is needed. Memory is not judged in so short a time."""

from __future__ import annotations

from tests.amounts import sample_of
from tests.coroutines import run
from tests.soak.mixed import Samples, soak

LIMIT_S = 120.0


def test_some_seconds_of_mixed_traffic() -> None:
    summary = run(soak(seconds=sample_of(8, 3), warm_up_s=sample_of(3, 1), seed=1, clients=8, interval_s=1), LIMIT_S)
    assert summary["failures"] == []
    requests = summary["requests"]
    assert isinstance(requests, dict)
    assert sum(requests.values()) > 20
    assert any(kind.endswith(", left") for kind in requests)


def test_the_slope_is_of_the_samples_after_the_warm_up() -> None:
    samples = Samples(seconds=[0, 60, 120, 180], resident_mb=[0, 500, 501, 502])
    slope = samples.slope_mb(after_s=60)
    assert slope is not None
    assert abs(slope - 10) < 1e-9
    assert Samples().slope_mb(0) is None
