"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
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
    RequestTimeoutError,
)

logger = logging.getLogger("asyncengine.server")

RETRY_AFTER = {"Retry-After": "1"}
SERVER = {"Server": "asyncengine"}  # on every response: without it, aiohttp names its version and Python's
#: Types of errors by status; other errors are the request's, or the server's.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
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
        details: dict[str, object] | None = None,
    ) -> None:
        """With ``close``, the connection is closed after the response. ``details``: for clients of /v1/messages."""
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + " …"
        self.param = param
        self.code = code
        self.headers = SERVER | (headers or {})
        self.close = close
        self.details = details

    @property
    def type(self) -> str:
        if self.status < 500:
            return "invalid_request_error"
        return "service_unavailable" if self.status == HTTPStatus.SERVICE_UNAVAILABLE else "server_error"

    def message_for(self, request_id: str) -> str:
        """Return the message for a client. A fault of the server names the request, by which the server's log says
        more."""
        if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR and request_id:
            return f"{self.message} (request id {request_id})"
        return self.message

    def body(self, request_id: str = "") -> bytes:
        """The JSON document."""
        fields = {"message": self.message_for(request_id), "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})

    def anthropic_body(self, request_id: str = "") -> bytes:
        """The JSON document for clients of /v1/messages."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        fields: dict[str, object] = {"type": kind, "message": self.message_for(request_id)}
        if self.details is not None:
            fields["details"] = self.details
        return msgspec.json.encode({"type": "error", "error": fields, "request_id": request_id})

    def response(self, request_id: str = "", *, anthropic: bool = False) -> web.Response:
        body = self.anthropic_body(request_id) if anthropic else self.body(request_id)
        response = web.Response(status=self.status, body=body, content_type="application/json", headers=self.headers)
        if self.close:
            response.force_close()
        return response


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def unavailable(message: str, code: str, *, close: bool = False) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, headers=RETRY_AFTER, close=close)


def from_engine(exc: Exception) -> ApiError | None:
    """The response for an exception of asyncengine.errors; None for one that nobody foresaw.

    Details of a fault inside the engine are for the log: clients get a fixed text.
    """
    match exc:
        case ContextLengthError():
            return bad_request(str(exc), exc.param, "context_length_exceeded")
        case KVCapacityError():
            return bad_request(str(exc), exc.param, "kv_capacity_exceeded")
        case InvalidRequestError():
            return bad_request(str(exc), exc.param)
        case EngineOverloadedError():
            return unavailable("the server is overloaded, its queue is full; try again later", "overloaded")
        case EngineClosedError():
            return unavailable("the server is shutting down", "closed")
        case RequestAbortedError():
            return unavailable("the request was aborted", "aborted")
        case RequestTimeoutError():
            return ApiError(HTTPStatus.GATEWAY_TIMEOUT, str(exc), param="timeout", code="timeout")
        case EngineDeadError():
            return _internal("the engine has failed and must be restarted", "engine_dead")
        case EngineError():
            return _internal("the engine failed on this request", "engine_error")
    return None


def failure(exc: Exception, request_id: str) -> ApiError:
    """The response for any exception that ends a request; the log gets what it does not say."""
    error = exc if isinstance(exc, ApiError) else from_engine(exc)
    if error is None:
        logger.error("request %s failed", request_id, exc_info=exc)
        return _internal("internal server error")
    if error is not exc and error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        level = logging.ERROR if error.status == HTTPStatus.INTERNAL_SERVER_ERROR else logging.INFO
        logger.log(level, "request %s failed: %s: %s", request_id, type(exc).__name__, exc)
    return error


def _internal(message: str, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code=code)
