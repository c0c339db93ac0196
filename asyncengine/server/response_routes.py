"""The routes of stored responses: to read one, its items page by page, to forget it, and to cancel it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from asyncengine.api.checks import quoted
from asyncengine.server.errors import ApiError, bad_request
from asyncengine.server.protocol import unsupported
from asyncengine.server.response_store import OwnResponses, StoredResponse

RESPONSE = "/v1/responses/"
"""Beginning of the paths of stored responses: the id follows, and then nothing or one of PARTS."""
_INPUT_ITEMS, _CANCEL = PARTS = ("/input_items", "/cancel")
Handler = Callable[[web.BaseRequest, dict[str, str]], Awaitable[web.StreamResponse]]
_DEFAULT, _MOST = 20, 100  # items of a page


class ItemList(msgspec.Struct, kw_only=True):
    """A page."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _Identified(msgspec.Struct):
    id: str


def page_of(stored: StoredResponse, query: Mapping[str, str]) -> ItemList:
    """The page that ``query`` (limit, order, after) asks for. Raises ApiError 400."""
    limit, order, after = query.get("limit", str(_DEFAULT)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= _MOST):
        raise bad_request(f"limit must be in [1, {_MOST}], got {quoted(limit)}", "limit")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {quoted(order)}", "order")
    items = stored.inputs if order == "asc" else stored.inputs[::-1]
    ids = [msgspec.json.decode(item, type=_Identified).id for item in items]
    if after is not None and after not in ids:
        raise bad_request(f"after: the response has no item {quoted(after)}", "after")
    first = 0 if after is None else ids.index(after) + 1
    last = first + int(limit)
    return ItemList(
        data=[msgspec.json.decode(item, type=dict) for item in items[first:last]],
        first_id=ids[first] if first < len(ids) else None,
        last_id=ids[first:last][-1] if first < len(ids) else None,
        has_more=last < len(ids),
    )


class StoredResponses:
    """Handlers, and their place in a table of routes."""

    def __init__(
        self, own: Callable[[web.BaseRequest], OwnResponses], path_of: Callable[[web.BaseRequest], str]
    ) -> None:
        """``own``: those that the client of a request may see. ``path_of``: the path that a request asks for."""
        self._own = own
        self._path_of = path_of
        self.routes: dict[str, tuple[str, Handler]] = {
            RESPONSE: ("GET, DELETE", self._response),
            RESPONSE + _INPUT_ITEMS: ("GET", self._input_items),
            RESPONSE + _CANCEL: ("POST", self._cancel),
        }

    async def _response(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        if request.query.get("stream", "false") != "false":
            raise unsupported("stream")
        response_id, stored = self._found(request, "")
        if request.method != "DELETE":
            return web.Response(body=stored.document, content_type="application/json")
        self._own(request).pop(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def _input_items(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        _, stored = self._found(request, _INPUT_ITEMS)
        return _json(page_of(stored, request.query))

    async def _cancel(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        """Refuse to cancel: only a response in the background can be cancelled, and none is made there."""
        self._found(request, _CANCEL)
        raise bad_request("a response that was not made in the background cannot be cancelled", "response_id")

    def _found(self, request: web.BaseRequest, part: str) -> tuple[str, StoredResponse]:
        """Id and response of a path that ends with ``part``. Raises ApiError 404."""
        response_id = self._path_of(request).removeprefix(RESPONSE).removesuffix(part)
        stored = self._own(request).get(response_id)
        if stored is None:
            wrong = f"there is no stored response {quoted(response_id)}"
            raise ApiError(404, wrong, param="response_id", code="not_found")
        return response_id, stored


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
