"""Prompts around a gap, which the output fills: ``suffix`` of /v1/completions.

A tokenizer that was trained for this has markers for the text before the gap and for the text after it. They are put
between the token ids of both texts. A text that contains a marker's name stays text.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from asyncengine.api.request import Prompt
from asyncengine.errors import InvalidRequestError
from asyncengine.server.engine_api import Engine
from asyncengine.server.errors import bad_request
from asyncengine.text.tokenizer import Tokenizer

#: Names of the markers before the prefix, before the suffix and before the output. Without the last one the suffix
#: comes first, and the output follows the prefix.
_SETS: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
#: Tokens after which such models go on with another file, or with nothing. They need not be end-of-sequence tokens.
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<|file_sep|>", "<file_sep>",
    "<|file_separator|>", "▁<EOT>",
)  # fmt: skip
_MAX_NAMED = 1024
"""Names of markers in the texts of one request: the text is tokenized in as many parts."""
MAX_TOKENS = 1 << 22
"""Most tokens of all prompts of a request together with the suffix of each."""
_GLUE = ("\n", "☺", "/")
"""Texts that begin a line before a part that does not; their tokens are taken away again."""


@dataclass(frozen=True, slots=True)
class Markers:
    """Token ids of a tokenizer's markers."""

    prefix: int
    suffix: int
    middle: int | None
    """None: the suffix comes first, and the output follows the prefix."""
    ends: tuple[int, ...]
    """Tokens that end the output, the markers among them."""
    names: re.Pattern[str]
    """Texts that the tokenizer takes for one of the markers."""

    def around(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[Sequence[int]]:
        """The parts of the prompt, without what begins a sequence."""
        if self.middle is None:
            return [(self.suffix,), suffix, (self.prefix,), prefix]
        return [(self.prefix,), prefix, (self.suffix,), suffix, (self.middle,)]


class Infill(Sequence[int]):
    """Token ids of a prompt around a gap. The prompts of a request share those of the suffix: they may be many."""

    __slots__ = ("_parts", "prefix")

    def __init__(self, parts: Sequence[Sequence[int]], prefix: Prompt) -> None:
        """``prefix`` is what the request has as its prompt."""
        self._parts = parts
        self.prefix = prefix

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._parts)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


def markers_of(tokenizer: Tokenizer | None) -> Markers:
    """Raises ApiError 400 where the tokenizer has no markers, or the model no rows for them."""
    for names in _SETS if tokenizer is not None else ():
        assert tokenizer is not None
        found = {name: _token(tokenizer, name) for name in names if name is not None}
        if None in found.values():
            continue
        ids = cast("dict[str, int]", found)
        prefix, suffix, middle = names
        known = ids | {name: i for name in _ENDS if (i := _token(tokenizer, name)) is not None}
        texts = {text for name in known for text in (name, name.replace("▁", " "))}
        pattern = re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
        last = None if middle is None else ids[middle]
        return Markers(ids[prefix], ids[suffix], last, tuple(known.values()), pattern)
    raise bad_request(
        "suffix: this model's tokenizer has no markers to fill in the middle of a text", "suffix", "unsupported_value"
    )


async def infills(engine: Engine, prompts: Sequence[Prompt], suffix: str) -> list[Prompt]:
    """``prompts``, texts or token ids, each with the suffix behind a gap. They may be empty texts.

    Raises ApiError 400 for texts that are too long together, and what the engine raises for a text.
    """
    markers = markers_of(engine.tokenizer)
    making = _Texts(engine, markers)
    begin = await making.begin()
    try:
        after = await making.ids(suffix, begins=False)
    except InvalidRequestError as exc:
        exc.param = "suffix"
        raise
    out: list[Prompt] = []
    count = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            before = await making.ids(prompt, begins=True)
        else:
            before = cast("list[int]", prompt)
            if begin and before[: len(begin)] == begin:
                before = before[len(begin) :]
        count += len(before) + len(after)
        if count > MAX_TOKENS:
            raise bad_request(f"suffix: the prompts, each with it, may have {MAX_TOKENS} tokens in all", "suffix")
        out.append(Infill([begin, *markers.around(before, after)], prompt))
        await asyncio.sleep(0)
    return out


class _Texts:
    """Tokenizes the texts of one request without their becoming markers."""

    def __init__(self, engine: Engine, markers: Markers) -> None:
        self._engine = engine
        self._names = markers.names
        self._ends = frozenset(markers.ends)
        self._named = 0
        self._spaced = False

    async def begin(self) -> list[int]:
        """To be called first. Returns the tokens that the tokenizer puts before every text."""
        bare, whole = await self._tokens("a"), await self._engine.tokenize("a")
        self._spaced = (self._engine.tokenizer.backend.id_to_token(bare[0]) or "").startswith(("▁", "Ġ"))
        return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(bare)] == bare), [])

    async def ids(self, text: str, *, begins: bool) -> list[int]:
        """``begins``: the text may get the space that some tokenizers put before a text."""
        out: list[int] = []
        for part in self._parts(text):
            found = await (self._tokens(part) if begins else self._glued(part))
            if not self._ends.isdisjoint(found):
                raise bad_request("suffix: the tokenizer takes a part of these texts for a marker", "suffix")
            out += found
            begins = False
            await asyncio.sleep(0)
        return out

    def _parts(self, text: str) -> Iterator[str]:
        """Parts of which none has a marker's name, since each name is divided."""
        last = 0
        for match in self._names.finditer(text):
            self._named += 1
            if self._named > _MAX_NAMED:
                raise bad_request(f"suffix: these texts have more than {_MAX_NAMED} names of markers", "suffix")
            middle = (match.start() + match.end()) // 2
            yield text[last:middle]
            last = middle
        if last < len(text):
            yield text[last:]

    async def _tokens(self, text: str) -> list[int]:
        return await self._engine.tokenize(text, add_special_tokens=False)

    async def _glued(self, text: str) -> list[int]:
        """Return the tokens of a text that continues another one."""
        if not self._spaced:
            return await self._tokens(text)
        for glue in _GLUE:
            head, whole = await self._tokens(glue), await self._tokens(glue + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return await self._tokens(text)


def _token(tokenizer: Tokenizer, name: str) -> int | None:
    found = tokenizer.backend.token_to_id(name)
    return found if found is not None and found < tokenizer.num_rows else None
