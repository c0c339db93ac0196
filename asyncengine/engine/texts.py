"""Token ids of prompts without generating anything, and text of token ids."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncengine.api.checks import quoted
from asyncengine.api.request import Prompt, Truncation
from asyncengine.errors import InvalidRequestError
from asyncengine.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.text.prompts import Prompts
    from asyncengine.text.tokenizer import Tokenizer

_AT_ONCE = 2048
"""Tokens that are checked, or whose text is made, in one turn of the event loop: about a millisecond."""


class TextMethods(ABC):
    """The engine's methods that tokenize and make text."""

    _prompts: Prompts | None

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo:
        """The loaded model."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @abstractmethod
    def _serving(self) -> object:
        """Raises EngineClosedError and EngineDeadError where no request is served."""

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "left",
    ) -> list[int]:
        """Token ids of a prompt, as a request has them; nothing is computed. Errors are those of ``submit``.

        Chat templates write all special tokens themselves: ``add_special_tokens`` is for text. The prompt is truncated
        as by SamplingParams; -1 keeps as many tokens as the context has.
        """
        self._serving()
        assert self._prompts is not None
        kept = Truncation(truncate_prompt_tokens, truncation_side).kept(self.model_info.max_model_len, 0)
        return await self._prompts.token_ids(prompt, kept, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids. Raises InvalidRequestError for one that neither the tokenizer nor the model has,
        ConfigError without a tokenizer."""
        self._serving()
        tokenizer = self.tokenizer
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
