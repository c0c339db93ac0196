"""The OpenAI wire format: what requests may contain, and what responses look like.

Ranges are SamplingParams' business; this module checks shapes. Fields that neither this server nor
OpenAI knows are skipped without objects being made of them. Fields that would change the output but are
not implemented are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.api.checks import quoted
from asyncengine.api.outputs import Usage
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.errors import InvalidRequestError
from asyncengine.server.errors import ApiError, bad_request
from asyncengine.server.unserved import Fields

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T", bound="GenerationBody")

NOT_GIVEN = msgspec.Raw()
Schema = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": ["object", "null"]})]
"""A JSON Schema as it stands in the body: it stays text until its grammar is compiled. Empty where it is not given."""
SchemaOrText = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": ["object", "string", "null"]})]
"""A JSON Schema as it stands in the body, or its text in a string."""


def not_given() -> msgspec.Raw:
    """The default of such a field; as a plain default it would not have a description."""
    return NOT_GIVEN


class JsonSchemaFormat(msgspec.Struct):
    schema: Schema = msgspec.field(default_factory=not_given)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's way to ask for structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: Schema = msgspec.field(default_factory=not_given)
    """JSON Schema of a json_object, in the dialect of llama.cpp's server."""
    value: Schema = msgspec.field(default_factory=not_given)
    """JSON Schema of a json_object, in the dialect of Text Generation Inference, which Hugging Face's client speaks to
    every server."""


class StructuresBody(msgspec.Struct, forbid_unknown_fields=True):
    """StructuredOutputs' fields."""

    json: SchemaOrText = msgspec.field(default_factory=not_given)
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields common to completions and chat completions. None, explicit or not, means the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    no_repeat_ngram_size: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logprobs_mode: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuresBody | None = None
    guided_json: SchemaOrText = msgspec.field(default_factory=not_given)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: SchemaOrText = msgspec.field(default_factory=not_given)
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


#: StructuredOutputs' names of the fields that ask for a form of the output as other engines do.
TWINS = {
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
_LONGEST_TOKEN = 10  # digits
_LONGEST_NEUTRAL = 128  # bytes of JSON that can ask for nothing
_PATH = re.compile(r"^(?P<message>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)


class JsonDecoder(Generic[S]):
    """Decoder of JSON to a body of type ``kind``; ``unimplemented`` is a table of ``unserved.py``."""

    def __init__(self, kind: type[S], unimplemented: Fields) -> None:
        self.fields = frozenset(kind.__struct_fields__)
        self._unimplemented = unimplemented
        refused = [(name, msgspec.Raw, NOT_GIVEN) for name in unimplemented]
        full = msgspec.defstruct(kind.__name__, refused, bases=(kind,), kw_only=True)
        self._decoder = cast("msgspec.json.Decoder[S]", msgspec.json.Decoder(full))

    def decode(self, raw: bytes | bytearray) -> S:
        """Typed body, which does not refer to ``raw``. Takes strict JSON: no NaN, no trailing bytes.

        Raises ApiError 400 whose param is the path of the first wrong field.
        """
        try:
            body = self._decoder.decode(raw)
        except msgspec.ValidationError as exc:
            raise _wrong_type(str(exc)) from None
        except ValueError as exc:  # msgspec.DecodeError, UnicodeDecodeError
            raise bad_request(f"the request body is not valid JSON: {exc}") from None
        for name, neutral in self._unimplemented.items():
            value = getattr(body, name)
            if value is not NOT_GIVEN:
                setattr(body, name, NOT_GIVEN)
                if not _asks_for_nothing(value, neutral):
                    raise unsupported(name)
        return body


class BodyDecoder(JsonDecoder[T]):
    """Decoder of requests that generate."""

    def decode(self, raw: bytes | bytearray) -> T:
        """Decode as JsonDecoder does, and check fields that depend on each other."""
        body = super().decode(raw)
        _own_schemas(body)
        if body.prompt_logprobs is not None and body.stream:
            raise bad_request("prompt_logprobs come with the whole response: not with stream: true", "prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options is allowed only with stream: true", "stream_options")
        return body


def _own_schemas(body: GenerationBody) -> None:
    """Have the schemas refer to bytes of their own in place of the whole body."""
    body.guided_json, body.json_schema = body.guided_json.copy(), body.json_schema.copy()
    if body.structured_outputs is not None:
        body.structured_outputs.json = body.structured_outputs.json.copy()
    if (form := body.response_format) is not None:
        form.schema, form.value = form.schema.copy(), form.value.copy()
        if form.json_schema is not None:
            form.json_schema.schema = form.json_schema.schema.copy()


def schema_text(raw: msgspec.Raw, path: str, *, quoted_too: bool = False) -> str | None:
    """A schema as text; None if it is not given, or null. ``quoted_too``: the text may stand in a string.

    Raises ApiError 400 for what is neither an object nor such a string.
    """
    given = bytes(raw)
    if given in (b"", b"null"):
        return None
    if not given.startswith((b"{", b'"') if quoted_too else b"{"):
        raise bad_request(f"{path} must be an object", path)
    try:
        return given.decode() if given.startswith(b"{") else msgspec.json.decode(given, type=str)
    except ValueError as exc:
        raise bad_request(f"{path} is not valid JSON: {exc}", path) from None


def _wrong_type(message: str) -> ApiError:
    match = _PATH.match(message)
    if match is None:  # the top level has no path
        return bad_request(f"the request body: {message}")
    return bad_request(f"{match['path']}: {match['message']}", match["path"])


def _asks_for_nothing(value: msgspec.Raw, neutral: tuple[object, ...]) -> bool:
    """Return whether the JSON of a field that is not implemented is one of the values that ask for nothing."""
    if len(value) > _LONGEST_NEUTRAL:
        return False
    try:
        decoded = msgspec.json.decode(value)
    except ValueError:  # numbers and characters that were only skipped so far
        return False
    return any(_same(decoded, each) for each in neutral)


def unsupported(param: str) -> ApiError:
    """400 for a known parameter that this server does not implement."""
    return bad_request(f"{param} is not supported by this server yet", param, "unsupported_parameter")


def _same(value: object, neutral: object) -> bool:
    """Equality that keeps booleans apart from numbers: ``logprobs: 0`` is not ``logprobs: false``."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


_SAMPLING_FIELDS = tuple(
    SamplingParams.__dataclass_fields__.keys() & set(GenerationBody.__struct_fields__) - {"structured_outputs"}
)


def sampling_params(body: GenerationBody, **more: Any) -> SamplingParams:
    """Make the sampling parameters of ``body`` and ``more``. Without max_tokens the output may fill the context. Raises
    InvalidRequestError."""
    values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    values.setdefault("max_tokens", None)
    if body.logit_bias is not None:
        values["logit_bias"] = _token_biases(body.logit_bias)
    if body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
    if asked := structures(body):
        if len(asked) > 1:
            raise bad_request(f"{' and '.join(asked)} ask for different forms of the output", list(asked)[1])
        values["structured_outputs"] = next(iter(asked.values()))
    return SamplingParams(**values, **more)


def structures(body: GenerationBody) -> dict[str, dict[str, Any]]:
    """StructuredOutputs' fields, by the fields of the request that ask for them. Raises ApiError 400."""
    asked: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        asked["response_format"] = _response_format(body.response_format)
    if body.structured_outputs is not None:
        given: dict[str, Any] = msgspec.structs.asdict(body.structured_outputs)
        given["json"] = schema_text(given["json"], "structured_outputs.json", quoted_too=True)
        if any(value is not None for value in given.values()):
            asked["structured_outputs"] = given
    for field, name in TWINS.items():
        value = getattr(body, field)
        if name == "json":
            value = schema_text(value, field, quoted_too=True)
        if value is not None:
            asked[field] = {name: value}
    return asked


def _response_format(asked: ResponseFormat) -> dict[str, Any]:
    if asked.type == "json_object":
        for raw, name in ((asked.schema, "schema"), (asked.value, "value")):
            if (schema := schema_text(raw, f"response_format.{name}")) is not None:
                return {"json": schema}
        return {"json_object": True}
    path = "response_format.json_schema.schema"
    schema = None if asked.json_schema is None else schema_text(asked.json_schema.schema, path)
    if schema is None:
        raise bad_request(f"{path} is required", path)
    return {"json": schema}


def _token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON has no integers as keys. Raises InvalidRequestError that names those that are none."""
    wrong = [key for key in biases if not (key.isascii() and key.isdecimal() and len(key) <= _LONGEST_TOKEN)]
    if wrong:
        named = ", ".join(quoted(key) for key in wrong[:10])
        raise InvalidRequestError(f"logit_bias: the keys must be token ids, got {named}", param="logit_bias")
    return {int(key): value for key, value in biases.items()}


def name_as_asked(exc: InvalidRequestError, body: GenerationBody, grammar: str | None = None) -> None:
    """Have ``exc`` name the field that the request has, where the engine knows it by another name.

    ``grammar``: the field that a grammar was made of that the request does not bring itself.
    """
    if exc.param == "max_tokens" and body.max_completion_tokens is not None:
        exc.param = "max_completion_tokens"
        exc.args = (str(exc).replace("max_tokens", "max_completion_tokens"),)
    elif exc.param == "structured_outputs" and (asked := grammar or next(iter(structures(body)), None)):
        exc.param = asked
        exc.args = (str(exc).replace("structured_outputs", exc.param, 1),)
    elif exc.param == "logprobs" and hasattr(body, "top_logprobs"):
        exc.param = "top_logprobs"
        exc.args = (str(exc).replace("logprobs", "top_logprobs", 1),)
    elif exc.param == "prompt" and not hasattr(body, "prompt"):
        exc.param = "messages"
        exc.args = (str(exc).replace("the prompt", "the prompt of these messages"),)


def prompts_of(given: str | list[Any] | None, limit: int, param: str) -> list[Prompt]:
    """Text, token ids, or an array of such prompts, as a list. Raises ApiError 400 for more than ``limit``."""
    if given is None or given == "" or given == []:
        raise bad_request(f"{param} is required and must not be empty", param)
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds != {int} and len(given) > limit:
        raise bad_request(f"{param}: at most {limit} prompts in a request, got {len(given)}", param)
    if len(kinds) > 1 and int in kinds:
        raise bad_request(f"{param} must hold token ids, or strings and arrays of ids, not both", param)
    if kinds == {int}:
        return [given]
    for i, item in enumerate(given):
        if not item:
            raise bad_request(f"{param}[{i}] is empty", f"{param}[{i}]")
    return given


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, parts: list[Usage], reasoning_tokens: int | None = None) -> UsageBody:
        """The sum over the prompts of one request."""
        prompt = sum(u.prompt_tokens for u in parts)
        completion = sum(u.completion_tokens for u in parts)
        cached = sum(u.cached_tokens for u in parts)
        details = UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)


def check_model(asked: str | None, served: Sequence[str]) -> None:
    """404 for a model that is not served; a request that names none means the served one."""
    if asked is not None and asked not in served:
        raise ApiError(
            404,
            f"the model {quoted(asked)} does not exist; this server has {', '.join(map(repr, served[:10]))}",
            param="model",
            code="model_not_found",
        )
