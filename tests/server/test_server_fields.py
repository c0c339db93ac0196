"""Fields that are long, that hide JSON in a string, and that are served under another name or not at all."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest

from asyncengine import AsyncEngine, InvalidRequestError, bundled_model
from asyncengine.api.json_text import JsonTexts, JsonTooLargeError, object_of
from asyncengine.api.structured_outputs import StructuredOutputs
from asyncengine.server import unserved
from asyncengine.server.chat import Chat
from asyncengine.server.completions import Completions
from asyncengine.server.errors import ApiError
from asyncengine.server.limits import FIELD_BYTES, LONG_FIELD, check_fields
from asyncengine.server.messages_api import Messages
from asyncengine.server.responses import Responses
from asyncengine.testing import settle
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, Site, serving

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    CHAT: {"messages": USER, "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    MESSAGES: {"messages": USER, "max_tokens": 1},
}
FIELDS = {COMPLETIONS: Completions.fields, CHAT: Chat.fields, RESPONSES: Responses.fields, MESSAGES: Messages.fields}
TEMPLATE = "{{ tools }}<tool_call><think></think>"
DEEP = "[" * 10_000 + "]" * 10_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def calls(arguments: str, times: int = 1) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "a", "content": "1"}
    return [*USER, {"role": "assistant", "content": None, "tool_calls": [call] * times}, result]


def items(arguments: str, times: int = 1) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    return [*USER, *[call] * times, {"type": "function_call_output", "call_id": "a", "output": "1"}]


async def posted(site: Site, route: str, **fields: Any) -> tuple[int, Any]:
    return await sent(site, route, json.dumps(fields).encode())


async def sent(site: Site, route: str, body: bytes) -> tuple[int, Any]:
    reply = await site.request("POST", route, data=io.BytesIO(body), headers={"Content-Type": "application/json"})
    return reply.status, reply.json.get("error")


@pytest.mark.parametrize(
    ("arguments", "times", "reason"),
    [
        ('{"a":' + DEEP + "}", 1, "64 levels deep"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, 1, "64 levels deep"),
        ('{"a":[' + "1," * 100_000 + "1]}", 1, "100000 values"),
        ('{"a":[' + "1," * 10_000 + "1]}", 11, "100000 values"),
        ('{"a":"' + "x" * 3_000_000 + '"}', 2, "4194304 bytes"),
    ],
)  # fmt: skip
async def test_json_in_a_string_is_limited_before_it_is_parsed(arguments: str, times: int, reason: str) -> None:
    engine = FakeEngine(max_model_len=1 << 24, chat_template=TEMPLATE)
    async with serving(engine) as site:
        for route, fields in (
            (CHAT, {"messages": calls(arguments, times)}),
            (RESPONSES, {"input": items(arguments, times)}),
            ("/tokenize", {"messages": calls(arguments, times)}),
        ):
            status, error = await posted(site, route, **{**VALID.get(route, {}), **fields})
            assert status == 400, error
            assert reason in error["message"]
            assert error["param"].endswith("arguments")
        assert engine.submitted == []


async def test_arguments_in_a_conversation_are_objects_where_they_are_json() -> None:
    engine = FakeEngine(max_model_len=4096, chat_template=TEMPLATE)
    async with serving(engine) as site:
        for text, wanted in (
            ('{"a": [1]}', {"a": [1]}),
            ("[1]", "[1]"),
            ('{"a"', '{"a"'),
            ("", {}),
            ("\\ud800", "\\ud800"),
        ):
            assert (await posted(site, CHAT, **VALID[CHAT] | {"messages": calls(text)}))[0] == 200
            assert (await posted(site, RESPONSES, **VALID[RESPONSES] | {"input": items(text)}))[0] == 200
            for prompt in engine.prompts[-2:]:
                messages: Any = getattr(prompt, "messages", prompt)
                assert messages[1]["tool_calls"][0]["function"]["arguments"] == wanted


@pytest.mark.parametrize("arguments", ['{"a":' * 5000 + "1" + "}" * 5000, '{"a": ' + DEEP + "}"])
async def test_arguments_that_a_model_nests_deeply_are_no_fault(arguments: str) -> None:
    engine = FakeEngine(
        f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>',
        ends=True, max_model_len=1 << 20, chat_template=TEMPLATE,
    )  # fmt: skip
    tool = {"name": "f", "input_schema": {"type": "object"}}
    async with serving(engine) as site:
        for stream in (False, True):
            reply = await site.post(MESSAGES, messages=USER, max_tokens=100_000, tools=[tool], stream=stream)
            assert reply.status == 200
            assert b"error" not in reply.body
        asked = {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {}}]}
        answer = await site.post(RESPONSES, **asked)
        assert answer.status == 200
        again = await site.post(RESPONSES, input="y", previous_response_id=answer.json["id"])
        assert again.status == 200, again.body


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", DEEP),
        ("guided_json", json.dumps({"enum": [1] * 100_000})),
        ("json_schema", '{"a":' * 10_000),
        ("structured_outputs", {"json": DEEP}),
        ("guided_json", json.dumps({"description": "x" * (1 << 20)})),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"description": "x" * (1 << 20)}}}),
        ("guided_regex", "x" * ((1 << 20) + 1)),
        ("guided_grammar", "x" * ((1 << 20) + 1)),
        ("guided_choice", ["x" * 1000] * 1200),
    ],
)
async def test_forms_of_the_output_are_limited(field: str, value: Any) -> None:
    async with AsyncEngine.from_pretrained(bundled_model()) as engine, serving(engine) as site:  # type: ignore[arg-type]
        for route in (COMPLETIONS, CHAT):
            status, error = await posted(site, route, **VALID[route], **{field: value})
            assert (status, error["param"]) == (400, field), error
        tools = {"tools": [TOOL], "tool_choice": "auto"}
        status, error = await posted(site, CHAT, **VALID[CHAT], **{field: value}, **tools)
        assert status == 400, error


def test_the_text_of_a_schema_has_limits() -> None:
    for text in (DEEP, "[" * 5, '{"a": ' + "[1]," * 40_000, "\ud800"):
        with pytest.raises(InvalidRequestError, match="no schema"):
            StructuredOutputs(json=text).source()
    texts = JsonTexts(max_bytes=20, max_values=10)
    assert texts.parse('{"a": [1, 2]}') == {"a": [1, 2]}
    with pytest.raises(JsonTooLargeError, match="20 bytes"):
        texts.parse('"ééé"')
    assert (object_of('{"a": 1}'), object_of("[1]"), object_of("{"), object_of(DEEP)) == ({"a": 1}, None, None, None)


@pytest.mark.parametrize("route", VALID)
async def test_every_field_has_a_limit(route: str) -> None:
    engine = FakeEngine(max_model_len=4096)
    async with serving(engine) as site:
        for field in sorted(FIELDS[route]):
            limit = FIELD_BYTES.get(field, LONG_FIELD)
            if limit is None:
                continue
            escaped = "".join(f"\\u{ord(c):04x}" for c in field)  # which a parser takes for the same name
            for name in (field, escaped):
                if limit > 1 << 20:
                    with pytest.raises(ApiError, match=f"{field} has more than"):
                        check_fields([(name.encode(), limit + 1)], FIELDS[route])
                    continue
                body = json.dumps(VALID[route])[:-1] + f', "{name}": "' + "x" * limit + '"}'
                status, error = await sent(site, route, body.encode())
                assert status == 400
                assert f"{field} has more than" in error["message"]
        long = {"something else": "x" * 2_000_000, "x": {"user": "y" * LONG_FIELD}}
        assert (await posted(site, route, **VALID[route], **long))[0] == 200


TABLES = {
    COMPLETIONS: unserved.COMPLETION,
    CHAT: unserved.CHAT,
    RESPONSES: unserved.RESPONSES,
    MESSAGES: unserved.MESSAGES,
    "/v1/embeddings": unserved.VECTORS,
}


@pytest.mark.parametrize("route", TABLES)
async def test_fields_that_are_not_served_are_refused_by_name(route: str) -> None:
    async with serving(FakeEngine(max_model_len=4096)) as site:
        valid = VALID.get(route, {"input": "x"})
        wrong: tuple[Any, ...] = ({"a": 1}, "something", 7, [1])
        for field, neutral in TABLES[route].items():
            for value in wrong:
                status, error = await posted(site, route, **valid | {field: value})
                assert status == 400
                assert field in error["message"], error
                assert "not supported" in error["message"]
            if route != "/v1/embeddings":  # which this engine has not
                for value in neutral:
                    assert (await posted(site, route, **valid | {field: value}))[0] == 200, (field, value)


def test_the_fields_of_other_engines_that_change_an_output_are_known() -> None:
    for field in (
        "thinking_token_budget", "repetition_detection", "prompt_embeds", "max_new_tokens", "stop_regex", "lora_path",
        "n_predict", "top_n_sigma", "repeat_penalty", "structural_tag", "return_hidden_states",
    ):  # fmt: skip
        assert all(field in table for table in list(TABLES.values())[:4]), field
    assert all("include_reasoning" in TABLES[route] for route in (COMPLETIONS, RESPONSES, MESSAGES))
    assert TABLES["/v1/embeddings"]["embed_dtype"] == (None, "float32")
    assert TABLES["/v1/embeddings"]["endianness"] == (None, "native", "little")


async def test_forms_of_other_engines_are_served() -> None:
    engine = FakeEngine()
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    async with serving(engine) as site:
        for fields, kind, source in (
            ({"regex": "a+"}, "regex", "a+"),
            ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
            ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
            ({"json_schema": schema}, "json", json.dumps(schema)),
            ({"json_schema": json.dumps(schema)}, "json", json.dumps(schema)),
            ({"guided_json": schema}, "json", json.dumps(schema)),
            ({"structured_outputs": {"json": schema}}, "json", json.dumps(schema)),
        ):
            for route in (COMPLETIONS, CHAT, RESPONSES):
                assert (await posted(site, route, **VALID[route], **fields))[0] == 200
                asked = engine.submitted[-1][1].structured_outputs
                assert asked is not None
                assert (asked.kind, asked.source()) == (kind, source)
        both = await posted(site, COMPLETIONS, **VALID[COMPLETIONS], regex="a", ebnf="b")
        assert (both[0], both[1]["param"]) == (400, "ebnf")
        for field in ("json_schema", "guided_json", "response_format"):
            value = {"type": "json_schema", "json_schema": {"schema": 5}} if field == "response_format" else 5
            status, error = await posted(site, COMPLETIONS, **VALID[COMPLETIONS], **{field: value})
            assert status == 400
            assert error["param"].startswith(field)


async def test_reasoning_can_be_left_out() -> None:
    engine = FakeEngine("<think>\nHm.\n</think>\n\nYes.", ends=True, max_model_len=4096, chat_template=TEMPLATE)
    async with serving(engine) as site:
        asked: dict[str, Any] = {"messages": USER, "max_tokens": 100}
        for told in (True, False):
            message = (await site.post(CHAT, **asked, include_reasoning=told)).json["choices"][0]["message"]
            assert message["content"] == "Yes."
            assert (message["reasoning_content"] is not None) == told
            events = await site.events(CHAT, **asked, include_reasoning=told)
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
            assert any("reasoning_content" in delta for delta in deltas) == told


async def test_fields_that_contradict_each_other_are_400() -> None:
    async with AsyncEngine.from_pretrained(bundled_model()) as engine, serving(engine) as site:  # type: ignore[arg-type]
        for fields, param in (
            ({"guided_choice": ["red"], "bad_words": ["red"]}, "guided_choice"),
            ({"regex": "(ab){50}", "no_repeat_ngram_size": 2, "max_tokens": 100}, "regex"),
            ({"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids"),
        ):
            status, error = await posted(site, COMPLETIONS, **VALID[COMPLETIONS] | fields)
            assert (status, error["param"]) == (400, param), error
            assert error["message"].startswith(f"{param}: ")


async def test_a_vector_that_takes_longer_than_its_timeout_is_504() -> None:
    async with AsyncEngine.from_pretrained(bundled_model(), max_num_seqs=1) as engine, serving(engine) as site:  # type: ignore[arg-type]
        running = asyncio.create_task(site.post(COMPLETIONS, prompt="x", max_tokens=450, ignore_eos=True))
        while not engine.stats().num_requests_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for path, fields in (
            ("/v1/embeddings", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
        ):
            reply = await site.post(path, timeout=0.01, **fields)
            assert (reply.status, reply.error["code"], reply.error["param"]) == (504, "timeout", "timeout")
            for wrong in (0, -1, 1e9):
                reply = await site.post(path, timeout=wrong, **fields)
                assert (reply.status, reply.error["param"]) == (400, "timeout")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await settle(engine)
        assert (await site.post("/v1/embeddings", input="a", timeout=60)).status == 200
