"""Grammars and callables of one engine's requests in, sequences that follow them out, and the threads of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from asyncengine.api.conversation import Conversation
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.engine.constraints.callables import CallableThreads
from asyncengine.engine.constraints.grammars import PARAM, Grammars
from asyncengine.engine.constraints.masks import Constraint, MaskWorkers
from asyncengine.engine.constraints.processors import ProcessedSequence
from asyncengine.engine.constraints.reasoning import reasoning_at
from asyncengine.engine.constraints.vocabulary import grammar_ends
from asyncengine.errors import AsyncEngineError, InvalidRequestError

if TYPE_CHECKING:
    from asyncengine._core import SamplingState
    from asyncengine.api.model_info import ModelInfo
    from asyncengine.text.tokenizer import Tokenizer


class StructuredRequests:
    """All methods belong to the engine's event loop. Nothing is made before the first request."""

    def __init__(self, tokenizer: Tokenizer | None, model: ModelInfo, *, sandbox: bool) -> None:
        """With ``sandbox`` grammars are tried in processes of their own."""
        self._tokenizer = tokenizer
        self._sandbox = sandbox
        self._model = model
        self._grammars: Grammars | None = None
        self._workers = MaskWorkers(asyncio.get_running_loop(), "masks")
        self._processors = CallableThreads(asyncio.get_running_loop())

    async def constraints(
        self, params: SamplingParams, prompt: Prompt, prompt_ids: Sequence[int], tenant: str | None
    ) -> list[Constraint]:
        """One for each of the n sequences, none without a grammar. Raises InvalidRequestError, EngineOverloadedError,
        EngineClosedError."""
        asked = params.structure
        if asked is None:
            return []
        if self._tokenizer is None:
            raise InvalidRequestError(f"{PARAM}: this engine has no tokenizer (skip_tokenizer_init)", param=PARAM)
        ends = grammar_ends(self._model, self._tokenizer)
        if not ends:
            raise InvalidRequestError(f"{PARAM}: this model has no end-of-sequence token", param=PARAM)
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer, self._model.vocab_size, ends, sandbox=self._sandbox)
        grammar = await self._grammars.compile(asked, tenant)
        continued = prompt.continued if isinstance(prompt, Conversation) else ""
        is_chat = isinstance(prompt, Conversation) or (not isinstance(prompt, str) and isinstance(prompt[0], dict))
        words = -(-self._model.vocab_size // 32)
        held = self._grammars.hold(params.n * (grammar.copy_bytes + 4 * words), tenant)
        # A token that nobody samples has no log probability, and is in no history of penalties.
        forces = not (params.wants_logprobs or params.penalized or params.bad_words or params.no_repeat_ngram_size)

        def make() -> list[Constraint]:
            assert self._tokenizer is not None
            return [
                Constraint(
                    grammar,
                    words,
                    len(prompt_ids),
                    ends[0],
                    reasoning_at(self._tokenizer, prompt_ids, is_chat=is_chat, continued=continued),
                    forces=forces,
                    held=held,
                )
                for _ in range(params.n)
            ]

        return await self._workers.run(make)

    def advance(self, constraint: Constraint, tokens: Sequence[int], fail: Callable[[AsyncEngineError], None]) -> None:
        """Tokens have come: have the next mask computed. ``fail`` gets the error if there is none."""
        if sampled := constraint.advance(tokens):
            self._workers.submit(partial(constraint.work, sampled), fail)

    def processed(
        self, params: SamplingParams, prompt_ids: Sequence[int], states: Sequence[SamplingState]
    ) -> list[ProcessedSequence]:
        """One for each of the n sequences, none without a logits_processor. Raises EngineOverloadedError."""
        if params.logits_processor is None:
            return []
        self._processors.check_room()
        vocab = self._model.vocab_size
        return [ProcessedSequence(params.logits_processor, prompt_ids, vocab, state) for state in states]

    def process(
        self,
        sequence: ProcessedSequence,
        output: Sequence[int],
        logits: bytes,
        fail: Callable[[AsyncEngineError], None],
    ) -> None:
        """Logits of the token behind ``output`` have come. ``fail`` gets the error if no token comes of them."""
        if sequence.is_news(len(output)):
            work = partial(sequence.work, list(output), logits)
            self._processors.submit(work, fail, lambda: sequence.is_wanted)

    def release(self) -> None:
        """Let the threads end that nobody needs."""
        self._workers.close()
        self._processors.close()
        if self._grammars is not None:
            self._grammars.release()

    async def aclose(self) -> None:
        """Grammars that are being compiled fail with EngineClosedError. Idempotent."""
        self._workers.close()
        self._processors.close()
        if self._grammars is not None:
            await self._grammars.aclose()
