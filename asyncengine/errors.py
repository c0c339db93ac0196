"""Every exception that asyncengine raises on purpose.

AsyncEngineError
├── ConfigError (ValueError)            a configuration keyword is unknown, out of range or contradictory
├── ModelError                          the model directory cannot be used
│   ├── ModelNotFoundError              no such directory, and no such repository on the hub
│   ├── UnsupportedModelError           an architecture or option that is not implemented
│   ├── MissingWeightError              a shard or a tensor is not there
│   └── WeightMismatchError             a tensor has another shape or dtype than the config says
├── InvalidRequestError (ValueError)    the request is wrong; raised before anything is allocated
│   ├── ContextLengthError              prompt, or prompt + max_tokens, exceeds the context
│   └── KVCapacityError                 the request can never fit in the KV cache of this engine
├── EngineError                         the request was fine, the engine could not serve it
│   ├── EngineOverloadedError           the queue is full; try again later
│   ├── RequestAbortedError             somebody else aborted the request
│   ├── RequestTimeoutError             its timeout passed before it had a token
│   ├── NonFiniteLogitsError            the model computed no probabilities for this request
│   ├── StepFailedError                 one step failed, and with it the requests that were part of it
│   ├── EngineClosedError               submitted after aclose(), or before the engine was started
│   ├── EngineDeadError                 the executor failed or hung; every request of the engine fails
│   └── InternalError                   a fault of asyncengine itself: please report it
└── UsageError (RuntimeError)           the program around the engine calls what it may not call there or then
    ├── LogitsProcessorError            a logits_processor raised, or left no logits to draw from
    └── WrongLoopError                  called from another event loop than the one that started the engine
"""

from __future__ import annotations


class AsyncEngineError(Exception):
    """Root of the tree."""


class ConfigError(AsyncEngineError, ValueError):
    """A configuration keyword is unknown, out of range or contradicts another one."""


class ModelError(AsyncEngineError):
    """The model directory cannot be used."""


class ModelNotFoundError(ModelError):
    """There is no such local directory, and the hub could not supply it."""


class UnsupportedModelError(ModelError):
    """config.json asks for an architecture or an option that is not implemented."""


class MissingWeightError(ModelError):
    """A shard named by the index, or a tensor that the architecture needs, is not there."""


class WeightMismatchError(ModelError):
    """A tensor has another shape or dtype than config.json implies."""


class InvalidRequestError(AsyncEngineError, ValueError):
    """The request is wrong. ``param`` names the offending parameter where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt and max_tokens together, exceed the model's context."""


class KVCapacityError(InvalidRequestError):
    """The request needs more KV blocks than the whole pool has."""


class EngineError(AsyncEngineError):
    """The request was fine; the engine could not serve it."""


class EngineOverloadedError(EngineError):
    """The queue of waiting requests or tokens is full."""


class RequestAbortedError(EngineError):
    """The request was aborted by another caller than the one that waits for it."""


class RequestTimeoutError(EngineError):
    """The request's own timeout passed before it had a token; with tokens, it ends with what it has."""


class NonFiniteLogitsError(EngineError):
    """The model's logits for this request were not finite: there was nothing to sample from."""


class StepFailedError(EngineError):
    """The step that computed this request failed; its log says how. Other requests and the engine go on."""


class EngineClosedError(EngineError):
    """The engine is not accepting requests: not started, draining or closed."""


class EngineDeadError(EngineError):
    """The executor failed or hung; the message says how. The engine must be created anew."""


class InternalError(EngineError):
    """A fault of asyncengine itself: neither the request nor the program is to blame. Please report it."""


class UsageError(AsyncEngineError, RuntimeError):
    """The program calls what it may not call there or then: a mistake in its code, not in the request's values."""


class LogitsProcessorError(UsageError):
    """A logits_processor raised (``__cause__``), took too long, or left no logits to draw from.

    It ends its own request alone.
    """


class WrongLoopError(UsageError):
    """An engine belongs to the event loop that started it; another loop called it."""
