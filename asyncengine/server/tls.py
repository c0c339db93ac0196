"""TLS with certificates that are read again when their files have changed."""

from __future__ import annotations

import logging
import os
import ssl

from asyncengine.errors import ConfigError

logger = logging.getLogger("asyncengine.server")


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
