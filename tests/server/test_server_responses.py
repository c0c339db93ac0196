"""/v1/responses: the openai package and the real server, with the bundled model or a scripted engine."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from asyncengine import AsyncEngine, bundled_model
from asyncengine.errors import ConfigError
from asyncengine.server.config import ServerConfig
from asyncengine.server.response_store import MAX_SIZE, ResponseStore, StoredResponse
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Site, serving

RESPONSES = "/v1/responses"
ANSWER = "Once upon a time 😀 there was a fox."
MODEL = "bundled"


class Animal(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    legs: int = pydantic.Field(ge=0, le=8)


@asynccontextmanager
async def client(engine: Any, **config: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Site]]:
    async with (
        serving(engine, api_key="key", **config) as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="key", max_retries=0) as api,
    ):
        site.session.headers["Authorization"] = "Bearer key"
        yield api, site


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type and numbered."""
    *events, rest = body.decode().split("\n\n")
    assert rest == ""
    parsed = []
    for number, text in enumerate(events):
        name, data = text.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
        assert parsed[-1]["sequence_number"] == number
    return parsed


def types_of(events: list[Any]) -> list[str]:
    """Types in their order, with deltas of a row as one."""
    types = [e["type"] if isinstance(e, dict) else e.type for e in events]
    return [t for i, t in enumerate(types) if i == 0 or t != types[i - 1]]


def said(engine: FakeEngine) -> list[tuple[str, str]]:
    """Roles and contents of the last prompt."""
    return [(m["role"], m["content"]) for m in engine.prompts[-1]]  # type: ignore[index, misc]


async def test_responses_the_bundled_model_answers() -> None:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        client(engine, served_model_name=MODEL) as (api, _),
    ):
        asked: dict[str, Any] = {"model": MODEL, "input": "Tell me a story.", "temperature": 0, "max_output_tokens": 40}
        whole = await api.responses.create(**asked)
        chat = await api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Tell me a story."}], temperature=0, max_tokens=40
        )
        assert whole.output_text == chat.choices[0].message.content
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert whole.output[0].status == "incomplete"
        assert chat.usage is not None
        assert whole.usage is not None
        assert whole.usage.input_tokens == chat.usage.prompt_tokens
        assert (whole.usage.output_tokens, whole.usage.total_tokens) == (40, chat.usage.total_tokens)
        assert whole.usage.output_tokens_details.reasoning_tokens == 0

        stream = await api.responses.create(**asked, stream=True)
        events = [event async for event in stream]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == whole.output_text

        follow = await api.responses.create(**asked | {"input": "And then?"}, previous_response_id=whole.id)
        assert follow.usage is not None
        assert follow.usage.input_tokens > whole.usage.total_tokens
        assert follow.usage.input_tokens_details.cached_tokens > 0
        same = await api.responses.create(
            **asked
            | {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]},
                    *[item.to_dict() for item in whole.output],
                    {"role": "user", "content": "And then?"},
                ]
            },
            store=False,
        )
        assert same.output_text == follow.output_text

        parsed = await api.responses.parse(model=MODEL, input="An animal?", text_format=Animal, max_output_tokens=200)
        assert isinstance(parsed.output_parsed, Animal)
        async with api.responses.stream(model=MODEL, input="An animal?", text_format=Animal) as typed:
            final = await typed.get_final_response()
        assert isinstance(final.output_parsed, Animal)
        loose = await api.responses.create(
            model=MODEL, input="JSON?", text={"format": {"type": "json_object"}}, max_output_tokens=60
        )
        assert loose.output_text.startswith("{")


async def test_responses_events_come_in_their_order() -> None:
    async with client(FakeEngine(ANSWER, ends=True)) as (api, site):
        reply = await site.post(RESPONSES, input="x", stream=True, metadata={"a": "b"}, instructions="Be brief.")
        events = events_of(reply.body)
        whole = (await site.post(RESPONSES, input="x", metadata={"a": "b"}, instructions="Be brief.")).json
        async with api.responses.stream(model="fake", input="x") as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_response()
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert types_of(events) == types_of(seen) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == ANSWER
    assert final.output_text == ANSWER
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    answered = events[-1]["response"]
    item = answered["output"][0]
    assert {e["item_id"] for e in events if "item_id" in e} == {item["id"]}
    assert item == whole["output"][0] | {"id": item["id"]}
    changing = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in answered.items() if k not in changing} == {
        k: v for k, v in whole.items() if k not in changing
    }
    assert whole["status"] == "completed"
    assert whole["usage"]["output_tokens"] == len(ANSWER) + 1


async def test_responses_an_output_without_text_has_a_message() -> None:
    async with client(FakeEngine("", ends=True)) as (api, site):
        assert (await api.responses.create(model="fake", input="x")).output_text == ""
        events = events_of((await site.post(RESPONSES, input="x", stream=True)).body)
    assert [e["type"] for e in events if ".delta" not in e["type"]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_responses_are_kept_for_the_next_request() -> None:
    engine = FakeEngine("Fine.", ends=True)
    async with client(engine) as (api, _):
        first = await api.responses.create(model="fake", input="How are you?", instructions="Be brief.")
        assert said(engine) == [("system", "Be brief."), ("user", "How are you?")]
        second = await api.responses.create(
            model="fake", input="Why?", previous_response_id=first.id, instructions="Be long."
        )
        third = await api.responses.create(model="fake", input="So?", previous_response_id=second.id)
        talk = [("user", "How are you?"), ("assistant", "Fine."), ("user", "Why?"), ("assistant", "Fine.")]
        assert said(engine) == [*talk, ("user", "So?")]
        assert third.previous_response_id == second.id
        assert await api.responses.retrieve(third.id) == third
        with pytest.raises(openai.BadRequestError, match="stream"):
            await api.responses.retrieve(third.id, stream=True)

        unkept: Any = await api.responses.create(model="fake", input="x", store=False)
        assert unkept.store is False
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(unkept.id)
        with pytest.raises(openai.BadRequestError) as lost:
            await api.responses.create(model="fake", input="x", previous_response_id=unkept.id)
        assert (lost.value.param, lost.value.code) == ("previous_response_id", "previous_response_not_found")

        await api.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.delete(second.id)
        await api.responses.create(model="fake", input="x", previous_response_id=third.id)
        assert said(engine)[:4] == talk

        async with api.responses.stream(model="fake", input="x") as stream:
            streamed = await stream.get_final_response()
        assert (await api.responses.retrieve(streamed.id)).output_text == "Fine."


async def test_responses_are_for_those_who_have_their_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    async with serving(FakeEngine("Fine.", ends=True), api_key_file=str(file)) as site:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        kept = (await site.request("POST", RESPONSES, json={"input": "x"}, headers=one)).json["id"]
        for method in ("GET", "DELETE"):
            assert (await site.request(method, f"{RESPONSES}/{kept}", headers=two)).status == 404
            assert (await site.request(method, f"{RESPONSES}/{kept}")).status == 401
        follow = {"input": "x", "previous_response_id": kept}
        assert (await site.request("POST", RESPONSES, json=follow, headers=two)).status == 400
        assert (await site.request("POST", RESPONSES, json=follow, headers=one)).status == 200
        assert (await site.get(f"{RESPONSES}/{kept}", headers=one)).json["id"] == kept
        gone = await site.request("DELETE", f"{RESPONSES}/{kept}", headers=one)
        assert gone.json == {"id": kept, "object": "response", "deleted": True}
    async with serving(FakeEngine("Fine.", ends=True)) as site:  # without keys all clients are one
        kept = (await site.post(RESPONSES, input="x")).json["id"]
        reply = await site.get(f"{RESPONSES}/{kept}", headers={"Connection": "close"})
        assert reply.json["id"] == kept
        wrong = await site.post(f"{RESPONSES}/{kept}")
        assert (wrong.status, wrong.headers["Allow"]) == (405, "GET, HEAD, DELETE")


def test_responses_store_keeps_so_many_and_so_much() -> None:
    def sized(size: int) -> StoredResponse:
        return StoredResponse(b"x" * size)

    overhead = sized(0).size
    store = ResponseStore(3, 3 * overhead + 3000)
    own, other = store.of("a"), store.of("b")
    for name in "123":
        own.put(name, sized(1000))
    assert own.get("1") is not None
    other.put("4", sized(1000))  # of the four, 2 is the one that nobody used for longest
    assert [own.get(name) is not None for name in "123"] == [True, False, True]
    assert other.get("1") is None
    assert own.get("4") is None
    other.put("5", sized(3000))  # leaves no room for any of 1000
    assert (len(store), store.held_bytes) == (1, overhead + 3000)
    other.put("5", sized(10))
    assert store.held_bytes == overhead + 10
    assert other.pop("5") == sized(10)
    assert other.pop("5") is None
    assert (len(store), store.held_bytes) == (0, 0)
    assert store.of("a").takes(3 * overhead + 3000)
    assert not store.of("a").takes(3 * overhead + 3001)
    assert not ResponseStore(3, 10**9).of("a").takes(MAX_SIZE + 1)
    assert not ResponseStore(0, 10**6).of("a").takes(1)
    for field in ("max_stored_responses", "max_stored_response_bytes"):
        with pytest.raises(ConfigError, match=field):
            ServerConfig(**{field: -1})


async def test_responses_that_cannot_be_kept_say_so() -> None:
    body = b'{"input": "x"}'
    for limits, asked in (
        ({"max_stored_responses": 0}, body),
        ({"max_stored_response_bytes": 1000}, body),
        ({}, body + b" " * MAX_SIZE),
    ):
        async with client(FakeEngine("Fine.", ends=True), **limits) as (_, site):  # type: ignore[arg-type]
            response = (await site.request("POST", RESPONSES, data=io.BytesIO(asked))).json
            assert response["store"] is False
            assert (await site.get(f"{RESPONSES}/{response['id']}")).status == 404


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no text"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "input_image",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "no stored item"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "required"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "input[0].call_id", "no call"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input", "no text"),
        ({"input": 3}, "input", "str"),
        ({"input": "x", "background": True}, "background", "not supported"),
        ({"input": "x", "conversation": "conv_1"}, "conversation", "not supported"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"input": "x", "truncation": "always"}, "truncation", "always"),
        ({"input": "x", "truncation": "auto", "max_output_tokens": 1000}, "max_output_tokens", "1000"),
        ({"input": "x", "top_logprobs": 200}, "top_logprobs", "200"),
        ({"input": "x", "top_logprobs": -1}, "top_logprobs", "-1"),
        ({"input": "x", "n": 2}, "n", "not supported"),
        ({"input": "x", "include": ["message.output_text"]}, "include", "output_text"),
        ({"input": "x", "text": {"verbosity": "lots"}}, "text.verbosity", "lots"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
        ({"input": "x", "temperature": 3}, "temperature", "3"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "x", "max_output_tokens": 1000}, "max_output_tokens", "1000"),
        ({"input": "x" * 300}, "input", "307"),
        ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata", "512"),
        ({"input": "x", "model": "other"}, "model", "other"),
        ({"input": "x", "previous_response_id": "resp_none"}, "previous_response_id", "resp_none"),
    ],
)
async def test_responses_wrong_requests(fields: dict[str, Any], param: str, says: str) -> None:
    async with serving(FakeEngine(), strict_model_names=True) as site:
        for stream in (False, True):
            reply = await site.post(RESPONSES, **fields, stream=stream)
            assert reply.status == (404 if param == "model" else 400)
            assert reply.error["param"] == param
            assert says in reply.error["message"]


async def test_responses_names_of_the_engine_are_translated() -> None:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        serving(engine) as site,  # type: ignore[arg-type]
    ):
        schema = {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}
        for fields, param in (
            ({"text": {"format": schema}}, "text.format"),
            ({"guided_regex": "(a"}, "guided_regex"),
            ({"max_output_tokens": 100_000}, "max_output_tokens"),
            ({"input": "story " * 3000}, "input"),
        ):
            reply = await site.post(RESPONSES, **{"input": "x"} | fields)
            assert (reply.status, reply.error["param"]) == (400, param), reply.error
            assert param in reply.error["message"]


async def test_responses_failure_in_mid_stream_is_no_clean_end() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold(at=2)
    async with client(engine) as (api, _):
        stream = await api.responses.create(model="fake", input="x", stream=True)
        events = [await anext(stream) for _ in range(6)]
        assert [e.delta for e in events[4:]] == ["O", "n"]
        engine.die()
        failed, error = await anext(stream), await anext(stream)
        assert failed.type == "response.failed"
        assert failed.response.status == "failed"
        assert failed.response.error.code == "server_error"
        assert failed.response.output_text == "On"
        assert failed.response.output[0].status == "incomplete"
        assert error.type == "error"
        assert "the engine has failed" in error.message
        assert error.sequence_number == failed.sequence_number + 1
        with pytest.raises(openai.APIConnectionError):
            await anext(stream)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(failed.response.id)


async def test_responses_leaving_a_stream_aborts() -> None:
    engine = FakeEngine(ANSWER)
    engine.hold(at=2)
    async with client(engine) as (api, site):
        stream = await api.responses.create(model="fake", input="x", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await engine.wait_for(open=0, aborted=1)
        asking = asyncio.create_task(api.responses.create(model="fake", input="x"))
        await engine.wait_for(open=1)
        asking.cancel()
        await engine.wait_for(open=0, aborted=2)
        counts = await site.metric("asyncengine:request_success_total")
        assert [n for labels, n in counts.items() if "abort" in labels] == [2]
