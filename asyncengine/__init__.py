"""asyncengine: an LLM inference engine that lives inside one asyncio process."""

from asyncengine.bundled import path as bundled_model
from asyncengine.config import EngineConfig
from asyncengine.conversation import Conversation
from asyncengine.embedding import ClassificationOutput, EmbeddingOutput, PairScores
from asyncengine.engine import AsyncEngine
from asyncengine.errors import (
    AsyncEngineError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InternalError,
    InvalidRequestError,
    KVCapacityError,
    LogitsProcessorError,
    MissingWeightError,
    ModelError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    RequestAbortedError,
    RequestTimeoutError,
    StepFailedError,
    UnsupportedModelError,
    UsageError,
    WeightMismatchError,
    WrongLoopError,
)
from asyncengine.field_docs import show_fields
from asyncengine.logprobs import LogProb, TokenLogProbs
from asyncengine.many import Finished
from asyncengine.request import (
    ChatMessage,
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestOutput,
    RequestTiming,
    SamplingParams,
    Usage,
)
from asyncengine.scoring import ContinuationScore
from asyncengine.stats import BlockMap, DebugStats, EngineSnapshot, EngineStats, StepRecord, WakeRecord
from asyncengine.stream import RequestStream
from asyncengine.structured_outputs import StructuredOutputs
from asyncengine.version import VERSION

__version__ = VERSION

__all__ = [
    "AsyncEngine",
    "AsyncEngineError",
    "BlockMap",
    "ChatMessage",
    "ClassificationOutput",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "ContinuationScore",
    "Conversation",
    "DebugStats",
    "EmbeddingOutput",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineOverloadedError",
    "EngineSnapshot",
    "EngineStats",
    "FinishReason",
    "Finished",
    "InternalError",
    "InvalidRequestError",
    "KVCapacityError",
    "LogProb",
    "LogitsProcessorError",
    "MissingWeightError",
    "ModelError",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "PairScores",
    "RequestAbortedError",
    "RequestDelta",
    "RequestOutput",
    "RequestStream",
    "RequestTimeoutError",
    "RequestTiming",
    "SamplingParams",
    "StepFailedError",
    "StepRecord",
    "StructuredOutputs",
    "TokenLogProbs",
    "UnsupportedModelError",
    "Usage",
    "UsageError",
    "WakeRecord",
    "WeightMismatchError",
    "WrongLoopError",
    "bundled_model",
]

show_fields(SamplingParams, StructuredOutputs, Conversation, EngineConfig)
