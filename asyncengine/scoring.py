"""Log probabilities of given texts: one prefill each, and no token is sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncengine.errors import InvalidRequestError
from asyncengine.logprobs import TokenLogProbs
from asyncengine.request import Prompt, RequestOutput, SamplingParams, Usage

if TYPE_CHECKING:
    from asyncengine.prompts import Prompts


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """Log probabilities of a continuation."""

    logprobs: tuple[TokenLogProbs, ...]
    """Log probabilities at each token of the continuation."""
    usage: Usage

    @property
    def total(self) -> float:
        """Natural logarithm of the probability of all of it."""
        return sum(data.logprob for data in self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """True if each token of the continuation is the most probable one at its place."""
        return all(data.rank == 1 for data in self.logprobs)


class ScoringMethods(ABC):
    """The engine's methods that score texts."""

    _prompts: Prompts | None

    @abstractmethod
    def _serving(self) -> object:
        """Raises EngineClosedError and EngineDeadError where no request is served."""

    @abstractmethod
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> RequestOutput:
        """A whole request."""

    async def score(
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], **terms: Any
    ) -> ContinuationScore:
        """Score ``continuation`` after ``prompt``. Both are text, or both are token ids.

        Text is tokenized together: the continuation's tokens are those behind as many as the prompt has by itself.
        Calls with the same prompt share what is computed of it. ``terms`` and errors are those of ``submit``.
        """
        if isinstance(prompt, str) != isinstance(continuation, str):
            raise InvalidRequestError("prompt and continuation must both be text, or both token ids", param="prompt")
        if not prompt or not continuation:
            param = "continuation" if prompt else "prompt"
            raise InvalidRequestError(f"{param} must not be empty: its tokens have no score", param=param)
        self._serving()
        assert self._prompts is not None
        self._prompts.check_parts(prompt, continuation)
        if isinstance(prompt, str) and isinstance(continuation, str):
            length = len(await self._prompts.token_ids(prompt))
            ids = await self._prompts.token_ids(prompt + continuation)
        else:
            length, ids = len(prompt), [*prompt, *continuation]
        if length >= len(ids):
            raise InvalidRequestError("continuation: no token of it is its own", param="continuation")
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, logprob_start_len=length)
        output = await self.generate(ids, params, **terms)
        assert output.prompt_logprobs is not None
        scored = tuple(data for data in output.prompt_logprobs[length:] if data is not None)
        return ContinuationScore(scored, output.usage)
