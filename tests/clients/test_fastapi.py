"""FastAPI under uvicorn, in one process and event loop with an engine, whose routes it mounts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from conftest import ROOT
from openai import OpenAI

PROGRAM = """
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from asyncengine import AsyncEngine, SamplingParams, bundled_model
from asyncengine.server import ServerConfig, asgi_app

engine = AsyncEngine.from_pretrained(bundled_model(), dtype="float32", progress=False)


@asynccontextmanager
async def lifespan(app):
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/llm", asgi_app(engine, ServerConfig(served_model_name="stories", page=False)))


@app.get("/story")
async def story():
    output = await engine.generate("Once upon a time", SamplingParams(max_tokens=4, temperature=0))
    return {"text": output.text}


uvicorn.run(app, host="127.0.0.1", port=0, log_level="info")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = tmp_path_factory.mktemp("fastapi") / "program.py"
    # Behind the engine's own packages: those of the clients have other versions.
    behind = [p for p in sys.path if p.endswith("site-packages")]
    program.write_text(f"import sys\n\nsys.path += {behind!r}\n{PROGRAM}")
    python = os.environ.get("CLIENTS_SERVER", str(ROOT / ".venv" / "bin" / "python"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [python, str(program)], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                if match := re.search(r"running on (http://\S+)", line):
                    break
            else:
                pytest.fail("the program did not start")
            yield match[1]
        finally:
            process.terminate()
            process.communicate()


def test_the_programs_route_and_the_mounted_ones_share_the_engine(url: str) -> None:
    text = httpx.get(url + "/story").json()["text"]
    client = OpenAI(base_url=url + "/llm/v1", api_key="none")
    reply = client.completions.create(model="stories", prompt="Once upon a time", max_tokens=4, temperature=0)
    assert reply.choices[0].text == text != ""


def test_a_stream(url: str) -> None:
    client = OpenAI(base_url=url + "/llm/v1", api_key="none")
    messages = [{"role": "user", "content": "Tell me a story."}]
    whole = client.chat.completions.create(model="stories", messages=messages, max_tokens=8, temperature=0)
    chunks = client.chat.completions.create(
        model="stories", messages=messages, max_tokens=8, temperature=0, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    error = httpx.get(url + "/llm/nowhere")
    assert (error.status_code, error.json()["error"]["code"]) == (404, "not_found")
