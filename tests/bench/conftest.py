"""The scripts of bench/ import each other by name. Kernels run as in tests/kernels."""

import sys
from pathlib import Path

from tests.kernels.conftest import device  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
