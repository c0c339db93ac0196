"""/docs: a page that shows /openapi.json and sends requests to its routes. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from aiohttp import web


def docs_page() -> web.Response:
    """The page, whose policy lets nothing run but its own script and style, which it names by their hashes."""
    body = resources.files("asyncengine.server").joinpath("docs.html").read_bytes()
    script, style = (_hash(body, tag) for tag in (b"script", b"style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)


def _hash(body: bytes, tag: bytes) -> str:
    found = re.search(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'"
