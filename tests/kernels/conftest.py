"""The same tests pass with a GPU and, in Triton's interpreter, without."""

import pytest
import torch

from tests.kernels.interpreter import repair_interpreter

repair_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
