"""/openapi.json: the OpenAPI 3.1 description of the served routes, made of the structs that read and write bodies.

Rules beyond a struct's types are in two tables: the ranges that SamplingParams checks, and the fields that a request
must have. A test compares the paths with the routes, and has answers to made-up requests compared with the description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncengine.api.outputs import FinishReason
from asyncengine.api.request import (
    LOGPROBS_MODES,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_NAMED_TOKENS,
    MAX_NGRAM,
    MAX_SEED,
    MAX_STOP_TOKENS,
)
from asyncengine.server.chat import ChatBody, ChatCompletion
from asyncengine.server.completions import Completion, CompletionBody
from asyncengine.server.messages_api import Message
from asyncengine.server.messages_input import MessagesBody
from asyncengine.server.model_cards import ModelCard, ModelList
from asyncengine.server.response_routes import ItemList
from asyncengine.server.responses import Response
from asyncengine.server.responses_input import ResponsesBody
from asyncengine.server.texts import DetokenizeBody, Text, TokenizeBody, Tokens
from asyncengine.server.vectors import (
    ClassifyBody,
    ClassList,
    EmbeddingBody,
    EmbeddingList,
    RankedText,
    Ranking,
    RerankBody,
    ScoreBody,
    ScoreList,
)
from asyncengine.version import VERSION

Schema = dict[str, Any]

_STRING = {"type": "string"}
_NULLABLE = {"type": ["string", "null"]}


def _closed(**properties: Schema) -> Schema:
    """An object that has all of its fields, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path."""

    summary: str
    answer: type[msgspec.Struct] | Schema
    """Type of the JSON document that is answered; other answers have a schema with contentMediaType."""
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    errors: str = "Error"
    members: type[msgspec.Struct] | None = None
    """Type of the members of the list that the answer may be instead."""
    example: Schema | None = None
    """A body that works as it stands; there is one where there is a body."""


_QUESTION = "Tell me a story about a fox."
_ASKED: Schema = {"messages": [{"role": "user", "content": _QUESTION}]}
_STREAMED: Schema = {"max_tokens": 64, "stream": True}
_TEXTS = ["A bear eats honey.", "A fox runs."]
_SCORE = Operation(
    "Scores of pairs of texts", ScoreList, ScoreBody, example={"text_1": "Which animal runs?", "text_2": _TEXTS}
)
_RERANK = Operation(
    "Documents by how well they fit a query",
    Ranking,
    RerankBody,
    members=RankedText,
    example={"query": "Which animal runs?", "documents": _TEXTS},
)
_HEALTH = Operation("200 when requests are served", _closed(status={"const": "ready"}))
_COUNT = {"type": "integer", "minimum": 0}
_EVENT = {"type": "object", "properties": {"event": _STRING, "data": _STRING}, "required": ["data"]}
"""Schema of each event of a stream: a chunk as JSON, or [DONE]."""
_PLAIN = {"type": "string", "contentMediaType": "text/plain"}
_HTML = {"type": "string", "contentMediaType": "text/html"}

_PUBLIC = ("/health", "/ready", "/live", "/docs")
"""Routes that need no key."""

#: Operations by path and method. A part of a path in braces is a parameter.
OPERATIONS: dict[str, dict[str, Operation]] = {
    "/health": {"get": _HEALTH},
    "/ping": {"get": _HEALTH},
    "/ready": {"get": _HEALTH},
    "/live": {"get": Operation("200 while the process should be left alone", _closed(status=_STRING))},
    "/version": {"get": Operation("The version of the server", _closed(version=_STRING))},
    "/metrics": {"get": Operation("Figures for Prometheus", _PLAIN)},
    "/load": {
        "get": Operation(
            "Requests and tokens that run and wait",
            _closed(
                server_load=_COUNT,
                num_requests_running=_COUNT,
                num_requests_waiting=_COUNT,
                queued_tokens=_COUNT,
                kv_cache_usage={"type": "number", "minimum": 0, "maximum": 1},
            ),
        )
    },
    "/openapi.json": {"get": Operation("This description", {"type": "object"})},
    "/docs": {"get": Operation("This description, to read", _HTML)},
    "/v1/models": {"get": Operation("The names of the served model", ModelList)},
    "/v1/models/{id}": {"get": Operation("One name of the served model", ModelCard)},
    "/v1/completions": {
        "post": Operation(
            "Go on with a prompt",
            Completion,
            CompletionBody,
            streams=True,
            example={"prompt": "Once upon a time", **_STREAMED},
        )
    },
    "/v1/chat/completions": {
        "post": Operation("Answer a conversation", ChatCompletion, ChatBody, streams=True, example=_ASKED | _STREAMED)
    },
    "/v1/responses": {
        "post": Operation(
            "Answer, in OpenAI's newer form",
            Response,
            ResponsesBody,
            streams=True,
            example={"input": _QUESTION, "max_output_tokens": 64, "stream": True},
        )
    },
    "/v1/responses/input_tokens": {
        "post": Operation(
            "Tokens of the input of a response",
            _closed(object={"const": "response.input_tokens"}, input_tokens={"type": "integer"}),
            ResponsesBody,
            example={"input": _QUESTION},
        )
    },
    "/v1/responses/{id}/input_items": {"get": Operation("The items that a stored response was made from", ItemList)},
    "/v1/responses/{id}/cancel": {"post": Operation("Refused: no response is made in the background", Response)},
    "/v1/responses/{id}": {
        "get": Operation("A stored response", Response),
        "delete": Operation(
            "Forget a stored response",
            _closed(id=_STRING, object={"const": "response"}, deleted={"const": True}),
        ),
    },
    "/v1/messages": {
        "post": Operation(
            "Answer, in Anthropic's form",
            Message,
            MessagesBody,
            streams=True,
            errors="MessagesError",
            example=_ASKED | _STREAMED,
        )
    },
    "/v1/messages/count_tokens": {
        "post": Operation(
            "Tokens of a conversation",
            _closed(input_tokens={"type": "integer"}),
            MessagesBody,
            errors="MessagesError",
            example=_ASKED,
        )
    },
    "/v1/embeddings": {"post": Operation("Vectors of texts", EmbeddingList, EmbeddingBody, example={"input": _TEXTS})},
    "/score": {"post": _SCORE},
    "/v1/score": {"post": _SCORE},
    "/rerank": {"post": _RERANK},
    "/v1/rerank": {"post": _RERANK},
    "/v2/rerank": {"post": _RERANK},
    "/classify": {"post": Operation("Labels of texts", ClassList, ClassifyBody, example={"input": _TEXTS})},
    "/tokenize": {
        "post": Operation("Token ids of a text or a conversation", Tokens, TokenizeBody, example={"prompt": _QUESTION})
    },
    "/detokenize": {"post": Operation("Text of token ids", Text, DetokenizeBody, example={"tokens": [40, 41, 42]})},
}

_REQUIRED: dict[type[msgspec.Struct], Sequence[str]] = {
    CompletionBody: ("prompt",),
    ChatBody: ("messages",),
    MessagesBody: ("messages",),
    EmbeddingBody: ("input",),
    RerankBody: ("query",),
    ClassifyBody: ("input",),
    DetokenizeBody: ("tokens",),
}
_LIMITS: dict[str, Schema] = {
    "n": {"minimum": 1, "maximum": MAX_N},
    "best_of": {"minimum": 1, "maximum": MAX_N},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 0},
    "max_output_tokens": {"minimum": 1},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -(2**63), "maximum": MAX_SEED},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKENS},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 2},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
    "min_tokens": {"minimum": 0},
    "no_repeat_ngram_size": {"minimum": 0, "maximum": MAX_NGRAM},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "logprob_token_ids": {"maxItems": MAX_NAMED_TOKENS},
    "logprobs_mode": {"enum": list(LOGPROBS_MODES)},
    "timeout": {"exclusiveMinimum": 0, "maximum": 1e6},
    "priority": {"minimum": -1000, "maximum": 1000},
    "dimensions": {"minimum": 1},
    "pooling": {"enum": ["last", "cls", "mean"]},
    "top_n": {"minimum": 1},
}
#: The types that each keyword of _LIMITS is about.
_KEYWORD_TYPES = {"enum": {"string"}, "maxItems": {"array"}}
_NUMBERS = {"integer", "number"}

_ERRORS = {
    "400": "The request is malformed, or has a field with a wrong value, which param names.",
    "401": "An API key is needed.",
    "404": "There is no such thing, or the model has another name.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large, too deep or has too many values.",
    "415": "The body is compressed.",
    "500": "The server failed.",
    "503": "The server is loading, draining or overloaded.",
    "504": "The request's own timeout passed before its first token, or before an answer without tokens.",
}
_ERROR = _closed(
    error=_closed(
        message={"type": "string", "minLength": 1},
        type={"enum": ["invalid_request_error", "server_error", "service_unavailable"]},
        param=_NULLABLE,
        code=_NULLABLE,
    )
)
_REASON = _closed(type=_STRING, message={"type": "string", "minLength": 1})
_REASON["properties"]["details"] = {"type": "object"}  # of some errors: what Anthropic's client acts on
_MESSAGES_ERROR = _closed(type={"const": "error"}, error=_REASON, request_id=_STRING)


def document(*, keys: bool, root_path: str) -> bytes:
    """The description as JSON. ``keys``: whether requests need one."""
    made = {o for methods in OPERATIONS.values() for o in _structs(methods)}
    bodies = {o.body for methods in OPERATIONS.values() for o in methods.values() if o.body is not None}
    kinds = sorted(made | bodies, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    names = {kind: reference["$ref"].rpartition("/")[2] for kind, reference in zip(kinds, references, strict=True)}
    asked = _reachable(schemas, [names[body] for body in bodies])
    for name, schema in schemas.items():
        (_as_request if name in asked else _as_answer)(schema)
    for body, required in _REQUIRED.items():
        _require(schemas[names[body]], required)
    schemas |= {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "asyncengine", "version": VERSION},
            "servers": [{"url": root_path or "/"}],
            "paths": {path: _path(path, methods, names, keys) for path, methods in OPERATIONS.items()},
            "components": {
                "schemas": schemas,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}} if keys else {},
            },
        }
    )


def _structs(methods: Mapping[str, Operation]) -> list[type[msgspec.Struct]]:
    answers = [o.answer for o in methods.values() if not isinstance(o.answer, dict)]
    return answers + [o.members for o in methods.values() if o.members is not None]


def _path(path: str, methods: Mapping[str, Operation], names: Mapping[type[msgspec.Struct], str], keys: bool) -> Schema:
    described: Schema = {}
    if "{" in path:
        described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": _STRING}]
    for method, operation in methods.items():
        public = path in _PUBLIC
        statuses = {"400", "500"} | (set() if public or not keys else {"401"})
        statuses |= {"404"} if "{" in path else set()
        statuses |= set() if path in ("/metrics", "/version", "/openapi.json", "/docs") else {"503"}
        entry: Schema = {
            "operationId": f"{method}{path.replace('/', '_')}".replace("{id}", "id"),
            "summary": operation.summary,
        }
        if keys and not public:
            entry["security"] = [{"key": []}]
        if operation.body is not None:
            statuses |= {"404", "408", "413", "415", "504"}
            content = _json(_reference(names[operation.body]))
            content["application/json"]["example"] = operation.example
            entry["requestBody"] = {"required": True, "content": content}
        answer = operation.answer
        schema = answer if isinstance(answer, dict) else _reference(names[answer])
        if operation.members is not None:
            schema = {"anyOf": [schema, {"type": "array", "items": _reference(names[operation.members])}]}
        content = {schema["contentMediaType"]: {"schema": schema}} if "contentMediaType" in schema else _json(schema)
        if operation.streams:  # with stream: true
            content |= {"text/event-stream": {"schema": _EVENT}}
        error = _json(_reference(operation.errors))
        described[method] = entry
        entry["responses"] = {"200": {"description": operation.summary, "content": content}} | {
            status: {"description": _ERRORS[status], "content": error} for status in sorted(statuses)
        }
    return described


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _reachable(schemas: Mapping[str, Schema], names: Sequence[str]) -> set[str]:
    """Names of schemas that those of ``names`` refer to, and these."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _references(schemas[name])
    return found


def _references(schema: object) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
        return own + [name for value in schema.values() for name in _references(value)]
    return [name for value in schema for name in _references(value)] if isinstance(schema, list) else []


def _branches(schema: Schema) -> list[Schema]:
    branches: list[Schema] = schema.get("anyOf", [schema])
    return branches


def _as_request(schema: Schema) -> None:
    """A default of null says no more than that the field may be left out."""
    for name, field in schema.get("properties", {}).items():
        if field.get("default", 0) is None:
            del field["default"]
        for branch in _branches(field):
            for keyword, value in _LIMITS.get(name, {}).items():
                if branch.get("type") in _KEYWORD_TYPES.get(keyword, _NUMBERS):
                    branch[keyword] = value


def _as_answer(schema: Schema) -> None:
    """Fields with a default are there all the same; only those that are unset are not."""
    fields = schema.get("properties", {})
    schema["required"] = [name for name in fields if name in schema.get("required", ()) or "default" in fields[name]]
    schema["additionalProperties"] = False
    for name, field in fields.items():
        default = field.pop("default", None)
        if name in ("object", "type", "role") and isinstance(default, str):
            fields[name] = {"const": default}
        elif name == "finish_reason":
            fields[name] = {"enum": [*FinishReason, "tool_calls", "function_call"]}


def _require(schema: Schema, names: Sequence[str]) -> None:
    schema["required"] = [*schema.get("required", ()), *names]
    for name in names:
        field = schema["properties"][name]
        branches = [branch for branch in _branches(field) if branch.get("type") != "null"]
        field.pop("anyOf", None)
        field |= branches[0] if len(branches) == 1 else {"anyOf": branches}
