"""/v1/messages: the anthropic package and the real server, with the bundled model or a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import pytest

from asyncengine import AsyncEngine, bundled_model
from asyncengine.errors import StepFailedError
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Reply, Site, read_all, serving

MESSAGES = "/v1/messages"
ANSWER = "Once upon a time 😀 there was a fox."
MODEL = "bundled"
USER: Any = [{"role": "user", "content": "Tell me a story."}]


@asynccontextmanager
async def client(engine: Any, **config: Any) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, Site]]:
    async with (
        serving(engine, api_key="key", **config) as site,
        anthropic.AsyncAnthropic(base_url=site.url, api_key="key", max_retries=0) as api,
    ):
        site.session.headers["X-Api-Key"] = "key"
        yield api, site


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type."""
    *events, rest = body.decode().split("\n\n")
    assert rest == ""
    parsed = []
    for text in events:
        name, data = text.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def said(engine: FakeEngine) -> list[tuple[str, str]]:
    """Roles and contents of the last prompt."""
    return [(m["role"], m["content"]) for m in engine.prompts[-1]]  # type: ignore[index, misc]


def error_of(reply: Reply) -> dict[str, str]:
    """The error object, after checking its shape."""
    assert reply.headers["Content-Type"].startswith("application/json"), reply.body
    assert set(reply.json) == {"type", "error", "request_id"}
    assert reply.json["type"] == "error"
    assert reply.json["request_id"] == reply.headers["X-Request-Id"]
    error: dict[str, str] = reply.json["error"]
    assert set(error) == {"type", "message"}
    assert error["message"]
    return error


async def test_messages_the_bundled_model_answers() -> None:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        client(engine, served_model_name=MODEL) as (api, site),
    ):
        asked: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 40, "extra_body": {"temperature": 0}}
        whole = await api.messages.create(**asked)
        chat = (await site.post("/v1/chat/completions", model=MODEL, messages=USER, max_tokens=40, temperature=0)).json
        text = whole.content[0].text
        assert text == chat["choices"][0]["message"]["content"]
        assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", MODEL, "max_tokens")
        usage = whole.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
        assert usage.output_tokens == 40

        counted = await api.messages.count_tokens(model=MODEL, messages=USER)
        assert counted.input_tokens == chat["usage"]["prompt_tokens"]

        async with api.messages.stream(**asked) as stream:
            assert "".join([piece async for piece in stream.text_stream]) == text
            final = await stream.get_final_message()
        assert ([block.text for block in final.content], final.stop_reason) == ([text], "max_tokens")
        cached = final.usage.cache_read_input_tokens or 0
        assert final.usage.input_tokens + cached == chat["usage"]["prompt_tokens"]
        assert final.usage.cache_read_input_tokens == usage.cache_read_input_tokens
        assert final.usage.output_tokens == 40

        word = text.split()[4]
        stopped = await api.messages.create(**asked, stop_sequences=["no such text", word])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
        assert stopped.content[0].text == text[: text.index(word)]

        schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        form: Any = {"format": {"type": "json_schema", "schema": schema}}
        structured = await api.messages.create(**asked, output_config=form)
        assert json.loads(structured.content[0].text)["a"] in (1, 2)
        assert structured.stop_reason == "end_turn"


async def test_messages_events_come_in_their_order() -> None:
    async with client(FakeEngine(ANSWER, ends=True)) as (_, site):
        reply = await site.post(MESSAGES, messages=USER, max_tokens=100, stream=True)
        whole = (await site.post(MESSAGES, messages=USER, max_tokens=100)).json
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = events_of(reply.body)
    types = [e["type"] for e in events]
    assert types[:3] == ["message_start", "ping", "content_block_start"]
    assert types[3:-3] == ["content_block_delta"] * len(ANSWER)
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    started = events[0]["message"]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    assert events[-3]["index"] == 0
    assert "".join(e["delta"]["text"] for e in events[3:-3]) == ANSWER
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"]
    assert started["usage"] == whole["usage"] | {"output_tokens": 0}
    assert whole["content"] == [{"type": "text", "text": ANSWER}]
    assert whole["usage"]["output_tokens"] == len(ANSWER) + 1


async def test_messages_an_output_without_text_has_no_block() -> None:
    async with client(FakeEngine("", ends=True)) as (api, site):
        whole = await api.messages.create(model="fake", messages=USER, max_tokens=9)
        assert (whole.content, whole.stop_reason) == ([], "end_turn")
        events = events_of((await site.post(MESSAGES, messages=USER, max_tokens=9, stream=True)).body)
    assert [e["type"] for e in events] == ["message_start", "ping", "message_delta", "message_stop"]


async def test_messages_become_a_conversation() -> None:
    engine = FakeEngine("Fine.", ends=True)
    async with client(engine) as (api, _):
        blocks: Any = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("a", "b")]
        talk: Any = [
            {"role": "user", "content": blocks},
            {"role": "assistant", "content": blocks[:1]},
            {"role": "user", "content": "c"},
        ]
        await api.messages.create(
            model="fake", system=blocks, messages=talk, max_tokens=5, metadata={"user_id": "somebody"}
        )
        assert said(engine) == [("system", "a\nb"), ("user", "a\nb"), ("assistant", "a"), ("user", "c")]
        await api.messages.create(model="fake", system="s", messages=USER, max_tokens=5)
        assert said(engine) == [("system", "s"), ("user", "Tell me a story.")]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": None}, "messages is required"),
        ({"messages": []}, "messages is required"),
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens is required and must be at least 1, got 0"),
        ({"max_tokens": 10_000}, "max_tokens is 10000"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content must have"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "no call of a tool",
        ),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"container": "x"}, "container is not supported"),
        ({"n": 2}, "n is not supported"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences must hold non-empty strings"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
    ],
)
async def test_messages_wrong_requests(fields: dict[str, Any], says: str) -> None:
    async with serving(FakeEngine()) as site:
        for stream in (False, True):
            reply = await site.post(MESSAGES, **{"messages": USER, "max_tokens": 5, "stream": stream} | fields)
            assert reply.status == 400
            error = error_of(reply)
            assert error["type"] == "invalid_request_error"
            assert says in error["message"]


async def test_messages_errors_have_anthropics_form() -> None:
    engine = FakeEngine()
    async with client(engine, max_request_bytes=2000, strict_model_names=True) as (api, site):
        ask = api.messages.create
        for expected, type_, call in (
            (anthropic.BadRequestError, "invalid_request_error", ask(model="fake", messages=[], max_tokens=5)),
            (anthropic.NotFoundError, "not_found_error", ask(model="other", messages=USER, max_tokens=5)),
            (
                anthropic.AuthenticationError,
                "authentication_error",
                api.with_options(api_key="wrong").messages.create(model="fake", messages=USER, max_tokens=5),
            ),
            (
                anthropic.RequestTooLargeError,
                "request_too_large",
                ask(model="fake", messages=[{"role": "user", "content": "x" * 2000}], max_tokens=5),
            ),
        ):
            with pytest.raises(expected) as raised:
                await call
            assert raised.value.type == type_
        engine.overloaded = True
        with pytest.raises(anthropic.ServiceUnavailableError) as busy:
            await ask(model="fake", messages=USER, max_tokens=5)
        assert busy.value.response.headers["Retry-After"] == "1"
        wrong = await site.get(MESSAGES)
        assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")
        assert error_of(wrong)["type"] == "invalid_request_error"
        calls: list[Awaitable[object]] = [
            ask(model="fake", messages=USER, max_tokens=5),
            api.messages.count_tokens(model="fake", messages=[]),
        ]
        for failing in calls:
            with pytest.raises(anthropic.APIStatusError):
                await failing
        missing = await site.post(f"{MESSAGES}/batches")
        assert (missing.status, error_of(missing)["type"]) == (404, "not_found_error")
        assert error_of(await site.request("POST", MESSAGES, data=b"{"))["type"] == "invalid_request_error"
        assert (await site.post(f"{MESSAGES}x")).error["code"] == "not_found"  # another route: OpenAI's form


async def test_messages_keys_come_in_either_header() -> None:
    async with serving(FakeEngine(), api_key="key") as site:
        ask = {"messages": USER, "max_tokens": 1}
        for headers, status in (
            ({"X-Api-Key": "key", "anthropic-version": "2023-06-01"}, 200),
            ({"Authorization": "Bearer key"}, 200),
            ({"Authorization": "Bearer wrong", "X-Api-Key": "key"}, 200),
            ({"Authorization": "Basic key"}, 401),
            ({"X-Api-Key": "ke"}, 401),
            ({"X-Api-Key": ""}, 401),
            ({}, 401),
        ):
            reply = await site.request("POST", MESSAGES, json=ask, headers=headers)
            assert reply.status == status, headers
            if status == 401:
                assert error_of(reply)["type"] == "authentication_error"


async def test_messages_failure_in_mid_stream_is_no_clean_end() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold(at=2)
    async with client(engine) as (api, site):
        stream = await api.messages.create(model="fake", messages=USER, max_tokens=50, stream=True)
        events = [await anext(stream) for _ in range(4)]
        assert [e.delta.text for e in events[2:]] == ["O", "n"]
        engine.fail(StepFailedError("injected"))
        with pytest.raises(anthropic.APIStatusError, match="the engine failed on this request") as failed:
            await anext(stream)
        assert failed.value.type == "api_error"
        async with site.session.post(
            site.url + MESSAGES, json={"messages": USER, "max_tokens": 50, "stream": True}
        ) as r:
            body = bytearray()
            while b"text_delta" not in body:
                body += await r.content.readany()
            engine.fail(StepFailedError("injected"))
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_all(r.content, body)
        assert b"event: error" in body
        assert b"message_stop" not in body


async def test_messages_leaving_a_stream_aborts() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold(at=2)
    async with client(engine) as (api, _):
        async with api.messages.stream(model="fake", messages=USER, max_tokens=50) as stream:
            async for _ in stream.text_stream:
                break
        await engine.wait_for(open=0, aborted=1)


async def test_a_thread_is_answered_with_the_error_that_makes_the_client_send_its_history() -> None:
    engine = FakeEngine()
    async with client(engine) as (_, site):
        for kind, code in (("continue", "thread_not_found"), ("create", "thread_unsupported_request")):
            for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
                reply = await site.post(path, max_tokens=2, messages=USER, thread={"type": kind})
                assert reply.status == 400
                assert reply.json["error"]["details"]["error_code"] == code
    assert engine.prompts == []


async def test_context_management_that_asks_for_nothing_is_accepted_and_fallbacks_are_refused() -> None:
    async with client(FakeEngine()) as (_, site):
        for neutral in ({"context_management": {"edits": []}}, {"context_management": None}, {"fallbacks": []}):
            assert (await site.post(MESSAGES, max_tokens=2, messages=USER, **neutral)).status == 200
        clearing = {"edits": [{"type": "clear_tool_uses_20250919"}]}
        for name, value in (("context_management", clearing), ("fallbacks", [{"model": "other"}])):
            reply = await site.post(MESSAGES, max_tokens=2, messages=USER, **{name: value})
            assert reply.status == 400
            assert name in error_of(reply)["message"]


async def test_anthropics_client_lists_and_retrieves_models() -> None:
    async with client(FakeEngine(), served_model_name=["a", "b"]) as (api, _):
        page = await api.models.list()
        assert [(card.id, card.type, card.display_name) for card in page.data] == [
            ("a", "model", "a"),
            ("b", "model", "b"),
        ]
        assert (page.first_id, page.last_id, page.has_more) == ("a", "b", False)
        assert (await api.models.retrieve("b")).created_at == page.data[1].created_at
        assert page.data[0].created_at.tzinfo is not None
