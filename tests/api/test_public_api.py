"""The public API as editors, type checkers and ``help`` show it."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import asyncengine
from asyncengine import (
    AsyncEngine,
    ChatMessage,
    DataParallelEngine,
    EngineClosedError,
    EngineConfig,
    InvalidRequestError,
    SamplingParams,
    StructuredOutputs,
    WrongLoopError,
)
from asyncengine.api.engine_options import EngineOptions
from asyncengine.api.field_docs import field_docs
from asyncengine.testing import SimulatedEngine


class Fox:
    """Describes itself as pydantic's classes do."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def test_the_keywords_of_the_constructor_are_the_fields_of_the_configuration() -> None:
    fields = get_type_hints(EngineConfig)
    assert get_type_hints(EngineOptions) == {name: hint for name, hint in fields.items() if name != "model"}
    assert EngineOptions.__total__ is False
    assert (Path(asyncengine.__file__).parent / "py.typed").is_file()


def test_help_shows_the_docstrings_of_fields() -> None:
    for cls in (SamplingParams, StructuredOutputs):
        shown = " ".join(pydoc.plain(pydoc.render_doc(cls)).replace("\n |", "\n").split())
        docs = field_docs(cls)
        assert docs.keys() == {f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")}  # type: ignore[arg-type]
        for name, text in docs.items():
            assert f"{name}: {text}" in shown, name
    assert "max_num_seqs: Sequences that run at once." in str(EngineConfig.__doc__)


def test_a_class_with_a_schema_constrains_like_its_schema() -> None:
    plain = StructuredOutputs(json=Fox.model_json_schema())
    for given in (Fox, {"json": Fox}, StructuredOutputs(json=Fox)):
        assert SamplingParams(structured_outputs=given).structure == plain
    with pytest.raises(InvalidRequestError, match="mapping is needed"):
        SamplingParams(structured_outputs=int)  # type: ignore[arg-type]


async def test_parts_of_a_content_are_its_text() -> None:
    whole: list[ChatMessage] = [{"role": "user", "content": "Tell me"}]
    parts: list[ChatMessage] = [
        {"role": "user", "content": [{"type": "text", "text": "Tell "}, {"type": "text", "text": "me"}]}
    ]
    image: list[ChatMessage] = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    async with SimulatedEngine() as engine:
        assert await engine.tokenize(parts) == await engine.tokenize(whole)
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content\[0\]: only parts of text"):
            await engine.generate(image)


def test_help_shows_public_methods_alone() -> None:
    names = {name for name in dir(AsyncEngine) if not name.startswith("_")}
    assert names == {
        "abort", "aclose", "block_changes", "classify", "debug_stats", "detokenize", "embed", "engine_stats",
        "from_pretrained", "generate", "generate_many", "has_request", "health", "load", "model_info", "score",
        "score_pairs", "several", "snapshot", "start", "stats", "stream", "submit", "tokenize", "tokenizer",
    }  # fmt: skip


METHODS: dict[str, Callable[[AsyncEngine], Any]] = {
    "abort": lambda engine: engine.abort("name"),
    "block_changes": lambda engine: engine.block_changes(1),
    "classify": lambda engine: engine.classify("text"),
    "debug_stats": lambda engine: engine.debug_stats(),
    "detokenize": lambda engine: engine.detokenize([300]),
    "embed": lambda engine: engine.embed("text"),
    "engine_stats": lambda engine: engine.engine_stats(),
    "generate": lambda engine: engine.generate("text"),
    "generate_many": lambda engine: anext(engine.generate_many(["text"])),
    "has_request": lambda engine: engine.has_request("name"),
    "load": lambda engine: engine.load(),
    "model_info": lambda engine: engine.model_info,
    "score": lambda engine: engine.score("text", " more"),
    "score_pairs": lambda engine: engine.score_pairs(["text"], ["more"]),
    "snapshot": lambda engine: engine.snapshot(),
    "stats": lambda engine: engine.stats(),
    "stream": lambda engine: anext(aiter(engine.stream("text"))),
    "submit": lambda engine: engine.submit("text"),
    "tokenize": lambda engine: engine.tokenize("text"),
    "tokenizer": lambda engine: engine.tokenizer,
}
ANYWHERE = {"debug_stats", "engine_stats", "load", "model_info", "stats", "tokenizer"}
"""Methods that read only values that any thread may read."""


async def call(method: str, engine: AsyncEngine) -> None:
    result = METHODS[method](engine)
    if inspect.isawaitable(result):
        await result


def test_every_method_is_called() -> None:
    others = {"aclose", "from_pretrained", "health", "several", "start"}
    assert METHODS.keys() | others == {name for name in dir(AsyncEngine) if not name.startswith("_")}


def two_engines() -> DataParallelEngine:
    return DataParallelEngine([SimulatedEngine(), SimulatedEngine()])


@pytest.mark.parametrize("make", [SimulatedEngine, two_engines])
@pytest.mark.parametrize("method", METHODS)
async def test_an_engine_that_does_not_run_says_what_to_write(method: str, make: Callable[[], AsyncEngine]) -> None:
    engine = make()
    with pytest.raises(EngineClosedError, match=r"it was not started; write 'async with AsyncEngine.from_pretrained"):
        await call(method, engine)
    async with engine:
        with pytest.raises(EngineClosedError, match="started before; create a new one"):
            await engine.start()
    with pytest.raises(EngineClosedError, match="the engine is closed: it cannot start again, create a new one"):
        await call(method, engine)


@pytest.mark.parametrize("make", [SimulatedEngine, two_engines])
@pytest.mark.parametrize("method", sorted(METHODS.keys() - ANYWHERE))
async def test_another_event_loop_is_told_how_to_ask(method: str, make: Callable[[], AsyncEngine]) -> None:
    async with make() as engine:
        with pytest.raises(WrongLoopError, match=r"asyncio\.run_coroutine_threadsafe"):
            await asyncio.to_thread(asyncio.run, call(method, engine))


async def test_closing_from_another_event_loop_is_refused() -> None:
    async with SimulatedEngine() as engine:
        with pytest.raises(WrongLoopError, match=r"asyncio\.run_coroutine_threadsafe"):
            await asyncio.to_thread(asyncio.run, engine.aclose())
        assert engine.health == "ready"
