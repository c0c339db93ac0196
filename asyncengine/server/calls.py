"""Routes that are answered with one document: what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from asyncengine.api.outputs import Usage
from asyncengine.errors import ConfigError, InvalidRequestError
from asyncengine.server.access import Account
from asyncengine.server.config import ServerConfig
from asyncengine.server.engine_api import Engine
from asyncengine.server.protocol import PromptTokensDetails
from asyncengine.text.tokenizer import Tokenizer


class CallBody(msgspec.Struct, kw_only=True):
    """Fields of all bodies. None, explicit or not, means the default; unknown fields are ignored."""

    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None


B = TypeVar("B", bound=CallBody)


@dataclass(frozen=True, slots=True)
class Context:
    """One HTTP request, as the server sees it."""

    id: str
    created: int
    model: str
    terms: dict[str, Any]
    """priority, cache_salt and tenant, for the engine."""
    config: ServerConfig
    account: Account = field(default_factory=Account)

    def usage(self, usage: Usage) -> PromptUsage:
        """The answer's token counts, of which the log's line takes note."""
        self.account.add(usage, None)
        return PromptUsage(usage.prompt_tokens, usage.prompt_tokens, PromptTokensDetails(usage.cached_tokens))


class Call(ABC, Generic[B]):
    """One route: its request and its answer."""

    fields: frozenset[str]
    """The names of the fields that its bodies may have."""
    prompt_param: str
    """The field that holds what the engine calls the prompt."""

    @abstractmethod
    def parse(self, raw: bytes | bytearray, config: ServerConfig) -> B:
        """Typed and checked body, which does not refer to ``raw``. Raises ApiError 400."""

    @abstractmethod
    async def answer(self, engine: Engine, body: B, context: Context) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """The response. Raises what the engine raises."""

    def name_as_asked(self, exc: InvalidRequestError) -> None:
        """Have ``exc`` name the field that the request has. Without one the model is what does not fit."""
        if exc.param is None:
            exc.param = "model"
        elif exc.param in ("prompt", "prompts"):
            exc.param = self.prompt_param


class PromptUsage(msgspec.Struct):
    """Token counts of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def tokenizer_of(engine: Engine) -> Tokenizer | None:
    """Return the engine's tokenizer; None where the engine was created without (skip_tokenizer_init)."""
    try:
        return engine.tokenizer
    except ConfigError:
        return None


def numbers(values: Sequence[float]) -> msgspec.Raw:
    """Return numbers as JSON: many of them are many megabytes of objects otherwise."""
    return msgspec.Raw(msgspec.json.encode(values))
