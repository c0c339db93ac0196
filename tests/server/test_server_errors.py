"""Bad input, wrong routes, refused requests: always OpenAI's error shape, never a 500."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, USER, serving

JSON = {"Content-Type": "application/json"}

BODIES = [
    b"",
    b"{",
    b'{"prompt": "x"} trailing',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "n": ' + b"9" * 6000 + b"}",
    b"[]",
    b"null",
    b"17",
    b'"prompt"',
]

INVALID: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [""]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": ["x", ""]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["x", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "x"}}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**40]}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 1025}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 9, "n": 114}, "n"),
    (COMPLETIONS, {"prompt": "x" * 5000}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "max_completion_tokens": 5000}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    (CHAT, {"messages": USER, "max_tokens": 2, "max_completion_tokens": 5000}, "max_completion_tokens"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [*USER, {"role": "", "content": "x"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]},
        "messages[0].tool_calls",
    ),
    (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
]
COMMON: list[tuple[str, Any, str]] = [
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", 1.5, "n"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", "16", "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_completion_tokens", -1, "max_completion_tokens"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "hot", "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("top_k", -2, "top_k"),
    ("min_p", 1.5, "min_p"),
    ("seed", 2**63, "seed"),
    ("stop", "", "stop"),
    ("stop", ["x", ""], "stop"),
    ("stop", 5, "stop"),
    ("stop", ["x"] * 17, "stop"),
    ("stop", "x" * 1025, "stop"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", ["x"], "stop_token_ids[0]"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream_options", [], "stream_options"),
    ("ignore_eos", 1, "ignore_eos"),
    ("model", 5, "model"),
    ("priority", 1, "priority"),
    ("priority", -1, "priority"),
    ("priority", 10**18, "priority"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -3, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", {"five": 1}, "logit_bias"),
    ("min_tokens", -1, "min_tokens"),
    ("bad_words", [""], "bad_words"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("no_repeat_ngram_size", -1, "no_repeat_ngram_size"),
    # known, but not implemented
    ("typical_p", 0.5, "typical_p"),
    ("mirostat", 2, "mirostat"),
    ("dry_multiplier", 0.8, "dry_multiplier"),
    ("response_format", {"type": "json"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema.schema"),
    ("structured_outputs", {"jsn": {}}, "structured_outputs"),
    ("guided_choice", [], "guided_choice"),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("guided_regex", "", "guided_regex"),
]
CALL = {"name": "f", "arguments": "{}"}
TOOL = {"type": "function", "function": {"name": "f"}}
ONLY: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "suffix": 5}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y", "echo": True, "logprobs": 0}, "echo"),
    (COMPLETIONS, {"prompt": "x", "best_of": 0}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 129}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"prompt": ["x"] * 9, "best_of": 128}, "best_of"),
    (CHAT, {"messages": USER, "best_of": 2}, "best_of"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": USER, "echo": "yes"}, "echo"),
    (CHAT, {"messages": USER, "verbosity": "loud"}, "verbosity"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": USER, "functions": [{}]}, "functions[0].name"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}] * 2}, "functions[1].name"),
    (CHAT, {"messages": USER, "functions": [{"name": "f", "parameters": {"type": 5}}]}, "functions[0].parameters"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}] * 1025}, "functions"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}], "function_call": {}}, "function_call"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    (CHAT, {"messages": USER, "function_call": {"name": "f"}}, "function_call"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
    (
        CHAT,
        {"messages": USER, "functions": [{"name": "f"}], "function_call": {"name": "f"}, "guided_regex": "a"},
        "function_call",
    ),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "function_call": CALL}]}, "messages[0].function_call"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "function_call": CALL, "tool_calls": [{"function": CALL}]}]},
        "messages[0].function_call",
    ),
]
PROMPT: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": USER}}
INVALID += [(route, PROMPT[route] | {k: v}, param) for route in PROMPT for k, v, param in COMMON]
INVALID += ONLY


async def test_bodies_that_are_not_json_objects() -> None:
    async with serving(FakeEngine()) as site:
        for route in (COMPLETIONS, CHAT):
            for body in BODIES:
                reply = await site.request("POST", route, data=body, headers=JSON)
                assert reply.status == 400, (body[:60], reply.body)
                assert reply.error["type"] == "invalid_request_error"
        assert (await site.post(COMPLETIONS, prompt="x")).status == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_invalid_fields_name_the_parameter(streamed: bool) -> None:
    engine = FakeEngine()
    async with serving(engine) as site:
        for route, fields, param in INVALID:
            if streamed and "stream_options" in fields and isinstance(fields["stream_options"], dict):
                continue  # right with a stream
            reply = await site.post(route, **({"stream": True} if streamed else {}) | fields)
            assert reply.status == 400, (fields, reply.body)
            assert reply.error["param"] == param, (fields, reply.body)
            assert reply.error["type"] == "invalid_request_error"
            assert param.partition("[")[0] in reply.error["message"]
    assert engine.submitted == []


async def test_context_overflow_states_both_numbers() -> None:
    async with serving(FakeEngine(max_model_len=64)) as site:
        for fields in ({"prompt": "x" * 50, "max_tokens": 20}, {"prompt": "x" * 70}):
            for stream in (False, True):
                reply = await site.post(COMPLETIONS, stream=stream, **fields)
                assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
                assert str(len(fields["prompt"])) in reply.error["message"]
                assert "64" in reply.error["message"]


async def test_one_bad_prompt_of_several_aborts_the_others() -> None:
    engine = FakeEngine(max_model_len=64)
    async with serving(engine) as site:
        for stream in (False, True):
            reply = await site.post(COMPLETIONS, prompt=["x", "x" * 70, "y"], stream=stream)
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
            assert not engine.open


async def test_routes_methods_models() -> None:
    async with serving(FakeEngine(), strict_model_names=True) as site:
        for method, path in [
            ("GET", "/page/"),
            ("GET", "/v1"),
            ("POST", "/v1/completions/x"),
            ("GET", "/v2/models"),
        ]:
            reply = await site.request(method, path)
            assert (reply.status, reply.error["code"]) == (404, "not_found")
        for method, path, allowed in [
            ("GET", COMPLETIONS, "POST"),
            ("DELETE", CHAT, "POST"),
            ("POST", "/v1/models", "GET, HEAD"),
            ("PUT", "/health", "GET, HEAD"),
        ]:
            reply = await site.request(method, path)
            assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
            assert reply.headers["Allow"] == allowed
        for route, prompt in PROMPT.items():
            reply = await site.post(route, model="gpt-5", **prompt)
            assert (reply.status, reply.error["param"]) == (404, "model")


async def test_compressed_bodies_are_refused_and_not_inflated() -> None:
    compressed = gzip.compress(json.dumps({"prompt": "x"}).encode())
    async with serving(FakeEngine(), api_key="key") as site:
        for headers, status, code in (
            ({}, 401, "invalid_api_key"),
            ({"Authorization": "Bearer key"}, 415, "unsupported_media_type"),
        ):
            headers = headers | {"Content-Encoding": "gzip"}
            # Not even gzip at all: nobody looked.
            for body in (compressed, b"nothing of the kind"):
                reply = await site.request("POST", COMPLETIONS, data=body, headers=headers)
                assert (reply.status, reply.error["code"]) == (status, code)
        plain = {"Authorization": "Bearer key", "Content-Encoding": "identity"}
        reply = await site.request("POST", COMPLETIONS, data=b'{"prompt": "x"}', headers=plain)
        assert reply.status == 200


async def test_body_too_large() -> None:
    async with serving(FakeEngine(max_model_len=10_000), max_request_bytes=1000) as site:
        small = json.dumps({"prompt": "x" * 500}).encode()
        large = json.dumps({"prompt": "x" * 1000}).encode()

        async def chunked(data: bytes) -> Any:
            yield data

        for wrap in (lambda data: data, chunked):  # with Content-Length, and without
            assert (await site.request("POST", COMPLETIONS, data=wrap(small))).status == 200
            reply = await site.request("POST", COMPLETIONS, data=wrap(large))
            assert (reply.status, reply.error["code"]) == (413, "request_too_large")


async def test_overload_asks_to_come_back() -> None:
    engine = FakeEngine()
    async with serving(engine) as site:
        engine.overloaded = True
        for stream in (False, True):
            reply = await site.post(COMPLETIONS, prompt="x", stream=stream)
            assert (reply.status, reply.error["code"]) == (503, "overloaded")
            assert int(reply.headers["Retry-After"]) > 0
        engine.overloaded = False
        assert (await site.post(COMPLETIONS, prompt="x")).status == 200


async def test_dead_engine() -> None:
    engine = FakeEngine()
    async with serving(engine) as site:
        engine.die()
        for stream in (False, True):
            reply = await site.post(COMPLETIONS, prompt="x", stream=stream)
            assert (reply.status, reply.error["type"]) == (500, "server_error")


async def test_unforeseen_exception_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.hold(at=0)
    async with serving(engine) as site:
        for stream in (False, True):
            reply = asyncio.create_task(site.post(COMPLETIONS, prompt="x", stream=stream))
            await engine.wait_for(open=1)
            engine.fail(RuntimeError("secret detail"))
            assert (await reply).status == 500
            request_id = (await reply).headers["X-Request-Id"]
            assert (await reply).error["message"] == f"internal server error (request id {request_id})"
            assert request_id in caplog.text
            await engine.wait_for(open=0)
    assert "secret detail" in caplog.text


async def test_api_key() -> None:
    async with serving(FakeEngine(), api_key="s3cret-ü") as site:
        right = {"Authorization": "Bearer s3cret-ü"}
        for path in ("/v1/models", "/metrics", "/no/such/path", COMPLETIONS):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "s3cret-ü"},
                {"Authorization": "Basic s3cret-ü"},
                {"Authorization": "Bearer \x81\xff"},
            ):
                reply = await site.get(path, headers=headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert (await site.get("/v1/models", headers=right)).status == 200
        assert (await site.request("POST", COMPLETIONS, json={"prompt": "x"}, headers=right)).status == 200
        assert (await site.get("/health")).status == 200


async def test_request_id_comes_back() -> None:
    async with serving(FakeEngine()) as site:
        for path, fields in [
            ("/health", None),
            ("/nowhere", None),
            (COMPLETIONS, {"prompt": "x", "stream": True}),
        ]:
            method = "POST" if fields else "GET"
            reply = await site.request(method, path, json=fields, headers={"X-Request-Id": "abc-123"})
            assert reply.headers["X-Request-Id"] == "abc-123"
        for strange in ("x" * 300, "ümlaut"):
            reply = await site.get("/health", headers={"X-Request-Id": strange})
            assert reply.status == 200
            made = reply.headers["X-Request-Id"]
            assert made.isalnum()
            assert made not in strange
