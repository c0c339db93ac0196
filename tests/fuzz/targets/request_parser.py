"""Bodies of completions and chat completions: a body and sampling parameters, or an error below 500."""

from __future__ import annotations

import json
from typing import Any

from asyncengine import _core
from asyncengine.api.request import SamplingParams
from asyncengine.errors import InvalidRequestError
from asyncengine.server import protocol, unserved
from asyncengine.server.bodies import MAX_DEPTH
from asyncengine.server.chat import Chat, ChatBody
from asyncengine.server.completions import CompletionBody, Completions
from asyncengine.server.config import ServerConfig
from asyncengine.server.errors import ApiError, from_engine
from tests.fuzz.source import Source

CONFIG = ServerConfig()
ENDPOINTS = (Completions(), Chat())
FIELDS = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, *unserved.GENERATION, "logprobs"})
SAMPLING = sorted(SamplingParams.__dataclass_fields__)


def one_input(data: bytes) -> None:
    source = Source(data)
    match source.byte() % 3:
        case 0:
            parse(source.pick(ENDPOINTS), source.rest())
        case 1:
            parse(source.pick(ENDPOINTS), body(source))
        case 2:
            keywords = {source.pick(SAMPLING): source.value() for _ in range(source.integer(0, 6))}
            try:
                SamplingParams(**keywords)
            except InvalidRequestError as e:
                check(from_engine(e))


def parse(endpoint: Completions | Chat, raw: bytes) -> None:
    """Parse a body as the server does before the engine sees it."""
    if _core.json_extent(raw)[1] > MAX_DEPTH:
        return
    try:
        parsed, prompts = endpoint.parse(raw, CONFIG)
        protocol.sampling_params(parsed)
        assert prompts
    except ApiError as e:
        check(e)
    except InvalidRequestError as e:
        check(from_engine(e))


def check(error: ApiError | None) -> None:
    assert error is not None
    assert 400 <= error.status < 500
    assert json.loads(error.body())["error"]["message"]


def body(source: Source) -> bytes:
    """An object of known fields; now and then one field twice, unknown, or with a message in it."""
    fields: list[tuple[str, Any]] = [("prompt", "a"), ("messages", [{"role": "user", "content": "a"}])]
    for _ in range(source.integer(0, 6)):
        key = source.pick(FIELDS) if source.byte() % 8 else source.text()
        value = message(source) if key == "messages" and source.flag() else source.value()
        fields.append((key, value))
    pairs = (f"{json.dumps(key)}:{json.dumps(value)}" for key, value in fields)
    return ("{" + ",".join(pairs) + "}").encode()


def message(source: Source) -> list[Any]:
    roles = ("system", "developer", "user", "assistant", "tool", "")
    part = {"type": source.pick(("text", "image_url", "")), "text": source.value()}
    content = [part] * source.integer(0, 3) if source.flag() else source.value()
    return [{"role": source.pick(roles), "content": content, source.text(): source.value()}]
