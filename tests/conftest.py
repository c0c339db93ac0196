"""Hypothesis: the same examples in every run unless HYPOTHESIS_PROFILE=explore asks for new ones."""

import os

from hypothesis import HealthCheck, settings

_common = {
    "deadline": None,  # a busy machine is no failure
    "suppress_health_check": [HealthCheck.too_slow],
    "print_blob": True,
}
settings.register_profile("repeatable", derandomize=True, database=None, **_common)
settings.register_profile("explore", max_examples=1000, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
