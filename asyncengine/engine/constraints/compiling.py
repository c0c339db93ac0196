"""The way from the text of a grammar to llguidance's matcher, in two steps: ``lower`` and ``make_matcher``.

Both run in a process of sandbox_program.py, where a grammar is tried first and may be ended. ``make_matcher`` runs in
the engine's process, too, for a grammar that passed. This file imports nothing of asyncengine: that process loads it by
its path.

llguidance compiles lazily, and the copies of a matcher share the automaton that their masks make larger.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,  # ambiguity: the time of a token grows with its square, to 15 ms here
    "step_max_items": 20_000,
    "step_lexer_fuel": 100_000,  # some 7 ms and 7 MB of a mask
    "max_lexer_states": 16_384,  # of all sequences of a grammar together: some 0.7 KB each
    "verbose_errors": False,
}
"""Limits of llguidance for what one mask may cost, and for the automaton of one grammar."""
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""JSON as OpenAI's models write it. Without free white space most text that is not a value is forced."""
_CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}",
}
"""Members of the classes of characters in ECMA 262."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_SCHEMA_IN_LARK = re.compile(r"%json\s*(?=\{)")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of JSON Schema whose value maps names to schemas."""
_DATA = ("const", "enum", "default", "examples", "x-guidance")
"""Keywords of JSON Schema whose value is no schema."""


def make_tokenizer(tokenizer_json: str, vocab_size: int, ends: Sequence[int]) -> LLTokenizer:
    """The library's form of a vocabulary; ``ends``: tokens that end a sequence. Raises ValueError."""
    import llguidance

    return llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(ends))


def lower(kind: str, source: str) -> str:
    """A grammar in the library's form. ``kind``: json, regex, choice or grammar. Raises ValueError."""
    import llguidance

    make: Any = llguidance.LLMatcher
    match kind:
        case "json":
            return str(make.grammar_from_json_schema(ecma_schema(source), defaults=_JSON_FORM))
        case "regex":
            return str(make.grammar_from_regex(ecma_regex(source)))
        case "choice":
            # One terminal: the parser has rows for 2,000 alternatives of a rule.
            texts = " | ".join(json.dumps(text) for text in json.loads(source))
            return str(make.grammar_from_lark(f"start: TEXT\nTEXT: {texts}"))
    return str(llguidance.grammar_from("grammar", ecma_lark(source)))


def make_matcher(tokenizer: LLTokenizer, lowered: str) -> LLMatcher:
    """A matcher at the beginning of its grammar, whose first mask is computed. Raises ValueError."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, lowered, limits=llguidance.LLParserLimits(**LIMITS), log_level=0)
    # An unsatisfiable grammar, or one that is too complex, shows with the first mask. Copies have this mask, too.
    if not matcher.is_error() and not any(matcher.compute_bitmask()) and not matcher.is_error():
        raise ValueError("no text satisfies it")
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def try_grammar(tokenizer: LLTokenizer, kind: str, source: str) -> tuple[str, int, int]:
    """The lowered grammar, and the bytes of its matcher and of a copy. Raises ValueError."""
    lowered = lower(kind, source)
    before = _held_bytes()
    matcher = make_matcher(tokenizer, lowered)
    made = _held_bytes()
    copies = [matcher.deep_copy() for _ in range(_COPIES)]
    copied = _held_bytes()
    del copies
    return lowered, max(0, made - before), max(0, copied - made) // _COPIES


_COPIES = 4
"""Copies of a matcher whose bytes are measured."""


def ecma_regex(regex: str) -> str:
    r"""The same expression for a library with classes of Unicode: ``\d``, ``\w`` and ``\s`` are those of ECMA 262."""

    def replaced(escape: re.Match[str]) -> str:
        letter = escape[1]
        members = _CLASSES.get(letter.lower())
        if members is None:
            return escape[0]
        return f"[^{members}]" if letter.isupper() else f"[{members}]"

    return _ESCAPE.sub(replaced, regex)


def ecma_schema(text: str) -> str:
    """The same JSON Schema with ``ecma_regex`` of its patterns. Raises ValueError."""
    if '"pattern' not in text or "\\\\" not in text:
        return text
    try:
        return json.dumps(_with_patterns(json.loads(text)), ensure_ascii=False)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def ecma_lark(grammar: str) -> str:
    """The same grammar with ``ecma_schema`` of the JSON Schemas in it. Its own expressions are Unicode's."""
    parts, end = [], 0
    for found in _SCHEMA_IN_LARK.finditer(grammar):
        if found.end() < end:
            continue
        try:
            _, after = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):  # llguidance says what is wrong
            continue
        parts += [grammar[end : found.end()], ecma_schema(grammar[found.end() : after])]
        end = after
    return "".join(parts) + grammar[end:]


def _with_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            made[key] = ecma_regex(value)
        elif key in _NAMED and isinstance(value, dict):
            name = ecma_regex if key == "patternProperties" else str
            made[key] = {name(each): _with_patterns(value[each]) for each in value}
        else:
            made[key] = value if key in _DATA else _with_patterns(value)
    return made


class _MallInfo(ctypes.Structure):
    """The C library's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "ford", "top")
    )


def _held_bytes() -> int:
    """Bytes of this process's allocations, or of its memory where the C library does not count allocations."""
    if sys.platform == "linux":
        try:
            count = ctypes.CDLL(None).mallinfo2
        except AttributeError:  # another C library than glibc 2.33 or newer
            pass
        else:
            count.restype = _MallInfo
            info = count()
            return int(info.uordblks + info.hblkhd)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
