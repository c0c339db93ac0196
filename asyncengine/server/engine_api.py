"""The engine as the server sees it: the public API of AsyncEngine, and nothing else of it.

A protocol, so that the type checker holds the engine, simulated engines and the server to one contract
and the server imports no torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from asyncengine.api.logprobs import TokenLogProbs
from asyncengine.api.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PairScores,
    Pooling,
    RequestDelta,
    RequestOutput,
)
from asyncengine.api.request import Prompt, SamplingParams
from asyncengine.api.stats import BlockChange, EngineSnapshot, EngineStats
from asyncengine.text.tokenizer import Tokenizer


class ModelInfo(Protocol):
    """The loaded model, as the start-up log and /v1/models show it."""

    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def device_label(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def num_kv_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def group_window(self) -> int: ...
    @property
    def kv_bytes_per_sequence(self) -> int: ...
    @property
    def kv_capacity_tokens(self) -> int: ...
    @property
    def kv_capacity_sequences(self) -> float: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def states_in_words(self) -> str: ...


class RequestStream(Protocol):
    """The deltas of one admitted request. Closing it before its end aborts the request."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_logprobs(self) -> Sequence[TokenLogProbs | None] | None: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def engine(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[RequestDelta]: ...
    async def aclose(self) -> None: ...


class Engine(Protocol):
    """A started engine."""

    @property
    def health(self) -> str: ...
    @property
    def model_info(self) -> ModelInfo: ...
    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError where there is none."""

    def stats(self) -> EngineStats: ...
    def engine_stats(self) -> list[EngineStats]: ...
    def block_changes(self, most: int) -> list[list[BlockChange]]: ...
    def snapshot(self) -> EngineSnapshot: ...
    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> RequestStream: ...
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> RequestOutput: ...
    async def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        dimensions: int | None = None,
        normalize: bool = True,
        **terms: Any,
    ) -> EmbeddingOutput: ...
    async def classify(self, prompts: Sequence[Prompt], **terms: Any) -> ClassificationOutput: ...
    async def score_pairs(self, queries: Sequence[str], documents: Sequence[str], **terms: Any) -> PairScores: ...
    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "left",
    ) -> list[int]: ...
    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    async def aclose(self, drain: bool = True, timeout_s: float = 30.0) -> None: ...
