"""A client's connection: aiohttp's, with an eye on clients that leave in an unusual way.

aiohttp learns that a client has gone from reading the end of its data. Two kinds of clients escape it. A client that
pipelines more than the server wants to hold is not read from while its request runs. A client that ends its own data
(``shutdown(SHUT_WR)``, ``nc -N``) may still wait for the answer, or may have closed altogether: both look the same.
``Watch`` tells them apart. It writes something that a waiting client skips, and the kernel of a client that has gone
answers that with a reset.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader

from asyncengine.server.errors import ApiError

logger = logging.getLogger("asyncengine.server")

_SEND_BUFFER = 128 * 1024
_PROBE_INTERVAL_S = 0.5
_LINGER_S = 10.0
_DISCARD_S = 2.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(web.RequestHandler):
    """aiohttp's connection with error responses in OpenAI's shape."""

    __slots__ = (
        "_broken", "_descriptor", "_ended", "_half_closed", "_newest", "_unacknowledged_ms", "_unanswered", "_watch",
        "ping",
    )  # fmt: skip

    def __init__(self, *args: Any, watch: Watch, read_timeout_s: float, unacknowledged_s: float, **kwargs: Any) -> None:
        super().__init__(*args, lingering_time=min(_LINGER_S, read_timeout_s), **kwargs)
        self._watch = watch
        self._unacknowledged_ms = int(unacknowledged_s * 1000)
        self._descriptor = -1
        self._newest: StreamReader | None = None  # the body of the last request that began to arrive
        self._unanswered = 0  # requests
        self._ended = False  # whatever may still arrive is no request
        self._half_closed = False
        self._broken = False  # the last request's body is malformed
        self.ping: bytes | None = None
        """While a response of server-sent events runs: an event that clients skip."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        self._descriptor = sock.fileno()
        # The kernel would take 4 MiB for a client that does not read, and hide from us that it does not.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
            # A client whose machine vanished acknowledges nothing and would hold its request for
            # the quarter of an hour that TCP retransmits by default.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._unacknowledged_ms)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._watch.remove(self, self._descriptor)
        super().connection_lost(exc)
        self._newest = None  # it refers to this connection

    @property
    def ends(self) -> bool:
        """True if the request that runs is the last of this connection."""
        return self._ended and not self._messages

    def begin(self, request: web.BaseRequest) -> None:
        """Begin a request. To be called when its handler starts."""
        self.ping = None
        if self._half_closed:
            if self._cannot_be_probed(request):
                self.force_close()
                return
            if self.ends:
                self.close()  # when the request is done
            self.probe()

    async def finish(self, response: web.StreamResponse) -> None:
        """End a request. To be called when ``response`` has been sent, before the connection is closed or serves its
        next request."""
        self._unanswered -= 1
        if self._broken or self._half_closed or response.status == HTTPStatus.REQUEST_TIMEOUT:
            self._lingering_time = 0.0  # the rest of the body will not come, or has had its time
        transport = self.transport
        if self._broken and not self._half_closed and transport is not None and not transport.is_closing():
            # The reset that a close causes while the client is still sending would take the response with it.
            if transport.can_write_eof():  # which TLS cannot
                transport.write_eof()
            transport.resume_reading()
            await asyncio.sleep(_DISCARD_S)  # unless it closes, which cancels this task

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        before = len(self._messages)
        super().data_received(data)
        while self._upgraded:  # to a protocol that nobody speaks here: the rest is requests as before
            assert self._parser is not None
            self._parser.set_upgraded(False)
            self._upgraded = False
            data, self._message_tail = self._message_tail, b""
            super().data_received(data)
        if len(self._messages) > before:
            self._unanswered += len(self._messages) - before
            self._look_at(*self._messages[-1])

    def _look_at(self, message: object, payload: StreamReader) -> None:
        """The newest message is a request that may still lack its body, or a note that what came is malformed."""
        if isinstance(message, RawRequestMessage):
            self._newest = payload
            return
        self._ended = True
        if self.transport is not None:
            self.transport.pause_reading()
        if self._newest is not None and not self._newest.is_eof():
            # The malformed part is the body of a request that has its handler, which answers.
            self._messages.pop()
            self._unanswered -= 1
            self._broken = True
            self._fail_body("it is malformed")

    def _fail_body(self, reason: str) -> None:
        """The newest request gets no more of its body."""
        assert self._newest is not None
        if self._unanswered:
            self._newest.set_exception(web.RequestPayloadError(reason))
        elif self.transport is not None:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's closes always
        """Keep the connection for the answers that the client may wait for. False closes it.

        TLS knows no half-closed connections here: a client that ends its data gets no answer.
        """
        transport = self.transport
        if not self._unanswered or not self._watch.works or transport is None or not transport.can_write_eof():
            return False
        request = self._current_request
        if request is not None and self._cannot_be_probed(request):
            return False
        self._ended = self._half_closed = True
        if self._newest is not None and not self._newest.is_eof():
            self._fail_body("the client closed the connection before its end")
        if not self._messages:
            self.close()
        self.probe()
        return True

    def _cannot_be_probed(self, request: web.BaseRequest) -> bool:
        """HTTP/1.0 has nothing that may precede a response.

        Proxies speak it and close when their client has left. A generation must not run on for nobody.
        """
        return request.version < HttpVersion11 and request.method == "POST" and self.ping is None

    @property
    def suspect(self) -> bool:
        """True if a request runs for a client whose leaving would not be noticed."""
        transport = self.transport
        if self._current_request is None or transport is None or transport.is_closing():
            return False
        return self._half_closed or not transport.is_reading()

    def probe(self) -> None:
        """Write something that the client skips, and have the reset noticed that may come back."""
        request, transport = self._current_request, self.transport
        if request is None or transport is None or transport.is_closing():
            return
        self._watch.add(self, self._descriptor)
        if transport.get_write_buffer_size():
            return  # what is under way serves as well, and a client that does not read must not fill the memory
        if self.ping is not None:
            transport.write(self.ping)
        elif not request.writer.output_size and request.version >= HttpVersion11 and request.content.is_eof():
            transport.write(_CONTINUE)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to HTTP that does not parse, and the last resort for a fault of the server."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; the connection must be cut")
        if status >= 500:
            logger.error("%s %s failed", request.method, request.path, exc_info=exc)
            message = "internal server error"
        else:
            reason = message.splitlines()[0] if message else "malformed"
            message = f"the request is not valid HTTP: {reason}"
        response = ApiError(status, message).response()
        response.force_close()
        return response


class Watch:
    """Cuts connections that the other side has reset, and probes those where nothing else would show it."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, Connection] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            self._loop.add_reader(self._epoll.fileno(), self._cut)
            self._timer = self._loop.call_later(_PROBE_INTERVAL_S, self._probe)

    @property
    def works(self) -> bool:
        """True if this platform reports a reset without reading."""
        return self._epoll is not None

    def add(self, connection: Connection, descriptor: int) -> None:
        """Cut ``connection`` as soon as its client has closed both directions."""
        if self._epoll is None or self._connections.get(descriptor) is connection:
            return
        self._connections[descriptor] = connection
        self._epoll.register(descriptor, select.EPOLLONESHOT)  # errors and hang-ups are always reported

    def remove(self, connection: Connection, descriptor: int) -> None:
        """Forget a connection that is closed."""
        if self._connections.get(descriptor) is connection:  # another one may have the number by now
            del self._connections[descriptor]

    def close(self) -> None:
        if self._epoll is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _cut(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0):
            connection = self._connections.pop(descriptor, None)
            if connection is not None and connection.transport is not None:
                connection.transport.abort()

    def _probe(self) -> None:
        for connection in self._server.connections:
            assert isinstance(connection, Connection)
            if connection.suspect:
                connection.probe()
        self._timer = self._loop.call_later(_PROBE_INTERVAL_S, self._probe)
