"""The same tests pass with a GPU and, in Triton's interpreter, without."""

import pytest
import torch

from tests.kernels.interpreter import repair_interpreter

repair_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread():
    """The tensors here are tiny: a second thread costs more than it brings, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
