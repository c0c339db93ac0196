"""A server process with the bundled model, for clients that know nothing of asyncengine.

The clients live in an environment of their own (``make clients``), the server in .venv. CLIENTS_SERVER names another
Python for the server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "asyncengine" / "bundled" / "stories"
KEY = "key-of-the-tests"

os.environ.update(HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(DO_NOT_TRACK="1", LITELLM_LOCAL_MODEL_COST_MAP="True", OPENAI_API_KEY=KEY, OMP_NUM_THREADS="1")
os.environ.update(
    AUTOGEN_DISABLE_RUNTIME_TRACING="true", HAYSTACK_TELEMETRY_ENABLED="False",
    HF_HUB_DISABLE_TELEMETRY="1", OPENAI_AGENTS_DISABLE_TRACING="1",
)  # fmt: skip


@dataclass(frozen=True)
class Server:
    url: str
    model: str = "stories"
    key: str = KEY

    @property
    def v1(self) -> str:
        return self.url + "/v1"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The bundled model as it is. Asks every client for its key."""
    with serving(str(MODEL)) as running:
        yield running


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model with a context of 4,096 tokens and a chat template with tools in the form of Hermes.

    It was trained for neither: what it writes freely makes no sense there, what a schema forces is right in form.
    """
    folder = checkpoint(tmp_path_factory.mktemp("roomy"), 4096)
    with serving(str(folder), "--chat-template", str(Path(__file__).with_name("template.jinja"))) as running:
        yield running


@pytest.fixture(scope="session")
def stretched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model with its own chat template and a context of 4,096 tokens, for clients that write long turns."""
    with serving(str(checkpoint(tmp_path_factory.mktemp("stretched"), 4096))) as running:
        yield running


def checkpoint(folder: Path, context: int) -> Path:
    """The bundled model with a context of so many tokens, for prompts of agents."""
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((MODEL / "config.json").read_text()) | {"max_position_embeddings": context}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """``asyncengine serve`` with a model."""
    with _started("-m", "asyncengine", "serve", *arguments, "--port", "0", "--dtype", "float32") as running:
        yield running


@contextmanager
def scripted(folder: Path, *replies: tuple[str, str]) -> Iterator[Server]:
    """A server whose n-th answer is the n-th text, if the prompt has what stands before the text."""
    file = folder / "replies.json"
    file.write_text(json.dumps(replies))
    with _started(str(Path(__file__).with_name("serve_replies.py")), str(file), "--key", KEY) as running:
        yield running


@contextmanager
def _started(*arguments: str) -> Iterator[Server]:
    python = os.environ.get("CLIENTS_SERVER", str(ROOT / ".venv" / "bin" / "python"))
    environment = os.environ | {"ASYNCENGINE_API_KEY": KEY, "ASYNCENGINE_SERVED_MODEL_NAME": "stories"}
    command = [python, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if match := re.search(r" ready on (http://\S+)", line):
                    break
                sys.stderr.write(line)
            else:
                pytest.fail("the server did not start")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would be in its way
            yield Server(match[1])
        finally:
            process.terminate()
            process.wait()
