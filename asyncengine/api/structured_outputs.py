"""StructuredOutputs: what a request may ask of the form of its text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from asyncengine.api.checks import quoted, sequence
from asyncengine.api.json_text import JsonTexts
from asyncengine.errors import InvalidRequestError

FIELDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_CHOICES = 4096
MAX_CHARACTERS = 1 << 20
"""Characters of a schema, an expression or a grammar, and of all choices together."""


@runtime_checkable
class JsonModel(Protocol):
    """A class that describes itself by a JSON Schema, as those of pydantic do."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the text of an output: exactly one of these. Names follow vLLM. Wrong ones raise
    InvalidRequestError."""

    json: str | Mapping[str, Any] | type[JsonModel] | None = None
    """A JSON Schema that the text satisfies, or a pydantic class that has one."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A regular expression that all of the text matches, without look-around and back-references."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar, in the syntax of Lark or of GBNF."""
    _source: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.json, type) and issubclass(self.json, JsonModel):
            object.__setattr__(self, "json", self.json.model_json_schema())
        given = [name for name in FIELDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise wrong_structure(f"exactly one of {', '.join(FIELDS)} is needed, got {got}")
        if self.choice is not None:
            texts = sequence("structured_outputs", self.choice, MAX_CHOICES, "choices")
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise wrong_structure("choice must hold non-empty strings")
            _check_length(sum(map(len, texts)))
            object.__setattr__(self, "choice", texts)
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise wrong_structure(f"{name} must be a non-empty string, got {quoted(text)}")
            _check_length(len(text or ""))
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise wrong_structure(f"json must be a schema: an object, or its text, got {quoted(self.json)}")
        if isinstance(self.json, str):
            _check_length(len(self.json))
        if not isinstance(self.json_object, bool | None):
            raise wrong_structure(f"json_object must be a boolean, got {quoted(self.json_object)}")

    @property
    def kind(self) -> str:
        """json, regex, choice or grammar."""
        return next((name for name in ("regex", "choice", "grammar") if getattr(self, name) is not None), "json")

    def source(self) -> str:
        """Return the constraint as text: choices and schemas are JSON. It is made once, for all prompts of a request.

        Raises InvalidRequestError for a schema that is none.
        """
        if not self._source:
            object.__setattr__(self, "_source", self._made())
        return self._source

    def _made(self) -> str:
        try:
            match self.kind:
                case "choice":
                    return json.dumps(self.choice)
                case "json":
                    schema = {"type": "object"} if self.json is None else self.json
                    assert not isinstance(schema, type)  # its schema stands in its place
                    return json.dumps(JsonTexts().parse(schema) if isinstance(schema, str) else dict(schema))
        except (ValueError, TypeError, RecursionError) as e:
            raise wrong_structure(f"json is no schema: {e!s:.200}") from None
        return self.regex or self.grammar or ""


def _check_length(count: int) -> None:
    if count > MAX_CHARACTERS:
        raise wrong_structure(f"at most {MAX_CHARACTERS} characters are allowed, got {count}")


def wrong_structure(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {message}", param="structured_outputs")
