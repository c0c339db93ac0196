"""TLS: certificates that are read again when their files have changed, and limits of handshakes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from typing import cast

from asyncengine.errors import ConfigError

logger = logging.getLogger("asyncengine.server")

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 256


class Certificates:
    """A certificate chain and its key, in PEM files.

    Each handshake looks whether the files have changed (two calls of stat), and then reads them: no signal, no timer,
    and connections that are open go on. Files that do not fit together, as in the middle of a renewal, are left alone
    until they change again.
    """

    def __init__(self, certfile: str, keyfile: str | None) -> None:
        """Raises ConfigError. Without ``keyfile``, the key is in ``certfile``."""
        self._files = [certfile] if keyfile is None else [certfile, keyfile]
        try:
            self._seen = self._times()
            self._current = self.context = self._read()
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            raise ConfigError(f"cannot use ssl_certfile and ssl_keyfile: {exc}") from None
        self.context.sni_callback = self._on_hello

    def _times(self) -> list[tuple[int, int]]:
        return [((found := os.stat(file)).st_mtime_ns, found.st_ino) for file in self._files]

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._files[0], self._files[-1], password=_no_password)
        context.set_alpn_protocols(["http/1.1"])
        return context

    def _on_hello(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake, also for clients that name no server."""
        try:
            times = self._times()
            if times != self._seen:
                self._seen = times
                self._current = self._read()
                logger.info("read the certificate in %s anew", self._files[0])
        except (OSError, ValueError) as exc:
            logger.error("cannot read the certificate in %s, the one before stays: %s", self._files[0], exc)
        if self._current is not self.context:
            connection.context = self._current


def _no_password() -> str:
    raise ValueError("the key is encrypted: nobody is here to type its password")


class Handshakes:
    """Handshakes under way. Each has HANDSHAKE_S seconds; the oldest one gives way where there are MAX_HANDSHAKES.

    A client that says nothing costs a descriptor for that time. An honest one needs some milliseconds, so it is not
    among the oldest, however many of the others there are.
    """

    def __init__(self, certificates: Certificates) -> None:
        self._context = certificates.context
        self._under_way: dict[Handshake, None] = {}  # in order of arrival

    def begin(self, connection: asyncio.Protocol) -> Handshake:
        """The protocol of a new transport, which ``connection`` gets when the client has proved to speak TLS."""
        return Handshake(self, connection)

    async def run(self, handshake: Handshake, accepted: socket.socket) -> None:
        """Give the client's socket to the connection, or close it if the client does not do its part."""
        if len(self._under_way) >= MAX_HANDSHAKES:
            oldest = next(iter(self._under_way))
            del self._under_way[oldest]
            oldest.cancel()
        self._under_way[handshake] = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handshake.connection, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as exc:  # also of ssl and of the limit of time
            logger.debug("a TLS handshake failed: %s", exc)
        finally:
            self._under_way.pop(handshake, None)

    def close(self) -> None:
        """End all that are under way."""
        for handshake in list(self._under_way):
            handshake.cancel()


class Handshake(asyncio.Protocol):
    """Protocol of a transport that has just been accepted. It takes the socket over before anything is read from it."""

    def __init__(self, handshakes: Handshakes, connection: asyncio.Protocol) -> None:
        self._handshakes = handshakes
        self.connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        accepted.setblocking(False)
        cast("asyncio.Transport", transport).abort()  # closes its own descriptor; the connection has the other one
        self._task = asyncio.get_running_loop().create_task(self._handshakes.run(self, accepted))

    def cancel(self) -> None:
        """Close the connection."""
        self._task.cancel()
