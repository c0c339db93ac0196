"""Listening, loading, draining: the life of a server process, without its signals."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web

from asyncengine.errors import EngineDeadError
from asyncengine.server.app import App
from asyncengine.server.config import ServerConfig
from asyncengine.server.connection import Connection, Watch
from asyncengine.server.engine_api import Engine
from asyncengine.server.example import example_request
from asyncengine.server.kv_events import published

if TYPE_CHECKING:
    from asyncengine.server.tls import Handshakes

logger = logging.getLogger("asyncengine.server")

_BACKLOG = 2048
_LOG_INTERVAL_S = 10.0
_DEATH_CHECK_S = 0.5
_DEATH_DRAIN_S = 2.0
_CUT_TIMEOUT_S = 2.0


class _Server(web.Server):
    """aiohttp's connection factory for ``Connection``."""

    def __init__(self, app: App, handshakes: Handshakes | None) -> None:
        # Without cancellation, a request whose client left would run to its end.
        super().__init__(self._handle, handler_cancellation=True)
        self._app = app
        self._handshakes = handshakes
        self.watch = Watch(self)

    def __call__(self) -> web.RequestHandler:
        config = self._app.config
        connection = Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,
            auto_decompress=False,  # on the event loop, and before anybody has looked at the API key
            keepalive_timeout=config.keep_alive_s,
            watch=self.watch,
            read_timeout_s=config.read_timeout_s,
            unacknowledged_s=config.write_timeout_s,
        )
        # aiohttp hands what this returns to the event loop, and does nothing else with it.
        return connection if self._handshakes is None else self._handshakes.begin(connection)  # type: ignore[return-value]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.begin(request)
        response = await self._app.handle(request)
        await connection.finish(response)
        return response


async def _check_unused(path: str) -> None:
    """Raises OSError if somebody listens there, whose socket a second server would put its own in place of."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return  # there is none, or it is left over
    writer.close()
    raise OSError(errno.EADDRINUSE, "address already in use: another server listens there", path)


class HttpServer:
    """An App behind a listening socket."""

    def __init__(self, config: ServerConfig) -> None:
        self.app = App(config)
        self._config = config
        self._handshakes: Handshakes | None = None
        if config.ssl_certfile is not None:
            from asyncengine.server.tls import Certificates, Handshakes

            self._handshakes = Handshakes(Certificates(config.ssl_certfile, config.ssl_keyfile))
        self._server = _Server(self.app, self._handshakes)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=_CUT_TIMEOUT_S)

    async def start(self) -> None:
        """Listen. Raises OSError, for one when the port or the socket is taken."""
        await self._runner.setup()
        site: web.BaseSite
        try:
            if self._config.uds is not None:
                await _check_unused(self._config.uds)
                site = web.UnixSite(self._runner, self._config.uds, backlog=_BACKLOG)
            else:
                host, port = self._config.host, self._config.port
                site = web.TCPSite(self._runner, host, port, backlog=_BACKLOG)
            await site.start()
            if self._config.uds is not None and self._config.uds_mode is not None:
                os.chmod(self._config.uds, int(self._config.uds_mode, 8))
        except BaseException:
            await self.aclose()
            raise

    @property
    def url(self) -> str:
        """Address on which the server listens; with port 0 it has the port that was taken."""
        if self._config.uds is not None:
            return f"unix:{self._config.uds}"
        host, port = self._runner.addresses[0][:2]
        scheme = "http" if self._handshakes is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def drain(self) -> bool:
        """Refuse new requests with 503 and let running ones finish; False when the time ran out.

        The socket stays open meanwhile: load balancers see /health turn 503, and nobody is reset.
        """
        self.app.draining = True
        try:
            async with asyncio.timeout(self._config.shutdown_timeout_s):
                await self.app.idle()
        except TimeoutError:
            return False
        return True

    async def aclose(self) -> None:
        """Stop listening and cut what is left."""
        try:
            await self._runner.cleanup()
        finally:
            if self._handshakes is not None:
                self._handshakes.close()
            self._server.watch.close()


async def serve(config: ServerConfig, load: Callable[[], Awaitable[Engine]], stop: asyncio.Event) -> None:
    """Listen, load the engine, serve until ``stop`` is set, drain, close.

    The port opens before the model is loaded, so that /health can say so. Raises what ``load`` raises,
    OSError when the address cannot be bound, and EngineDeadError if the engine dies and ``exit_on_death`` is set.
    """
    server = HttpServer(config)
    await server.start()
    try:
        logger.info("listening on %s, loading the model", server.url)
        started = time.monotonic()
        server.app.engine = engine = await load()
        try:
            await _serve_until(stop, server, engine, config, started)
        finally:
            # Aborts what still runs, so that its streams end with an error event and are cut.
            await engine.aclose(drain=False)
    finally:
        await server.aclose()
    logger.info("stopped")


async def _serve_until(
    stop: asyncio.Event, server: HttpServer, engine: Engine, config: ServerConfig, started: float
) -> None:
    """Serve with a loaded engine until ``stop`` is set, then drain. Raises EngineDeadError."""
    async with published(config, engine):
        _log_ready(server, engine, time.monotonic() - started)
        await _until(stop, engine, config.exit_on_death)
        if not stop.is_set():
            logger.critical("the engine is dead: the process ends, so that a supervisor can start it anew")
            with suppress(TimeoutError):
                async with asyncio.timeout(_DEATH_DRAIN_S):
                    await server.app.idle()
            raise EngineDeadError("the engine is dead")
        logger.info("shutting down: running requests get %g s to finish", config.shutdown_timeout_s)
        if not await server.drain():
            logger.warning("cutting the requests that are still running")


def _log_ready(server: HttpServer, engine: Engine, seconds: float) -> None:
    info = engine.model_info
    logger.info(
        "model %s: %s, %.1f M parameters, %s, on %s, loaded in %.1f s",
        server.app.model_name, info.architecture, info.num_parameters / 1e6, info.dtype, info.device_label, seconds,
    )  # fmt: skip
    logger.info(
        "KV cache: %d tokens, %.1f sequences of the full context of %d tokens",
        info.kv_capacity_tokens, info.kv_capacity_sequences, info.max_model_len,
    )  # fmt: skip
    if info.states_in_words:
        logger.info("states: %s", info.states_in_words)
    needs_key = bool(server.app.config.api_keys)
    example = example_request(server.url, server.app.model_name, engine, needs_key=needs_key)
    logger.info("ready on %s", server.url)
    logger.info("a request to try:\n%s", example)


async def _until(stop: asyncio.Event, engine: Engine, exit_on_death: bool) -> None:
    """Wait for ``stop``, or for the engine's death; meanwhile log the load every ten seconds in which there was any."""
    before, then = engine.stats(), time.monotonic()
    while not (exit_on_death and engine.health == "dead"):
        try:
            async with asyncio.timeout(_DEATH_CHECK_S):
                await stop.wait()
                return
        except TimeoutError:
            pass
        now = time.monotonic()
        if now - then < _LOG_INTERVAL_S:
            continue
        after = engine.stats()
        prompt = (after.prompt_tokens - before.prompt_tokens) / (now - then)
        generated = (after.generation_tokens - before.generation_tokens) / (now - then)
        if prompt or generated or after.num_requests_running or after.num_requests_waiting:
            logger.info(
                "running %d, waiting %d, prompt %.0f tokens/s, generation %.0f tokens/s, KV cache %.0f%%",
                after.num_requests_running, after.num_requests_waiting,
                prompt, generated, 100 * after.kv_cache_usage,
            )  # fmt: skip
        before, then = after, now
