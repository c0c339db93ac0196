"""Keywords of engine and server: a configuration, or ConfigError."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError
from asyncengine.server.config import ServerConfig
from tests.fuzz.source import Source

WORDS = ("auto", "cpu", "cuda", "dummy", "float32", "bfloat16", "fp8", "none", "pinned", "ahead", "loop", "sdpa")


def one_input(data: bytes) -> None:
    source = Source(data)
    kind = source.pick((EngineConfig, ServerConfig))
    names = [field.name for field in dataclasses.fields(kind) if field.name != "model"]
    keywords: dict[str, Any] = {}
    for _ in range(source.integer(0, 8)):
        name = source.text() if kind is EngineConfig and source.byte() % 8 == 7 else source.pick(names)
        keywords[name] = source.pick(WORDS) if source.byte() % 4 == 3 else source.value()
    with suppress(ConfigError):
        if kind is EngineConfig:
            assert EngineConfig.from_kwargs("model", keywords).num_threads >= 1
        else:
            ServerConfig(**keywords)
