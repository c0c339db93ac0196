"""The openai package as a client of the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import USER, serving

ANSWER = "Once upon a time 😀 there was a fox."


@asynccontextmanager
async def client(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(engine, api_key="key", strict_model_names=True) as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="key", max_retries=0) as api,
    ):
        yield api


async def test_chat() -> None:
    async with client(FakeEngine(ANSWER, ends=True)) as api:
        whole = await api.chat.completions.create(model="fake", messages=USER, temperature=0)
        assert whole.choices[0].message.content == ANSWER
        assert whole.choices[0].finish_reason == "stop"
        stream = await api.chat.completions.create(
            model="fake", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


async def test_completions() -> None:
    async with client(FakeEngine(ANSWER)) as api:
        whole = await api.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=5)
        assert [c.text for c in whole.choices] == [ANSWER[0:5], ANSWER[1:6]] * 2
        stream = await api.completions.create(model="fake", prompt="a", max_tokens=5, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER[:5]


async def test_models() -> None:
    async with client(FakeEngine()) as api:
        assert [m.id async for m in api.models.list()] == ["fake"]
        assert (await api.models.retrieve("fake")).object == "model"


async def test_errors_become_the_packages_exceptions() -> None:
    engine = FakeEngine(max_model_len=64)
    async with client(engine) as api:
        create = api.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model="fake", messages=USER, temperature=3)
        assert (bad.value.param, bad.value.status_code) == ("temperature", 400)
        with pytest.raises(openai.BadRequestError) as long:
            await create(model="fake", messages=[{"role": "user", "content": "x" * 100}])
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await create(model="other", messages=USER)
        with pytest.raises(openai.AuthenticationError):
            await api.with_options(api_key="wrong").models.list()
        engine.overloaded = True
        with pytest.raises(openai.InternalServerError) as busy:
            await create(model="fake", messages=USER)
        assert busy.value.status_code == 503


async def test_failure_in_mid_stream_raises() -> None:
    engine = FakeEngine()
    engine.hold(at=2)
    async with client(engine) as api:
        stream = await api.chat.completions.create(model="fake", messages=USER, stream=True)
        assert [(await anext(stream)).choices[0].delta.content for _ in range(3)] == ["", "O", "n"]
        engine.die()
        with pytest.raises(openai.APIError, match=r"the engine has failed.*request id"):
            await anext(stream)


async def test_leaving_a_stream_aborts() -> None:
    engine = FakeEngine()
    engine.hold(at=2)
    async with client(engine) as api:
        stream = await api.chat.completions.create(model="fake", messages=USER, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await engine.wait_for(open=0, aborted=1)
