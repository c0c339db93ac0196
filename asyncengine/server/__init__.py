"""An OpenAI-compatible HTTP server in front of the public engine API.

    from asyncengine.server import create_app

    program = web.Application()
    program.add_subapp("/llm", create_app(engine))

``create_app`` gives the routes as an aiohttp application, ``asgi_app`` as an ASGI application.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncengine.server.asgi import asgi_app
    from asyncengine.server.config import ServerConfig
    from asyncengine.server.mounting import create_app

__all__ = ["ServerConfig", "asgi_app", "create_app"]


_MODULES = {"ServerConfig": "config", "asgi_app": "asgi", "create_app": "mounting"}


def __getattr__(name: str) -> object:
    """Import aiohttp only for a program that mounts the routes."""
    if name not in _MODULES:
        raise AttributeError(f"module 'asyncengine.server' has no attribute {name!r}")
    return getattr(import_module(f"asyncengine.server.{_MODULES[name]}"), name)
