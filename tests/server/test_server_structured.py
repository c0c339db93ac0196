"""Structured output over HTTP: the real client, the real server, the bundled model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from asyncengine import AsyncEngine, bundled_model
from tests.server.harness import CHAT, COMPLETIONS, USER, Site, serving

MODEL = "bundled"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kinds": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "kinds"],
    "additionalProperties": False,
}


class Animal(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    legs: int = pydantic.Field(ge=0, le=8)


@asynccontextmanager
async def client() -> AsyncIterator[tuple[openai.AsyncOpenAI, Site]]:
    async with (
        AsyncEngine.from_pretrained(bundled_model(), progress=False) as engine,
        serving(engine, served_model_name=MODEL) as site,  # type: ignore[arg-type]
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api, site


async def test_response_formats() -> None:
    async with client() as (api, _):
        asked: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 200, "temperature": 1.0, "n": 3}
        form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}
        answer = await api.chat.completions.create(response_format=form, seed=1, **asked)
        stream = await api.chat.completions.create(response_format=form, seed=1, stream=True, **asked)
        texts = [""] * 3
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        plain = await api.chat.completions.create(response_format={"type": "text"}, seed=1, **asked)
        parsed = await api.chat.completions.parse(response_format=Animal, **asked | {"n": 1})
    assert [choice.message.content for choice in answer.choices] == texts
    for text, choice in zip(texts, answer.choices, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
    assert plain.choices[0].message.content not in texts
    assert isinstance(parsed.choices[0].message.parsed, Animal)


async def test_extensions() -> None:
    async with client() as (api, _):

        async def text(**extra: Any) -> str:
            answer = await api.completions.create(
                model=MODEL, prompt="It was", max_tokens=60, temperature=1.0, seed=7, extra_body=extra
            )
            return answer.choices[0].text

        assert re.fullmatch(r"[a-f]{3}-\d{2}", await text(guided_regex=r"[a-f]{3}-[0-9]{2}"))
        assert await text(guided_choice=["red", "green"]) in ("red", "green")
        assert re.fullmatch("x*y", await text(guided_grammar='root ::= "y" | "x" root'))
        jsonschema.validate(json.loads(await text(guided_json=SCHEMA)), SCHEMA)
        jsonschema.validate(json.loads(await text(guided_json=json.dumps(SCHEMA))), SCHEMA)
        assert re.fullmatch("a{3,5}", await text(structured_outputs={"regex": "a{3,5}"}))
        assert (await text(response_format={"type": "json_object"})).startswith("{")
        properties = {"properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
        for dialect in ("schema", "value"):  # llama.cpp's, and Hugging Face's
            answer = await text(response_format={"type": "json_object", dialect: {"type": "object"} | properties})
            assert json.loads(answer).keys() == {"ok"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex and guided_choice"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
        ({"guided_grammar": "root ::= missing\n"}, "guided_grammar", "missing"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "regex and grammar"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "structured_outputs", "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", "ignore_eos"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://a.example/x"}}}},
            "response_format",
            "http://a.example/x",
        ),
        ({"guided_json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "guided_json", "nsatisfiable"),
        ({"guided_json": "{"}, "guided_json", "no schema"),
    ],
)
async def test_wrong_grammars_are_refused_and_cost_nobody_else_anything(
    fields: dict[str, Any], param: str, says: str
) -> None:
    async with client() as (_, site):
        other = asyncio.create_task(site.post(COMPLETIONS, prompt="x", max_tokens=40, ignore_eos=True))
        for route, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
            reply = await site.post(route, **prompt, **fields)
            assert (reply.status, reply.error["param"]) == (400, param)
            assert says in reply.error["message"]
        assert (await other).json["usage"]["completion_tokens"] == 40
