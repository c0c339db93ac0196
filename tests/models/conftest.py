import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread():
    """The models here are tiny: a second thread costs more than it brings, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
