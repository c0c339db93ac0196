"""The served keywords of JSON Schema are those that engine/constraints/README.md lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncengine import InvalidRequestError, StructuredOutputs, bundled_model
from asyncengine.engine.constraints.grammars import Grammars
from asyncengine.text.tokenizer import Tokenizer

README = Path(__file__).resolve().parents[3] / "asyncengine/engine/constraints/README.md"
STRING: dict[str, Any] = {"type": "string"}
SERVED: dict[str, dict[str, Any]] = {
    "type": {"type": ["integer", "null"]},
    "enum": {"enum": [1, "a", None]},
    "const": {"const": {"a": 1}},
    "properties": {"properties": {"a": STRING}},
    "required": {"properties": {"a": STRING}, "required": ["a"]},
    "additionalProperties": {"additionalProperties": STRING},
    "patternProperties": {"patternProperties": {"^x-": STRING}},
    "items": {"items": STRING},
    "prefixItems": {"prefixItems": [STRING, {"type": "integer"}]},
    "additionalItems": {"items": [STRING], "additionalItems": {"type": "integer"}},
    "minItems": {"minItems": 1},
    "maxItems": {"maxItems": 3},
    "minLength": {"minLength": 2},
    "maxLength": {"maxLength": 3},
    "pattern": {"pattern": "^a+$"},
    "minimum": {"minimum": 1},
    "maximum": {"maximum": 9},
    "exclusiveMinimum": {"exclusiveMinimum": 1},
    "exclusiveMaximum": {"exclusiveMaximum": 9},
    "multipleOf": {"multipleOf": 3},
    "minProperties": {"minProperties": 1},
    "maxProperties": {"maxProperties": 2},
    "anyOf": {"anyOf": [STRING, {"type": "integer"}]},
    "allOf": {"allOf": [{"minimum": 1}, {"maximum": 9}]},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": STRING}},
    "$defs": {"$defs": {"a": STRING}},
    "format": {"type": "string", "format": "date-time"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "not": {"not": STRING},
    "if": {"if": STRING, "then": {"minLength": 2}},
    "contains": {"contains": STRING},
    "uniqueItems": {"uniqueItems": True},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"minProperties": 2}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
}


def row(title: str) -> set[str]:
    """The keywords of a row of the README's table."""
    line = next(line for line in README.read_text().splitlines() if line.startswith(f"| {title} "))
    return set(re.findall(r"`([^`]+)`", line))


def test_the_document_lists_these() -> None:
    assert row("served") == set(SERVED)
    assert row("refused") - {"then", "else", "$ref"} == set(REFUSED)


@pytest.mark.parametrize("keyword", [*SERVED, *REFUSED])
async def test_keywords(keyword: str) -> None:
    tokenizer = Tokenizer.from_pretrained(str(bundled_model()))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    try:
        if keyword in SERVED:
            await grammars.compile(StructuredOutputs(json=SERVED[keyword]))
        else:
            with pytest.raises(InvalidRequestError, match="structured_outputs"):
                await grammars.compile(StructuredOutputs(json=REFUSED[keyword]))
    finally:
        grammars.close()


async def test_a_reference_to_another_document_is_refused() -> None:
    tokenizer = Tokenizer.from_pretrained(str(bundled_model()))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    with pytest.raises(InvalidRequestError):
        await grammars.compile(StructuredOutputs(json={"$ref": "http://localhost/schema.json"}))
    grammars.close()
