"""From what a request asks for to a compiled grammar, off the event loop, with limits, and kept for the next request.

llguidance compiles lazily: a matcher costs less than a millisecond and a mask some tens of microseconds, where engines
that precompute take seconds for a large schema. It covers more of JSON Schema than others, and bounds the work of every
step; its licence is MIT.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from asyncengine.errors import InvalidRequestError
from asyncengine.structured_outputs import StructuredOutputs
from asyncengine.text_threads import TextThreads

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from asyncengine.tokenization import Tokenizer

T = TypeVar("T")

PARAM = "structured_outputs"
MAX_GRAMMAR = 1 << 20
"""Characters of a schema, an expression or a grammar."""
_TIME_LIMIT_S = 5.0
_KEPT = 128
"""Grammars; a compiled one takes some 100 KB."""
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""As OpenAI's models write JSON. Without free white space most of what is not a value is forced."""


class Grammars:
    """Compiled grammars of one engine's vocabulary. All methods belong to the engine's event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        """``ends``: the tokens that end a sequence, where a grammar allows an end."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._tokenizer: asyncio.Task[LLTokenizer] | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._threads = TextThreads()

    async def compile(self, asked: StructuredOutputs) -> LLMatcher:
        """A matcher at the beginning of its grammar, to be copied.

        Raises InvalidRequestError for a grammar that is wrong, unsatisfiable, too large or too slow to compile.
        """
        source = asked.source()
        if len(source) > MAX_GRAMMAR:
            raise InvalidRequestError(
                f"{PARAM}: at most {MAX_GRAMMAR} characters are allowed, got {len(source)}", param=PARAM
            )
        key = f"{asked.kind} {source}"
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return found
        tokenizer = await self._make_tokenizer()
        try:
            async with asyncio.timeout(_TIME_LIMIT_S):
                matcher = await self._threads.run(len(source), _compile, asked.kind, source, tokenizer)
        except TimeoutError:
            raise InvalidRequestError(
                f"{PARAM}: the grammar takes longer than {_TIME_LIMIT_S:g} s to compile", param=PARAM
            ) from None
        self._kept[key] = matcher
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return matcher

    async def run(self, call: Callable[[], T]) -> T:
        """``call()``, on a thread that compiles grammars."""
        return await self._threads.run(0, call)

    async def _make_tokenizer(self) -> LLTokenizer:
        """The library's form of the vocabulary, made once, when it is first asked for."""
        if self._tokenizer is None:
            making = self._threads.run(0, _make_tokenizer, self._source, self._vocab_size, self._ends)
            self._tokenizer = asyncio.ensure_future(making)
        return await asyncio.shield(self._tokenizer)

    def release(self) -> None:
        self._threads.release()

    def close(self) -> None:
        self._threads.close()


def _make_tokenizer(tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> LLTokenizer:
    import llguidance

    try:
        return llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=ends)
    except ValueError as e:
        raise InvalidRequestError(f"{PARAM}: not served with this model's tokenizer: {e}", param=PARAM) from None


def _compile(kind: str, source: str, tokenizer: LLTokenizer) -> LLMatcher:
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    try:
        matcher = llguidance.LLMatcher(tokenizer, _grammar(kind, source), limits=limits, log_level=0)
    except ValueError as e:
        raise _wrong(str(e)) from None
    if not matcher.is_error():
        # Of a copy: an unsatisfiable grammar, or one that is too complex, shows with the first mask.
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) and not first.is_error():
            raise _wrong("no text satisfies it")
        matcher = first if first.is_error() else matcher
    if matcher.is_error():
        raise _wrong(matcher.get_error())
    return matcher


def _wrong(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM}: {reason.strip()[:500]}", param=PARAM)


def _grammar(kind: str, source: str) -> str:
    """In the library's form. Raises ValueError."""
    import llguidance

    make: Any = llguidance.LLMatcher
    match kind:
        case "json":
            return str(make.grammar_from_json_schema(source, defaults=_JSON_FORM))
        case "regex":
            return str(make.grammar_from_regex(source))
        case "choice":
            # One terminal: the parser has rows for 2,000 alternatives of a rule.
            texts = " | ".join(json.dumps(text) for text in json.loads(source))
            return str(make.grammar_from_lark(f"start: TEXT\nTEXT: {texts}"))
    return str(llguidance.grammar_from("grammar", source))
