"""Tests that need a GPU. CI has none: there, these tests say that they were skipped."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models import tiny

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
SHAPES = Path(__file__).resolve().parents[2] / "bench" / "shapes"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def plans_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the measurements of the engines here apart from those that the user's engines start from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the configuration of a small model, for load_format="dummy"."""
    path = tmp_path_factory.mktemp("tiny-llama")
    config = {"architectures": ["LlamaForCausalLM"], **tiny.DECODER, "head_dim": 16, "eos_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)
