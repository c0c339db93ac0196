"""Hypothesis: the same examples in every run unless HYPOTHESIS_PROFILE=explore asks for new ones.

Without a GPU the Triton kernels run in Triton's interpreter, which is decided when a kernel's module is imported.

Torch gets one thread, here and in processes that tests start: there is a worker of pytest for every core.
"""

import os

import torch
from hypothesis import HealthCheck, settings

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
