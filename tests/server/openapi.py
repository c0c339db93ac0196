"""An OpenAPI 3.1 description of the served operations, for tests that make requests from it."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: list[str], /, **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _closed(**properties: Schema) -> Schema:
    """An object of responses: all of its fields are there, and no others."""
    return _object(list(properties), **properties) | {"additionalProperties": False}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


STRING, BOOLEAN = {"type": "string"}, {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0}
ERROR = _closed(
    error=_closed(
        message=STRING | {"minLength": 1},
        type={"enum": ["invalid_request_error", "server_error", "service_unavailable"]},
        param=_or_null(STRING),
        code=_or_null(STRING),
    )
)
MESSAGES_ERROR = _closed(
    type={"const": "error"},
    error=_closed(type=STRING, message=STRING | {"minLength": 1}),
    request_id=STRING,
)
USAGE = _closed(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=_closed(cached_tokens=COUNT),
)
CARD = _closed(id=STRING, object={"const": "model"}, created=COUNT, owned_by=STRING, max_model_len=COUNT)

#: Both generation routes. Generations are short, so that many fit into a test.
_COMMON: Schema = {
    name: _or_null(schema)
    for name, schema in {
        "model": {"const": "stories"},
        "stream": BOOLEAN,
        "n": {"type": "integer", "minimum": 1, "maximum": 4},
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
        "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1, "maximum": 2000},
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        "stop": {"anyOf": [STRING | {"minLength": 1, "maxLength": 100},
                           {"type": "array", "maxItems": 4, "items": STRING | {"minLength": 1}}]},
        "stop_token_ids": {"type": "array", "maxItems": 10, "items": {"type": "integer", "minimum": 0, "maximum": 999}},
        "ignore_eos": BOOLEAN,
        "skip_special_tokens": BOOLEAN,
        "include_stop_str_in_output": BOOLEAN,
        "cache_salt": STRING,
        "user": STRING,
    }.items()
}  # fmt: skip
_TOP = _or_null({"type": "integer", "minimum": 0, "maximum": 20})
_TOKEN_ID = {"type": "integer", "minimum": 3, "maximum": 999}
_TOKEN_IDS = {"type": "array", "minItems": 1, "maxItems": 50, "items": _TOKEN_ID}
_TEXT = STRING | {"minLength": 1, "maxLength": 50}
_PROMPT = {"anyOf": [_TEXT, _TOKEN_IDS] + [{"type": "array", "minItems": 1, "maxItems": 3, "items": each}
                                          for each in (_TEXT, _TOKEN_IDS)]}  # fmt: skip
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "maxItems": 3,
                              "items": _object(["type", "text"], type={"const": "text"}, text=_TEXT)}]}  # fmt: skip
_MESSAGE = _object(["role", "content"], role={"enum": ["system", "developer", "user", "assistant"]}, content=_CONTENT)

_ERRORS = {
    status: {"description": text, "content": _json(_ref("Error"))}
    for status, text in {
        "400": "The request is malformed, or has a field with a wrong value.",
        "404": "There is no such route or model.",
        "405": "The route has other methods.",
        "408": "The body did not arrive in time.",
        "413": "The body is too large, too deep or has too many values.",
        "415": "The body is compressed.",
        "503": "The server is loading, draining or overloaded.",
    }.items()
}


def _get(operation: str, content: Schema, *statuses: str, **more: Any) -> Schema:
    responses = {"200": {"description": "OK", "content": content}} | {s: _ERRORS[s] for s in ("400", *statuses)}
    return {"get": {"operationId": operation, "responses": responses, **more}}


def _post(operation: str, body: str, response: str, error: str = "Error") -> Schema:
    errors = {status: each | {"content": _json(_ref(error))} for status, each in _ERRORS.items()}
    ok = {"description": "A document, or events.", "content": _json(_ref(response)) | {"text/event-stream": {}}}
    return {
        "post": {
            "operationId": operation,
            "requestBody": {"required": True, "content": _json(_ref(body))},
            "responses": {"200": ok} | errors,
        }
    }


def _common_without(*names: str) -> Schema:
    return {name: schema for name, schema in _COMMON.items() if name not in names}


def _many(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


_LOGPROB = {"type": "number", "maximum": 0}
_COMPLETION_LOGPROBS = _closed(
    tokens=_many(STRING),
    token_logprobs=_many(_LOGPROB),
    top_logprobs=_many({"type": "object", "additionalProperties": _LOGPROB}),
    text_offset=_many(COUNT),
)
_BYTES = _or_null(_many({"type": "integer", "minimum": 0, "maximum": 255}))
_ENTRY = {"token": STRING, "logprob": _LOGPROB, "bytes": _BYTES}
_CHAT_LOGPROBS = _closed(
    content=_many(_closed(**_ENTRY, top_logprobs=_many(_closed(**_ENTRY)))), refusal={"type": "null"}
)


def _document(kind: str, logprobs: Schema, **choice: Schema) -> Schema:
    reason = {"enum": ["stop", "length"]}
    choices = _closed(index=COUNT, **choice, logprobs=_or_null(logprobs), finish_reason=reason)
    return _closed(
        id=STRING, object={"const": kind}, created=COUNT, model={"const": "stories"},
        choices={"type": "array", "minItems": 1, "items": choices}, usage=_ref("Usage"),
    )  # fmt: skip


_RESPONSE_ITEM = _closed(
    id=STRING,
    status={"enum": ["completed", "incomplete"]},
    type={"const": "message"},
    role={"const": "assistant"},
    content=_many(_closed(type={"const": "output_text"}, text=STRING, annotations=_many({}), logprobs=_many({}))),
)
_RESPONSE = _object(
    ["id", "object", "status", "output", "usage", "metadata"],
    id=STRING,
    object={"const": "response"},
    status={"enum": ["completed", "incomplete"]},
    output=_many(_RESPONSE_ITEM),
    usage=_closed(
        input_tokens=COUNT,
        input_tokens_details=_closed(cached_tokens=COUNT, cache_write_tokens=COUNT),
        output_tokens=COUNT,
        output_tokens_details=_closed(reasoning_tokens=COUNT),
        total_tokens=COUNT,
    ),
    metadata={"type": "object", "additionalProperties": STRING},
)
_INPUT_TEXT = _object(["type", "text"], type={"const": "input_text"}, text=_TEXT)
_INPUT_ITEM = _object(
    ["role", "content"], role={"enum": ["system", "developer", "user", "assistant"]},
    content={"anyOf": [_TEXT, {"type": "array", "minItems": 1, "maxItems": 3, "items": _INPUT_TEXT}]},
)  # fmt: skip
_TURN = _object(["role", "content"], role={"enum": ["user", "assistant", "system"]}, content=_CONTENT)
_REPLY = _closed(
    id=STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    model={"const": "stories"},
    content=_many(_closed(type={"const": "text"}, text=STRING)),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence"]},
    stop_sequence=_or_null(STRING),
    usage=_closed(
        input_tokens=COUNT, output_tokens=COUNT, cache_read_input_tokens=COUNT, cache_creation_input_tokens=COUNT
    ),
)
_ID = [{"name": "id", "in": "path", "required": True, "schema": STRING}]

DESCRIPTION: Schema = {
    "openapi": "3.1.0",
    "info": {"title": "asyncengine", "version": "1"},
    "paths": {
        "/health": _get("health", _json(_closed(status={"const": "ready"})), "503"),
        "/metrics": _get("metrics", {"text/plain": {"schema": STRING}}),
        "/v1/models": _get(
            "models", _json(_closed(object={"const": "list"}, data={"type": "array", "items": _ref("Card")})), "503"
        ),
        "/v1/models/{id}": _get(
            "model", _json(_ref("Card")), "404", "503", parameters=_ID,
        ),
        "/v1/completions": _post("completion", "CompletionBody", "Completion"),
        "/v1/chat/completions": _post("chat", "ChatBody", "ChatCompletion"),
        "/v1/responses": _post("respond", "ResponseBody", "Response"),
        "/v1/responses/{id}": _get("response", _json(_ref("Response")), "404", "503", parameters=_ID),
        "/v1/messages": _post("message", "MessageBody", "Message", "MessagesError"),
        "/v1/messages/count_tokens": _post("count", "CountBody", "Count", "MessagesError"),
    },
    "components": {
        "schemas": {
            "Error": ERROR,
            "Usage": USAGE,
            "Card": CARD,
            "CompletionBody": _object(["prompt"], prompt=_PROMPT, logprobs=_TOP, **_COMMON),
            "ChatBody": _object(
                ["messages"], messages={"type": "array", "minItems": 1, "maxItems": 4, "items": _MESSAGE},
                logprobs=_or_null(BOOLEAN), **_COMMON
            ),
            "MessagesError": MESSAGES_ERROR,
            "ResponseBody": _object(
                ["input"],
                input={"anyOf": [_TEXT, {"type": "array", "minItems": 1, "maxItems": 3, "items": _INPUT_ITEM}]},
                instructions=_or_null(STRING), max_output_tokens={"type": "integer", "minimum": 1, "maximum": 8},
                store=_or_null(BOOLEAN), **_common_without("n", "max_tokens", "max_completion_tokens"),
            ),
            "MessageBody": _object(
                ["messages", "max_tokens"], max_tokens={"type": "integer", "minimum": 1, "maximum": 8},
                messages={"type": "array", "minItems": 1, "maxItems": 4, "items": _TURN}, system=_or_null(_CONTENT),
                **_common_without("n", "max_tokens", "max_completion_tokens"),
            ),
            "CountBody": _object(
                ["messages"], messages={"type": "array", "minItems": 1, "maxItems": 4, "items": _TURN},
                system=_or_null(_CONTENT),
            ),
            "Count": _closed(input_tokens=COUNT),
            "Response": _RESPONSE,
            "Message": _REPLY,
            "Completion": _document("text_completion", _COMPLETION_LOGPROBS, text=STRING),
            "ChatCompletion": _document(
                "chat.completion",
                _CHAT_LOGPROBS,
                message=_closed(role={"const": "assistant"}, content=STRING, refusal={"type": "null"}),
            ),
        }
    },
}  # fmt: skip
