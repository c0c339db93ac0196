"""asyncengine: an LLM inference engine that lives inside one asyncio process."""

from asyncengine._core import BlockChange, BlockMap, StepRecord
from asyncengine.api.conversation import Conversation
from asyncengine.api.field_docs import show_fields
from asyncengine.api.logprobs import LogProb, TokenLogProbs
from asyncengine.api.outputs import (
    ClassificationOutput,
    CompletionOutput,
    ContinuationScore,
    EmbeddingOutput,
    Finished,
    FinishReason,
    PairScores,
    RequestDelta,
    RequestOutput,
    RequestTiming,
    Usage,
)
from asyncengine.api.request import ChatMessage, SamplingParams
from asyncengine.api.stats import DebugStats, EngineLoad, EngineSnapshot, EngineStats, WakeRecord
from asyncengine.api.structured_outputs import StructuredOutputs
from asyncengine.bundled import path as bundled_model
from asyncengine.config import EngineConfig
from asyncengine.engine.data_parallel import DataParallelEngine
from asyncengine.engine.engine import AsyncEngine
from asyncengine.engine.stream import RequestStream
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
from asyncengine.version import VERSION

__version__ = VERSION

__all__ = [
    "AsyncEngine",
    "AsyncEngineError",
    "BlockChange",
    "BlockMap",
    "ChatMessage",
    "ClassificationOutput",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "ContinuationScore",
    "Conversation",
    "DataParallelEngine",
    "DebugStats",
    "EmbeddingOutput",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineLoad",
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
