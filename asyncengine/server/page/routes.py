"""The page at /: a chat, and a view of the engine at work. Its files need no build and load nothing from elsewhere.

The files are public, their data is not: what the page asks for needs an API key like every other route. A page asks for
figures while it can be seen. Each answer has the engine record a few steps for the next one, and that is all it costs.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib import resources

import msgspec
from aiohttp import web

from asyncengine.server.engine_api import Engine
from asyncengine.server.metrics import Metrics
from asyncengine.server.page.figures import Unready, figures, model

Handler = Callable[[web.BaseRequest, dict[str, str]], Awaitable[web.StreamResponse]]

FILES = {
    "/": "index.html",
    **{
        f"/page/{name}": name
        for name in (
            "page.css", "icon.svg",
            "main.js", "api.js", "chat.js", "tree.js", "store.js", "message.js", "list.js", "settings.js",
            "markdown.js", "highlight.js", "math.js", "engine.js", "draw.js", "strip.js",
        )
    },
}  # fmt: skip
"""Names of the files by their paths."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FOLDER = resources.files("asyncengine.server.page").joinpath("static")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_FILE_HEADERS = _HEADERS | {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask, and mostly hear 304
    "Vary": "Accept-Encoding",
}
_TAKES_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    content_type: str
    etag: str


class Page:
    """The page's routes. ``engine`` answers None until the model is loaded."""

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        model_name: Callable[[], str],
        health: Callable[[], str],
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._model_name = model_name
        self._health = health
        self._metrics = metrics
        self._files: dict[tuple[str, str], File] = {}
        """Files that were asked for, by name and content encoding."""
        self.public = frozenset(FILES)
        """The paths that need no API key."""
        self.routes: dict[str, tuple[str, Handler]] = {
            **{path: ("GET", partial(self._file, name)) for path, name in FILES.items()},
            "/page/model": ("GET", self._model),
            "/page/stats": ("GET", self._stats),
        }

    async def _file(self, name: str, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        encoding = "gzip" if _TAKES_GZIP.search(request.headers.get("Accept-Encoding", "")) else ""
        file = self._files.get((name, encoding)) or self._read(name, encoding)
        about = _FILE_HEADERS | {"ETag": file.etag}
        if file.etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]:
            return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=about)
        if encoding:
            about["Content-Encoding"] = encoding
        return web.Response(body=file.body, headers=about, content_type=file.content_type, charset="utf-8")

    def _read(self, name: str, encoding: str) -> File:
        body = _FOLDER.joinpath(name).read_bytes()
        if encoding:
            body = gzip.compress(body, mtime=0)
        etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        file = self._files[name, encoding] = File(body, _TYPES[name.rpartition(".")[2]], etag)
        return file

    async def _model(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        health, engine = self._health(), self._engine()
        if engine is None or health == "closed":
            return _json(Unready(health))
        return _json(model(health, self._model_name(), engine))

    async def _stats(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        health, engine = self._health(), self._engine()
        if engine is None or health == "closed":
            return _json(Unready(health))
        return _json(figures(health, engine.snapshot(), self._metrics))


def _json(value: msgspec.Struct) -> web.Response:
    headers = _HEADERS | {"Cache-Control": "no-store"}
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=headers)
