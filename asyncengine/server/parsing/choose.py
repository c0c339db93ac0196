"""Choice of a request's parser: by the model's chat template, or by the operator's setting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from asyncengine.server.parsing.formats import DeepSeek, Hermes, Json, Llama3Json, Mistral
from asyncengine.server.parsing.harmony import Harmony
from asyncengine.server.parsing.machine import Machine
from asyncengine.server.parsing.names import HARMONY
from asyncengine.server.parsing.parser import CallRules, OutputParser
from asyncengine.server.parsing.pythonic import Pythonic
from asyncengine.text.markers import REASONING, TAIL, Markers, under_way
from asyncengine.text.tokenizer import Tokenizer

_TOOL_FORMATS: dict[str, type[Machine]] = {
    "hermes": Hermes,
    "json": Json,
    "llama3_json": Llama3Json,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "deepseek_v3": DeepSeek,
}
_UNMARKED = ("json", "llama3_json", "pythonic")
"""Formats in which any JSON, or any list, might be a call: only names of tools make it one."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats that a model writes."""

    tools: str | None
    """Format of tool calls, one of names.TOOL_PARSERS; None: the template has tools in a form that is not known
    here."""
    reasoning: str | None
    """Format of the reasoning, one of names.REASONING_PARSERS but "none"; None: the model does not reason, or nobody
    looks."""
    shows_tools: bool
    """True if the template has tools."""


@lru_cache(maxsize=32)
def formats_of(template: str, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Formats:
    """Return the formats by markers in a template's source, where no parser is named."""
    shows_tools = re.search(r"\btools\b", template) is not None
    tools = tool_parser or _tool_format(template) or (None if shows_tools else "json")
    reasoning = reasoning_parser or _reasoning_format(template)
    return Formats(tools, None if reasoning == "none" else reasoning, shows_tools)


def _tool_format(template: str) -> str | None:
    if _is_harmony(template):
        return HARMONY
    for marker, name in (("[TOOL_CALLS]", "mistral"), ("<｜tool▁call▁begin｜>", "deepseek_v3")):
        if marker in template:
            return name
    if "<tool_call>" in template:  # others have their own form within the same marker
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "<|python_start|>" in template or re.search(r"\[\s*func(tion)?_name1\(", template):
        return "pythonic"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return None


def _reasoning_format(template: str) -> str | None:
    if _is_harmony(template):
        return HARMONY
    return next((name for name, markers in REASONING.items() if markers.end in template), None)


def _is_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template


@dataclass(frozen=True, slots=True)
class Parsing:
    """Reading of the outputs of one request: formats and rules."""

    tools: str | None
    """The format of tool calls, where there may be any."""
    reasoning: str | None
    calls: CallRules = field(default_factory=CallRules)
    continued: str = ""
    """The message that the output continues, if it does."""
    param: str | None = None
    """The request's field that a grammar was made of, if one was that the request does not bring itself."""

    def parser(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> OutputParser:
        """Return a parser for one choice after this prompt."""
        if HARMONY in (self.tools, self.reasoning):
            return Harmony(calls=self.tools is not None, rules=self.calls)
        markers = REASONING.get(self.reasoning or "")
        inside = None if markers is None else self._begun(markers, tokenizer, prompt)
        kind = Machine if self.tools is None else _TOOL_FORMATS[self.tools]
        rules = self.calls if self.tools in _UNMARKED else replace(self.calls, names=None)
        return kind(markers, inside, rules)

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that the parser must see, special tokens or not."""
        if HARMONY in (self.tools, self.reasoning):
            return Harmony.markers
        kind = Machine if self.tools is None else _TOOL_FORMATS[self.tools]
        return (*kind.markers, *REASONING.get(self.reasoning or "", ()))

    def kept_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the special tokens among the markers, which texts leave out otherwise."""
        ids = map(tokenizer.backend.token_to_id, self.markers)
        return tuple(sorted({i for i in ids if i is not None and i in tokenizer.special_token_ids}))

    def reasoning_tokens(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> ReasoningTokens | None:
        """A counter for one choice after this prompt; None without reasoning, or if a marker is no single token."""
        if tokenizer is None or self.reasoning is None:
            return None
        find = partial(_token_id, tokenizer)
        if self.reasoning == HARMONY:
            begin, ends = ["<|channel|>", "analysis", "<|message|>"], ["<|end|>", "<|return|>"]
            inside: bool | None = False
        else:
            markers = REASONING[self.reasoning or ""]
            begin, ends = [markers.begin], [markers.end]
            inside = self._begun(markers, tokenizer, prompt)
        ids, end_ids = list(map(find, begin)), list(map(find, ends))
        return None if None in ids or None in end_ids else ReasoningTokens(ids, end_ids, bool(inside))

    def _begun(self, markers: Markers, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> bool | None:
        tail = "" if tokenizer is None else tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)
        return under_way(markers, tail, self.continued)


def _token_id(tokenizer: Tokenizer, marker: str) -> int | None:
    found: int | None = tokenizer.backend.token_to_id(marker)
    return found


class ReasoningTokens:
    """Counts the tokens of the reasoning of one choice, by the tokens of its markers, which count too."""

    def __init__(self, begin: Iterable[int | None], ends: Iterable[int | None], inside: bool) -> None:
        """``begin``: tokens that come one after the other. ``inside``: the prompt has begun it."""
        self._begin = tuple(begin)
        self._ends = frozenset(ends)
        self._inside = inside
        self._matched = 0
        self.count = 0

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._inside:
                self.count += 1
                self._inside = token not in self._ends
            elif token == self._begin[self._matched]:
                self._matched += 1
                if self._matched == len(self._begin):
                    self.count += self._matched
                    self._inside, self._matched = True, 0
            else:
                self._matched = 1 if token == self._begin[0] else 0
