"""Token ids of prompts without generating anything, and text of token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncengine.api.checks import quoted
from asyncengine.api.request import Prompt, Truncation
from asyncengine.engine.life import Life
from asyncengine.errors import InvalidRequestError
from asyncengine.text.detokenizer import IncrementalDetokenizer

_AT_ONCE = 2048
"""Tokens that are checked, or whose text is made, in one turn of the event loop: about a millisecond."""


class Texts:
    """Token ids and texts, for an engine's methods of the same names."""

    def __init__(self, life: Life) -> None:
        self._life = life

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool,
        truncate_prompt_tokens: int | None,
        truncation_side: str,
    ) -> list[int]:
        """See ``AsyncEngine.tokenize``."""
        model = self._life.serving().model_info
        kept = Truncation(truncate_prompt_tokens, truncation_side).kept(model.max_model_len, 0)
        return await self._life.prompts.token_ids(prompt, kept, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See ``AsyncEngine.detokenize``."""
        self._life.serving()
        tokenizer = self._life.tokenizer
        num_ids = max(tokenizer.vocab_size, tokenizer.num_rows)
        for first in range(0, len(token_ids), _AT_ONCE):
            _check(token_ids, range(first, min(first + _AT_ONCE, len(token_ids))), num_ids)
            await asyncio.sleep(0)
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        pieces = []
        for first in range(0, len(token_ids), _AT_ONCE):
            pieces.append(detokenizer.push(token_ids[first : first + _AT_ONCE]))
            await asyncio.sleep(0)
        return "".join(pieces) + detokenizer.flush()


def _check(token_ids: Sequence[int], places: range, vocab_size: int) -> None:
    """Raises InvalidRequestError that names the first of these places without a token id."""
    for i in places:
        token = token_ids[i]
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"tokens[{i}] must be a token id in [0, {vocab_size}), got {quoted(token)}", param="tokens"
            )
