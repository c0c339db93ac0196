"""Agents over /v1/responses: namespaces, hosted tools, allowed tools, log probabilities, truncation, lists of items."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from asyncengine import AsyncEngine, bundled_model
from asyncengine.api.conversation import Conversation
from asyncengine.server import create_app, unserved
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, USER, Site, serving

RESPONSES = "/v1/responses"
TEMPLATE = "{{ tools }}<tool_call><think></think>"
LOGPROBS: Any = ["message.output_text.logprobs"]


def function(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
    return {"type": "function", "name": name, "description": f"To {name}.", "parameters": parameters, "strict": False}


AGENTS: Any = {"type": "namespace", "name": "agents", "description": "Of agents.", "tools": [function("close")]}
TOOLS: Any = [function("run"), AGENTS, function("close"), {"type": "web_search", "external_web_access": True}]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted(text: str, template: str = TEMPLATE, max_model_len: int = 8192) -> FakeEngine:
    return FakeEngine(text, ends=True, max_model_len=max_model_len, chat_template=template)


@asynccontextmanager
async def client(engine: Any, **config: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Site]]:
    async with (
        serving(engine, served_model_name="fake", **config) as site,
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api, site


def chat_of(engine: FakeEngine) -> Conversation:
    prompt = engine.prompts[-1]
    return prompt if isinstance(prompt, Conversation) else Conversation(messages=prompt)  # type: ignore[arg-type]


def events_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(text.split("data: ")[1]) for text in body.decode().split("\n\n") if text]


async def test_tools_of_namespaces_are_flattened_and_come_back_with_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unserved._passed_over.clear()
    engine = scripted(call("agents__close", id="7"))
    with caplog.at_level(logging.INFO, "asyncengine.server"):
        async with client(engine) as (api, site):
            first = await api.responses.create(model="fake", input="x", tools=TOOLS)
            events = events_of((await site.post(RESPONSES, input="x", tools=TOOLS, stream=True)).body)
            (made,) = first.output
            said = {"type": "function_call_output", "call_id": made.call_id, "output": "closed"}  # type: ignore
            replayed: Any = [*USER, made.to_dict(), said]
            await api.responses.create(model="fake", input=replayed, tools=TOOLS)
    assert (made.type, made.namespace, made.name) == ("function_call", "agents", "close")  # type: ignore
    done = next(e for e in events if e["type"] == "response.output_item.done")["item"]
    assert (done["namespace"], done["name"], done["arguments"]) == ("agents", "close", '{"id": "7"}')
    described = [tool["function"] for tool in chat_of(engine).tools]
    assert [tool["name"] for tool in described] == ["run", "agents__close", "close"]
    assert described[1]["description"] == "Of agents.\nTo close."
    _, assistant, result = chat_of(engine).messages
    assert assistant["tool_calls"][0]["function"] == {"name": "agents__close", "arguments": {"id": "7"}}
    assert (result["name"], result["content"]) == ("agents__close", "closed")
    told = [record.getMessage() for record in caplog.records if "web_search" in record.getMessage()]
    assert len(told) == 1  # of three requests


async def test_allowed_tools() -> None:
    engine = scripted(call("close", id="7"))
    close, hosted = {"type": "function", "name": "close"}, {"type": "web_search"}
    within = close | {"namespace": "agents"}
    async with client(engine) as (_, site):

        async def asked(**choice: Any) -> list[str]:
            reply = await site.post(RESPONSES, input="x", tools=TOOLS, tool_choice=choice)
            assert reply.status == 200, reply.body
            assert reply.json["tool_choice"] == choice
            return [tool["function"]["name"] for tool in chat_of(engine).tools]

        assert await asked(type="allowed_tools", mode="auto", tools=[close, hosted]) == ["close"]
        assert engine.submitted[-1][1].structured_outputs is None
        assert await asked(type="allowed_tools", mode="required", tools=[close, within]) == ["agents__close", "close"]
        grammar = engine.submitted[-1][1].structured_outputs
        assert grammar is not None
        assert "agents__close" in grammar.source()
        assert '\\"run\\"' not in grammar.source()
        assert await asked(type="allowed_tools", mode="auto", tools=[hosted]) == []
        assert await asked(**within)
        for choice, says in (
            ({"type": "allowed_tools", "mode": "required", "tools": [hosted]}, "web_search"),
            ({"type": "allowed_tools", "mode": "auto", "tools": []}, "allowed_tools"),
            ({"type": "allowed_tools", "mode": "always", "tools": [close]}, "always"),
            ({"type": "allowed_tools", "mode": "auto", "tools": [close | {"name": "g"}]}, "'g'"),
            ({"type": "web_search"}, "web_search"),
        ):
            reply = await site.post(RESPONSES, input="x", tools=TOOLS, tool_choice=choice)
            assert (reply.status, reply.error["param"]) == (400, "tool_choice")
            assert says in reply.error["message"]

        tools = [{"type": "function", "function": {"name": name}} for name in ("run", "close")]
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:]}}
        reply = await site.post(CHAT, messages=USER, tools=tools, tool_choice=allowed)
        assert reply.json["choices"][0]["finish_reason"] == "tool_calls"
        assert [tool["function"]["name"] for tool in chat_of(engine).tools] == ["close"]
        allowed["allowed_tools"]["tools"] = []  # type: ignore[index]
        assert (await site.post(CHAT, messages=USER, tools=tools, tool_choice=allowed)).error["param"] == "tool_choice"


async def test_log_probabilities_are_those_of_the_text() -> None:
    said = "Well, I 😀 know"
    plain = scripted(said, template="plain")
    engine = scripted(f"<think>\nHm.\n</think>\n\n{said}\n{call('close', id='7')}")
    for each, tools in ((plain, []), (engine, TOOLS)):
        async with client(each) as (api, site):
            asked: dict[str, Any] = {"model": "fake", "input": "x", "tools": tools, "include": LOGPROBS}
            whole = await api.responses.create(**asked, top_logprobs=2)
            events = events_of((await site.post(RESPONSES, **asked, top_logprobs=2, stream=True)).body)
            async with api.responses.stream(**asked) as stream:
                final = await stream.get_final_response()
            none = await api.responses.create(model="fake", input="x", tools=tools)
        message = next(item for item in whole.output if item.type == "message")
        (content,) = message.content
        assert content.text == said  # type: ignore[union-attr]
        told = content.logprobs or []  # type: ignore[union-attr]
        assert "".join(each.token for each in told) == said
        assert [each.logprob for each in told] == [-1.0] * len(said)
        assert [top.token for top in told[0].top_logprobs] == ["X", "W"]
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        assert len(deltas) > 5
        assert all("".join(each["token"] for each in e["logprobs"]) == e["delta"] for e in deltas)
        done = next(e for e in events if e["type"] == "response.output_text.done")
        assert [each for e in deltas for each in e["logprobs"]] == done["logprobs"]
        last = next(item for item in events[-1]["response"]["output"] if item["type"] == "message")
        assert last["content"][0]["logprobs"] == done["logprobs"]
        assert events[-1]["response"]["top_logprobs"] == 2
        streamed = next(item for item in final.output if item.type == "message").content[0].logprobs  # type: ignore
        assert [len(each.top_logprobs) for each in streamed] == [0] * len(said)  # type: ignore[union-attr]
        assert next(item for item in none.output if item.type == "message").content[0].logprobs == []  # type: ignore


async def test_log_probabilities_of_the_bundled_model_are_those_of_chat_completions() -> None:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        client(engine) as (api, site),
    ):
        asked: dict[str, Any] = {"model": "fake", "temperature": 0}
        chat = await api.chat.completions.create(
            **asked, messages=USER, max_tokens=30, logprobs=True, top_logprobs=3  # type: ignore[arg-type]
        )  # fmt: skip
        given: dict[str, Any] = asked | {"input": USER, "max_output_tokens": 30, "include": LOGPROBS, "top_logprobs": 3}
        whole = (await site.post(RESPONSES, **given)).json["output"][0]["content"][0]
        events = events_of((await site.post(RESPONSES, **given, stream=True)).body)
    assert chat.choices[0].logprobs is not None
    expected = [each.model_dump() for each in chat.choices[0].logprobs.content or ()]
    assert [each["token"] for each in whole["logprobs"]] == [each["token"] for each in expected]
    for streamed in (whole, events[-1]["response"]["output"][0]["content"][0]):
        for mine, other in zip(streamed["logprobs"], expected, strict=True):
            assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            assert [top["token"] for top in mine["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == whole["text"]


async def test_truncation_drops_the_oldest_turns() -> None:
    engine = scripted("Fine.", template="{{ tools }}<tool_call>", max_model_len=400)
    talk = [{"role": role, "content": f"{i:02d} " + "x" * 40} for i in range(10) for role in ("user", "assistant")]
    ask = {"role": "user", "content": "And now?"}
    async with client(engine) as (_, site):

        async def kept(items: list[Any], **fields: Any) -> list[str]:
            options = {"instructions": "Be brief.", "truncation": "auto"} | fields
            reply = await site.post(RESPONSES, input=items, **options)
            assert reply.status == 200, reply.body
            assert reply.json["truncation"] == "auto"
            return [f"{m['role'][0]} {(m['content'] or 'call')[:2]}" for m in chat_of(engine).messages]

        assert (await site.post(RESPONSES, input=[*talk, ask])).error["code"] == "context_length_exceeded"
        rest = ["u 07", "a 07", "u 08", "a 08", "u 09", "a 09", "u An"]
        assert await kept([*talk, ask], max_output_tokens=50) == ["s Be", *rest]
        assert await kept([*talk, ask], max_output_tokens=150) == ["s Be", *rest[2:]]
        assert await kept([ask]) == ["s Be", "u An"]
        developer = {"role": "developer", "content": "Be kind."}
        assert await kept([developer, *talk, ask], max_output_tokens=150) == ["s Be", "s Be", *rest[4:]]
        made = [
            item
            for i in range(9)
            for item in (
                {"type": "function_call", "call_id": f"c{i}", "name": "run", "arguments": '{"id": "a"}'},
                {"type": "function_call_output", "call_id": f"c{i}", "output": f"r{i} " + "y" * 40},
            )
        ]
        calls = await kept([ask, *made], tools=TOOLS)
        assert calls[0] == "s Be"
        assert calls[1:3] != ["u An", "a ca"]
        assert calls[1] == "a ca"  # a result goes with its call
        assert calls[-1] == "t r8"
        reply = await site.post(RESPONSES, input="x" * 500, truncation="auto")
        assert (reply.status, reply.error["param"]) == (400, "input")
        asked = {"input": [*talk, ask], "truncation": "auto", "max_output_tokens": 150}
        count = (await site.post(f"{RESPONSES}/input_tokens", **asked)).json["input_tokens"]
        assert count <= 250


async def test_input_items_are_listed_page_by_page() -> None:
    engine = scripted("Fine.", template="plain")
    async with client(engine) as (api, site):
        given: Any = [{"role": "user", "content": f"{i}"} for i in range(24)]
        said = {"role": "assistant", "content": [{"type": "output_text", "text": "3"}]}
        given[3] = {"type": "message", "id": "msg_mine"} | said
        first = await api.responses.create(model="fake", input=given)
        listed = [item async for item in api.responses.input_items.list(first.id, order="asc")]
        assert [item.content[0].text for item in listed] == [f"{i}" for i in range(24)]  # type: ignore
        assert [(item.type, item.role, item.status) for item in listed[2:4]] == [  # type: ignore
            ("message", "user", "completed"),
            ("message", "assistant", "completed"),
        ]
        assert len({item.id for item in listed}) == 24
        assert listed[3].id == "msg_mine"
        page = await api.responses.input_items.list(first.id)
        assert [item.content[0].text for item in page.data] == [f"{i}" for i in range(23, 3, -1)]  # type: ignore
        assert page.has_more
        after = await api.responses.input_items.list(first.id, after=page.data[-1].id, limit=2)
        assert [item.content[0].text for item in after.data] == ["3", "2"]  # type: ignore
        second = await api.responses.create(model="fake", input="And?", previous_response_id=first.id)
        page = await api.responses.input_items.list(second.id, limit=3)
        assert [item.content[0].text for item in page.data] == ["And?", "Fine.", "23"]  # type: ignore
        assert page.data[1].id == first.output[0].id
        path = f"{RESPONSES}/{first.id}/input_items"
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
            reply = await site.get(f"{path}?{query}")
            assert (reply.status, reply.error["param"]) == (400, param)
        assert (await site.get(f"{RESPONSES}/none/input_items")).status == 404
        assert (await site.post(path)).status == 405


async def test_input_tokens_and_cancel() -> None:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        client(engine) as (api, site),
    ):
        asked: dict[str, Any] = {"model": "fake", "input": "Tell me a story.", "instructions": "Be brief."}
        whole = await api.responses.create(**asked, max_output_tokens=2)
        assert whole.usage is not None
        counted = await api.responses.input_tokens.count(**asked)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", whole.usage.input_tokens)
        more = await api.responses.input_tokens.count(input="And then?", previous_response_id=whole.id)
        assert more.input_tokens > 0
        assert (await site.post(f"{RESPONSES}/input_tokens")).error["param"] == "input"
        assert (await site.post(f"{RESPONSES}/input_tokens", input="story " * 3000)).error["param"] == "input"
        with pytest.raises(openai.BadRequestError, match="background"):
            await api.responses.cancel(whole.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.cancel("resp_none")


async def test_what_other_servers_know_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    unserved._passed_over.clear()
    engine = scripted("Fine.", template="plain")
    other: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    with caplog.at_level(logging.INFO, "asyncengine.server"):
        async with client(engine) as (api, _):
            for _ in range(2):
                reply = await api.responses.create(
                    model="fake",
                    input=[*USER, other, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "So?"}],  # type: ignore
                    text={"verbosity": "low"},
                    reasoning={"effort": "high", "summary": "auto"},
                    include=["reasoning.encrypted_content"],
                )
    assert (reply.text.verbosity, reply.reasoning.effort) == ("low", "high")  # type: ignore[union-attr]
    assert [m["content"] for m in chat_of(engine).messages] == [USER[0]["content"], "Yes.", "So?"]
    for name in ("text.verbosity", "reasoning.effort"):
        assert len([record for record in caplog.records if record.getMessage().startswith(name)]) == 1
    knows = scripted("Fine.", template="{{ verbosity }}{{ reasoning_effort }}")
    async with client(knows) as (api, _):
        await api.responses.create(model="fake", input="x", text={"verbosity": "low"}, reasoning={"effort": "high"})
    assert chat_of(knows).chat_template_kwargs == {"verbosity": "low", "reasoning_effort": "high"}


async def test_items_may_be_named_by_their_ids(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    engine = scripted("<think>\nHm.\n</think>\n\nWell.\n" + call("agents__close", id="7"))
    async with serving(engine, api_key_file=str(keys), max_stored_responses=2) as site:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))

        async def asked(items: list[Any], headers: dict[str, str] = one) -> Any:
            body = {"input": items, "tools": TOOLS}
            return await site.request("POST", RESPONSES, json=body, headers=headers)

        first = (await asked(USER)).json
        named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "closed"}
        second = (await asked([*USER, *named, result])).json
        by_ids = chat_of(engine)
        assert (await asked([*USER, *first["output"], result])).status == 200
        assert chat_of(engine) == by_ids
        assert (await asked([*USER, *named], two)).error["param"] == "input[1].id"
        for path in ("input_items", "cancel"):
            method = "GET" if path == "input_items" else "POST"
            assert (await site.request(method, f"{RESPONSES}/{second['id']}/{path}", headers=two)).status == 404
        assert (await asked([*USER, *named])).error["param"] == "input[1].id"  # the oldest response is gone
        last = [{"id": second["output"][1]["id"]}]
        assert (await asked([*USER, *last])).status == 200


async def test_routes_of_stored_responses_in_a_program_of_its_own() -> None:
    runner = web.AppRunner(create_app(scripted("Fine.", template="plain"), routes=["/v1/responses"]))  # type: ignore[arg-type]
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/responses"
        async with aiohttp.ClientSession() as session:
            async with session.post(base, json={"input": "x"}) as reply:
                made = (await reply.json())["id"]
            async with session.get(f"{base}/{made}/input_items") as reply:
                assert len((await reply.json())["data"]) == 1
            async with session.post(f"{base}/{made}/cancel") as reply:
                assert (reply.status, (await reply.json())["error"]["param"]) == (400, "response_id")
            async with session.post(f"{base}/input_tokens", json={"input": "x"}) as reply:
                assert (await reply.json())["object"] == "response.input_tokens"
    finally:
        await runner.cleanup()
