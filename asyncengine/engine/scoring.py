"""Log probabilities of given texts: one prefill each, and no token is sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from asyncengine.api.outputs import ContinuationScore, RequestOutput
from asyncengine.api.request import SamplingParams
from asyncengine.engine.life import Life
from asyncengine.errors import InvalidRequestError


class Scoring:
    """Scores of texts, for an engine's method ``score``."""

    def __init__(self, life: Life) -> None:
        self._life = life

    async def score(
        self,
        prompt: str | Sequence[int],
        continuation: str | Sequence[int],
        generate: Callable[[list[int], SamplingParams], Awaitable[RequestOutput]],
    ) -> ContinuationScore:
        """See ``AsyncEngine.score``. ``generate`` serves the request that gives the log probabilities."""
        if isinstance(prompt, str) != isinstance(continuation, str):
            raise InvalidRequestError("prompt and continuation must both be text, or both token ids", param="prompt")
        if not prompt or not continuation:
            param = "continuation" if prompt else "prompt"
            raise InvalidRequestError(f"{param} must not be empty: its tokens have no score", param=param)
        self._life.serving()
        prompts = self._life.prompts
        prompts.check_parts(prompt, continuation)
        if isinstance(prompt, str) and isinstance(continuation, str):
            length = len(await prompts.token_ids(prompt))
            ids = await prompts.token_ids(prompt + continuation)
        else:
            length, ids = len(prompt), [*prompt, *continuation]
        if length >= len(ids):
            raise InvalidRequestError("continuation: no token of it is its own", param="continuation")
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, logprob_start_len=length)
        output = await generate(ids, params)
        assert output.prompt_logprobs is not None
        scored = tuple(data for data in output.prompt_logprobs[length:] if data is not None)
        return ContinuationScore(scored, output.usage)
