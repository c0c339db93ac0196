"""A request that works as it stands, for the log of a server that has just started."""

from __future__ import annotations

import json
import shlex
from typing import Any

from asyncengine.errors import ConfigError
from asyncengine.server.engine_api import Engine

_EVERY_INTERFACE = {"http://0.0.0.0:": "http://127.0.0.1:", "http://[::]:": "http://[::1]:"}


def example_request(url: str, model_name: str, engine: Engine, *, needs_key: bool) -> str:
    """A command line with curl. The key is expected in ASYNCENGINE_API_KEY, as ``asyncengine serve`` expects it."""
    words = ["curl"]
    if url.startswith("unix:"):
        words += ["--unix-socket", shlex.quote(url.removeprefix("unix:"))]
        url = "http://localhost"
    for everywhere, here in _EVERY_INTERFACE.items():
        if url.startswith(everywhere):
            url = here + url.removeprefix(everywhere)
    path, fields = _question(engine)
    words += [f"{url}/v1/{path}", "-H 'Content-Type: application/json'"]
    if needs_key:
        words.append('-H "Authorization: Bearer $ASYNCENGINE_API_KEY"')
    body = json.dumps({"model": model_name} | fields, ensure_ascii=False)
    return f"{' '.join(words)} -d {shlex.quote(body)}"


def _question(engine: Engine) -> tuple[str, dict[str, Any]]:
    try:
        has_chat_template = engine.tokenizer.has_chat_template
    except ConfigError:  # skip_tokenizer_init
        return "completions", {"prompt": [0, 1, 2], "max_tokens": 16}
    if has_chat_template:
        return "chat/completions", {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64}
    return "completions", {"prompt": "Once upon a time", "max_tokens": 64}
