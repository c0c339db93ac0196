"""Requests made from /openapi.json by schemathesis, right and wrong ones, over real sockets.

They are made of the description as it is served, and of a narrower one whose requests are mostly served: with short
prompts and outputs.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from asyncengine.server.openapi import document
from tests.amounts import sample_of
from tests.server.fake_engine import FakeEngine
from tests.server.harness import CHAT, COMPLETIONS, serving
from tests.server.threaded import Threaded, threaded

Schema = dict[str, Any]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SERVED: Schema = json.loads(document(keys=False, root_path=""))


def _text(size: int = 50) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": size}


def _some(items: Schema, most: int = 3) -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": most, "items": items}


def _turns(*roles: str) -> Schema:
    part = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": _text()}}
    content = {"anyOf": [_text(), _some(part)]}
    turn = {"type": "object", "required": ["role", "content"]}
    return _some(turn | {"properties": {"role": {"enum": list(roles)}, "content": content}}, 4)


_IDS = _some({"type": "integer", "minimum": 3, "maximum": 999}, 50)
_PROMPTS = {"anyOf": [_text(), _IDS, _some(_text()), _some(_IDS)]}
_FEW = {"type": "integer", "minimum": 1, "maximum": 8}
#: Fields of bodies that are served wherever they stand. The others are left out of the narrower description.
_NARROW: Schema = {
    "model": {"const": "stories"},
    "n": {"type": "integer", "minimum": 1, "maximum": 4},
    "max_tokens": _FEW,
    "max_completion_tokens": _FEW,
    "max_output_tokens": _FEW,
    "logprobs": {"type": "boolean"},
    "stop": {"anyOf": [_text(100), _some(_text(), 4)]},
    "stop_token_ids": _IDS,
    "prompt": _PROMPTS,
    "messages": _turns("system", "developer", "user", "assistant"),
    "input": _PROMPTS,
    "query": _text(),
    "documents": _some(_text()),
    "text_1": _text(),
    "text_2": _some(_text()),
    "tokens": _IDS,
    "timeout": {"type": "number", "minimum": 100, "maximum": 1000},
    "dimensions": {"const": 1},
}
_AS_THEY_ARE = {
    "stream", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "skip_special_tokens", "cache_salt",
    "include_stop_str_in_output", "store", "instructions", "top_n", "return_documents", "return_token_strs",
    "encoding_format",
}  # fmt: skip
_OF_BODY: dict[str, Schema] = {
    "CompletionBody": {"logprobs": {"type": "integer", "minimum": 0, "maximum": 20}},
    "MessagesBody": {"messages": _turns("user", "assistant")},
    "ResponsesBody": {"input": _text()},
    "TokenizeBody": {"prompt": _text()},
}
_WITHOUT = {"MessagesBody": {"n", "logprobs"}, "ResponsesBody": {"n"}, "TokenizeBody": {"messages"}}


def narrowed() -> Schema:
    """The served description with requests that are mostly served."""
    description = copy.deepcopy(SERVED)
    for name, schema in description["components"]["schemas"].items():
        if name.endswith("Body") and "model" in schema["properties"]:
            fields = {
                field: _NARROW.get(field, known)
                for field, known in schema["properties"].items()
                if field in _NARROW.keys() | _AS_THEY_ARE and field not in _WITHOUT.get(name, ())
            }
            schema["properties"] = fields | _OF_BODY.get(name, {})
    schemas = description["components"]["schemas"]
    schemas["MessagesBody"]["required"] = ["messages", "max_tokens"]
    schemas["ResponsesBody"]["required"] = ["input"]
    schemas["ScoreBody"]["required"] = ["text_1", "text_2"]
    schemas["TokenizeBody"]["required"] = ["prompt"]
    return description


def loaded(description: Schema) -> schemathesis.BaseSchema:
    api = schemathesis.openapi.from_dict(description)
    api.config.generation.update(modes=[schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
    return api


def examples(count: int, phase: Phase) -> settings:
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[phase],  # explicit: a systematic set of right and wrong values of each field
        suppress_health_check=list(HealthCheck),
    )


#: With a parameter of its own a test has its operation in its node ID. Else all operations have one ID (pytest 9.2),
#: and xdist runs one of them.
by_operation = pytest.mark.parametrize("server", ["simulated"], indirect=True)

seen: Counter[tuple[str, int]] = Counter()
narrow, whole = loaded(narrowed()), loaded(SERVED)
TWINS = ["/v1/responses/input_tokens", "/v1/messages/count_tokens", "/v1/score", "/v1/rerank", "/v2/rerank"]
"""Routes whose bodies another route has too, and that are checked by the same code."""
LARGE = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
"""Routes whose bodies have so many fields that all examples take a quarter of a minute. In all runs they have those of
``test_every_answer_is_as_described``."""


@pytest.fixture(scope="module")
def server() -> Iterator[Threaded]:
    with threaded() as running:
        yield running
    print(seen)
    for route in (CHAT, COMPLETIONS, "/v1/messages", "/v1/responses", "/tokenize", "/detokenize"):
        statuses = {status for path, status in seen if path == route}
        assert not statuses or {200, 400} <= statuses, f"only {statuses} from {route}"


def check(case: schemathesis.Case, server: Threaded) -> int:
    response = case.call(base_url=server.url)
    # A timeout of the request's own, which may be as short as it likes, is the only fault of this kind.
    checks = [each for each in CHECKS if response.status_code != 504 or each is not not_a_server_error]
    case.validate_response(response, checks=checks)
    server.check()
    return response.status_code


@narrow.parametrize()
@by_operation
@examples(sample_of(15, 8), Phase.generate)
def test_every_answer_is_as_described(case: schemathesis.Case, server: Threaded) -> None:
    seen[case.operation.path, check(case, server)] += 1


@whole.exclude(path=[*TWINS, *LARGE]).parametrize()
@by_operation
@examples(1, Phase.explicit)
def test_any_request_that_the_description_allows_is_answered_as_described(
    case: schemathesis.Case, server: Threaded
) -> None:
    check(case, server)


@pytest.mark.exhaustive
@whole.include(path=LARGE).parametrize()
@by_operation
@examples(1, Phase.explicit)
def test_any_request_with_a_large_body_is_answered_as_described(case: schemathesis.Case, server: Threaded) -> None:
    check(case, server)


def test_twins_have_the_bodies_of_other_routes() -> None:
    bodies = {
        path: str(methods["post"]["requestBody"])
        for path, methods in SERVED["paths"].items()
        if "requestBody" in methods.get("post", {})
    }
    schemas = {path: re.findall(r"#/components/schemas/\w+", body)[0] for path, body in bodies.items()}
    others = {schema for path, schema in schemas.items() if path not in TWINS}
    assert {schemas[path] for path in TWINS} <= others


def test_the_description_is_served_and_has_every_route(server: Threaded) -> None:
    assert requests.get(server.url + "/openapi.json", timeout=30).json() == SERVED
    served = server.site.server.app._routes
    known = {path for path in served if path != "/" and not path.startswith("/page/")}
    routes = {re.sub(r"/(?=/|$)", "/{id}", path) for path in known}  # without those for the page alone
    assert SERVED["paths"].keys() == routes
    for path, methods in SERVED["paths"].items():
        allowed = served[path.replace("{id}", "")][0]
        assert methods.keys() - {"parameters"} == {method.lower() for method in allowed.split(", ")}


async def test_the_description_tells_of_keys_and_of_the_root_path() -> None:
    async with serving(FakeEngine(), api_key="key", root_path="/llm") as site:
        assert (await site.get("/openapi.json")).status == 401
        headers = {"Authorization": "Bearer key"}
        replies = await asyncio.gather(*(site.get("/llm/openapi.json", headers=headers) for _ in range(3)))
        assert len({reply.body for reply in replies}) == 1
        described = replies[0].json
        assert described["servers"] == [{"url": "/llm"}]
        assert described["paths"][CHAT]["post"]["security"] == [{"key": []}]
        assert "security" not in described["paths"]["/health"]["get"]
        assert "401" in described["paths"][CHAT]["post"]["responses"]


async def test_docs_load_nothing_but_the_description() -> None:
    async with serving(FakeEngine(), api_key="key") as site:
        for path in ("/docs", "/docs/"):
            reply = await site.get(path)
            assert reply.status == 200
            assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = reply.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        page = reply.body.decode()
        assert not re.findall(r"(?:https?:)?//[a-z]", page)
        assert not re.findall(r"\bon[a-z]+=|style=|innerHTML|\ssrc=", page)


def test_examples_of_bodies_work_as_they_stand(server: Threaded) -> None:
    for path, methods in SERVED["paths"].items():
        if "requestBody" in methods.get("post", {}):
            example = methods["post"]["requestBody"]["content"]["application/json"]["example"]
            reply = requests.post(server.url + path, json=example, timeout=30, headers={"Connection": "close"})
            other_models = "on this device" in reply.text or "no classification model" in reply.text
            assert reply.status_code == 200 or other_models, (path, reply.text)
