r"""``\d``, ``\w`` and ``\s`` are those of ECMA 262, in regular expressions and in patterns of schemas alike."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from asyncengine import StructuredOutputs, bundled_model
from asyncengine.engine.constraints import compiling
from asyncengine.engine.constraints.grammars import Grammars
from asyncengine.text.tokenizer import Tokenizer

ARABIC_INDIC_THREE = "\u0663"
NO_BREAK_SPACE = "\u00a0"
EM_SPACE = "\u2003"
ZERO_WIDTH_NO_BREAK_SPACE = "\ufeff"
NEXT_LINE = "\u0085"
VERTICAL_TAB = "\v"
CASES = [
    (r"\d", "7", True),
    (r"\d", ARABIC_INDIC_THREE, False),
    (r"\D", ARABIC_INDIC_THREE, True),
    (r"\D", "7", False),
    (r"\w", "z", True),
    (r"\w", "_", True),
    (r"\w", "é", False),
    (r"\w", "ж", False),
    (r"\W", "é", True),
    (r"\W", "z", False),
    (r"\s", " ", True),
    (r"\s", VERTICAL_TAB, True),
    (r"\s", NO_BREAK_SPACE, True),
    (r"\s", EM_SPACE, True),
    (r"\s", "\u2029", True),
    (r"\s", ZERO_WIDTH_NO_BREAK_SPACE, True),
    (r"\s", NEXT_LINE, False),
    (r"\s", "\u200b", False),
    (r"\S", NO_BREAK_SPACE, False),
    (r"\S", ZERO_WIDTH_NO_BREAK_SPACE, False),
    (r"\S", NEXT_LINE, True),
    (r"[\d-]", "-", True),
    (r"[\d-]", ARABIC_INDIC_THREE, False),
    (r"[^\W]", "é", False),
    (r"[\s\d]", NO_BREAK_SPACE, True),
    (r"[^\s]", ZERO_WIDTH_NO_BREAK_SPACE, False),
    (r"\\d", r"\d", True),
    (r"\\d", "\\7", False),
    (r"[\\d]", "d", True),
    (r"\\\d", "\\7", True),
    (r"\p{Nd}", ARABIC_INDIC_THREE, True),
]


async def accepts(asked: StructuredOutputs, text: str) -> bool:
    tokenizer = Tokenizer.from_pretrained(str(bundled_model()))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    try:
        matcher = (await grammars.compile(asked)).deep_copy()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    finally:
        grammars.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("regex", "text", "right"), CASES)
async def test_classes(regex: str, text: str, right: bool) -> None:
    assert await accepts(StructuredOutputs(regex=regex), text) is right
    schema = {"type": "string", "pattern": f"^{regex}$"}
    written = json.dumps(text, ensure_ascii=False)
    assert await accepts(StructuredOutputs(json=schema), written) is right
    named: dict[str, Any] = {"patternProperties": {f"^{regex}$": {"const": 1}}, "additionalProperties": False}
    assert await accepts(StructuredOutputs(json=named), f"{{{written}:1}}") is right
    lark = f'start: "<" %json {json.dumps(schema)} ">"\n'
    assert await accepts(StructuredOutputs(grammar=lark), f"<{written}>") is right


async def test_expressions_of_a_grammar_are_those_of_unicode() -> None:
    lark = r"start: DIGIT WORD SPACE" + "\n" + r"DIGIT: /\d/" + "\n" + r"WORD: /\w/" + "\n" + r"SPACE: /\s/" + "\n"
    assert await accepts(StructuredOutputs(grammar=lark), f"{ARABIC_INDIC_THREE}é{NEXT_LINE}")
    assert compiling.ecma_lark(lark) == lark


def test_only_patterns_of_a_schema_are_rewritten() -> None:
    schema = {
        "const": {"pattern": r"\d"},
        "enum": [{"pattern": r"\d"}],
        "default": {"pattern": r"\d"},
        "properties": {"pattern": {"pattern": r"\d"}, "const": {"pattern": r"\d"}},
        "patternProperties": {r"\d": {"items": {"pattern": r"\d"}}},
        "$defs": {"enum": {"anyOf": [{"pattern": r"\d"}]}},
    }
    assert json.loads(compiling.ecma_schema(json.dumps(schema))) == {
        "const": {"pattern": r"\d"},
        "enum": [{"pattern": r"\d"}],
        "default": {"pattern": r"\d"},
        "properties": {"pattern": {"pattern": "[0-9]"}, "const": {"pattern": "[0-9]"}},
        "patternProperties": {"[0-9]": {"items": {"pattern": "[0-9]"}}},
        "$defs": {"enum": {"anyOf": [{"pattern": "[0-9]"}]}},
    }


def test_the_classes_are_those_of_ecma_262() -> None:
    """Every character of the basic plane: white space and line terminators of ECMA 262, and ASCII for the others."""
    white = {
        9,
        10,
        11,
        12,
        13,
        32,
        0xA0,
        0x1680,
        *range(0x2000, 0x200B),
        0x2028,
        0x2029,
        0x202F,
        0x205F,
        0x3000,
        0xFEFF,
    }
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda m: f"\\u{int(m[1], 16):04x}", compiling.ecma_regex(r"\s"))
    assert {i for i in range(0x10000) if re.fullmatch(python, chr(i))} == white
    assert compiling.ecma_regex(r"\d\w") == "[0-9][0-9A-Za-z_]"
