"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from aiohttp import web

from asyncengine.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    KVCapacityError,
    RequestAbortedError,
)

RETRY_AFTER = {"Retry-After": "1"}
SERVER = {"Server": "asyncengine"}  # on every response: without it, aiohttp names its version and Python's
_MAX_MESSAGE = 1000  # characters; an error does not send back all that a client sent


class ApiError(Exception):
    """An error with everything its HTTP response needs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        close: bool = False,
    ) -> None:
        """With ``close``, the connection is closed after the response."""
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + " …"
        self.param = param
        self.code = code
        self.headers = SERVER | (headers or {})
        self.close = close

    @property
    def type(self) -> str:
        if self.status < 500:
            return "invalid_request_error"
        return "service_unavailable" if self.status == HTTPStatus.SERVICE_UNAVAILABLE else "server_error"

    def body(self) -> bytes:
        """The JSON document."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})

    def response(self) -> web.Response:
        response = web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=self.headers
        )
        if self.close:
            response.force_close()
        return response


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def unavailable(message: str, code: str, *, close: bool = False) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, headers=RETRY_AFTER, close=close)


def from_engine(exc: Exception) -> ApiError | None:
    """The response for an exception of asyncengine.errors; None for one that nobody foresaw."""
    match exc:
        case ContextLengthError():
            return bad_request(str(exc), exc.param, "context_length_exceeded")
        case KVCapacityError():
            return bad_request(str(exc), exc.param, "kv_capacity_exceeded")
        case InvalidRequestError():
            return bad_request(str(exc), exc.param)
        case EngineOverloadedError():
            return unavailable(str(exc), "overloaded")
        case EngineClosedError():
            return unavailable(str(exc), "closed")
        case RequestAbortedError():
            return unavailable(str(exc), "aborted")
        case EngineDeadError():
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(exc), code="engine_dead")
        case EngineError():
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(exc), code="engine_error")
    return None
