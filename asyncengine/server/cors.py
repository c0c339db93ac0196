"""Permission for web pages to read answers: cross-origin resource sharing, as browsers ask for it (Fetch standard,
3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiohttp import web

_EXPOSED = "X-Request-Id, Retry-After"
_MAX_AGE_S = "600"
_LONGEST_LIST = 4096


class Cors:
    """``origins`` are those of pages, as browsers send them; * for any; none: no answer has a header of CORS.

    ``methods`` are those of the routes.
    """

    def __init__(self, origins: Sequence[str], methods: Iterable[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)
        self._methods = ", ".join(sorted(methods))

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the headers for the answer to ``request``, whatever it is."""
        if not self._origins:
            return {}
        if self._any:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
        origin = request.headers.get("Origin")
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """The answer, which needs no key: browsers send none. None if this is no preflight of an allowed page."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        if "Access-Control-Allow-Origin" not in self.headers(request):
            return None
        response = web.Response(status=204)
        response.headers["Access-Control-Allow-Methods"] = self._methods
        response.headers["Access-Control-Max-Age"] = _MAX_AGE_S
        asked = request.headers.get("Access-Control-Request-Headers", "")
        if 0 < len(asked) <= _LONGEST_LIST and asked.isascii() and asked.isprintable():
            response.headers["Access-Control-Allow-Headers"] = asked
        return response
