"""One connection to a Valkey or Redis server: RESP2 with hiredis' parser and packer, and automatic pipelining.

``Connection.call`` writes a command and returns the future of its reply. An idle connection writes a call immediately;
calls made while replies are outstanding share one write. Replies are bytes, int, None or lists of these; an error reply
is raised as ``ReplyError``. When the connection is lost, every pending future gets ``ConnectionLost``, which says
whether its command had been written, and so may have been carried out.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NoReturn, cast

import hiredis

from penstock.errors import InvalidOption, StorageError, StorageRefused, StorageUnavailable
from penstock.storage.valkey.commands import Arg, ReplyError, storage_error
from penstock.storage.valkey.endpoint import Address, Endpoint

_HIGH_WATER: Final = 1 << 20
# Checked every 2.5 s, a silent connection is noticed within 15 s. That leaves a call as much time on another one.
_STALL_SECONDS: Final = 12.5
_LOOKS: Final = 5
_find_huge_list: Final = re.compile(rb"\*([0-9]{8,20})\r").search
"""Matches more elements than any real reply has: the parser allocates room for them when it reads the number."""
_find_cut_list: Final = re.compile(rb"\*[0-9]{0,20}\Z").search
_NEWLINE: Final = ord("\n")
_pack = cast(Callable[[tuple[Arg, ...]], bytes], hiredis.pack_command)


class ConnectionLost(StorageUnavailable):
    """The connection was lost before the reply came. ``sent``: the command may have been carried out. ``waited_s``:
    how long the connection was silent before it was given up."""

    def __init__(self, text: str, *, sent: bool, waited_s: float = 0.0) -> None:
        super().__init__(text)
        self.sent = sent
        self.waited_s = waited_s


class Connection(asyncio.Protocol):
    """A connection made by ``open_connection``. It belongs to the loop that made it, and is not thread-safe.

    ``ready`` is false while the connection is lost, or while the socket's buffer is full (see ``writable``). If the
    oldest reply does not come for ``stall_seconds``, the connection counts as lost.
    """

    __slots__ = (
        "__weakref__", "_closed", "_create_future", "_cut", "_gets", "_head", "_looks", "_loop", "_pending",
        "_reader", "_reason", "_resumed", "_stall_seconds", "_transport", "_unsent", "_waited_s", "_watch", "_write",
        "address", "lost", "ready",
    )  # fmt: skip

    def __init__(self, address: Address, *, stall_seconds: float | None = _STALL_SECONDS) -> None:
        self.address = address
        self.ready = False
        self.lost = False
        self._loop = asyncio.get_running_loop()
        self._create_future = self._loop.create_future
        self._reader = hiredis.Reader(replyError=ReplyError)
        self._gets = self._reader.gets
        self._cut = b""
        self._pending: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        self._write: Callable[[bytes], None] = self._refuse
        self._transport: asyncio.Transport | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._create_future()
        self._reason = ""
        self._head: asyncio.Future[Any] | None = None
        self._looks = 0
        self._waited_s = 0.0
        self._stall_seconds = stall_seconds
        self._watch: asyncio.TimerHandle | None = None

    def call(self, *command: Arg) -> asyncio.Future[Any]:
        """Send a command. Return the future of its reply, which raises ReplyError or ConnectionLost.

        You may cancel the future: its reply is then discarded. Raises ConnectionLost (not sent) immediately if the
        connection is lost.
        """
        data = _pack(command)
        pending = self._pending
        if pending:
            if not self._unsent:
                self._loop.call_soon(self._flush)
            self._unsent.append(data)
        else:
            self._write(data)
        future = self._create_future()
        pending.append(future)
        return future

    @property
    def idle(self) -> bool:
        """Return whether the connection is alive and no reply is outstanding."""
        return not self.lost and not self._pending

    def expect_silence(self) -> None:
        """Allow replies to take any time: this connection is for blocking commands."""
        self._stall_seconds = None
        if self._watch is not None:
            self._watch.cancel()

    async def writable(self) -> None:
        """Wait until the socket takes more data. Return immediately if it does, or if the connection is lost."""
        if self._resumed is not None:
            await asyncio.shield(self._resumed)

    def drop(self, reason: str) -> None:
        """Give the connection up now. Pending calls get ConnectionLost with ``reason``."""
        self._reason = self._reason or reason
        self.ready, self.lost, self._write = False, True, self._refuse
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Drop the connection, and wait until the socket is closed."""
        self.drop("closed by this client")
        if self._transport is not None:
            await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        self._write = self._transport.write
        self.ready = True
        self._look_for_stall()

    def data_received(self, data: bytes) -> None:
        if self._cut:
            data, self._cut = self._cut + data, b""
        if data[-1] != _NEWLINE and (cut := _find_cut_list(data)):
            data, self._cut = data[: cut.start()], cut[0]
        if _find_huge_list(data) is None:
            self._take(data)
        else:
            self._take_carefully(data)

    def _take_carefully(self, data: bytes) -> None:
        """Give the connection up if a huge list is announced, unless the announcement is part of a text."""
        taken = at = 0
        while (huge := _find_huge_list(data, at)) is not None:
            self._take(data[taken : huge.start()])
            taken, at = huge.start(), huge.end()
            if not self._reader.has_data():
                self.drop(
                    f"it announced a list of {huge[1].decode()} elements; is it a Valkey or Redis server?"
                )
            if self.lost:
                return
        self._take(data[taken:])

    def _take(self, data: bytes) -> None:
        """Parse the data, and answer the calls whose replies are complete."""
        gets, take = self._gets, self._pending.popleft
        try:
            self._reader.feed(data)
            while (reply := gets()) is not False:
                future = take()
                if future.done():
                    continue
                if type(reply) is ReplyError:
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except hiredis.ProtocolError:
            self.drop("it does not speak the Redis protocol; is it a TLS port, or another service?")
        except IndexError:
            self.drop(f"it sent a reply that no call waits for: {str(reply)[:200]}")

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._reason or (f"{type(exc).__name__}: {exc}" if exc else "closed by the server")
        self._reason = reason
        self.ready, self.lost, self._write = False, True, self._refuse
        written = len(self._pending) - len(self._unsent)
        self._unsent.clear()
        for index, future in enumerate(self._pending):
            if not future.done():
                lost = ConnectionLost(self._lost_text(), sent=index < written, waited_s=self._waited_s)
                future.set_exception(lost)
        self._pending.clear()
        self._head = None
        if self._watch is not None:
            self._watch.cancel()
        self.resume_writing()
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self.ready = False
        self._resumed = self._create_future()

    def resume_writing(self) -> None:
        self.ready = not self.lost
        if self._resumed is not None:
            self._resumed.set_result(None)
            self._resumed = None

    def _flush(self) -> None:
        if self._unsent and not self.lost:
            data = self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent)
            self._unsent.clear()
            self._write(data)

    def _refuse(self, data: bytes) -> NoReturn:
        raise ConnectionLost(self._lost_text(), sent=False)

    def _lost_text(self) -> str:
        return f"lost the connection to {self.address}: {self._reason or 'it is not open'}"

    def _look_for_stall(self) -> None:
        if self._stall_seconds is None:
            return
        head = self._pending[0] if self._pending else None
        self._looks = self._looks + 1 if head is not None and head is self._head else 0
        self._head = head
        if self._looks >= _LOOKS:
            self._waited_s = self._stall_seconds
            self.drop(f"no reply for {self._stall_seconds:g} s")
        else:
            self._watch = self._loop.call_later(self._stall_seconds / _LOOKS, self._look_for_stall)


async def open_connection(
    address: Address, endpoint: Endpoint, *, stall_seconds: float | None = _STALL_SECONDS
) -> Connection:
    """Connect to ``address`` and log in with the data of ``endpoint``, within its ``connect_timeout``.

    Raises StorageUnavailable, or StorageRefused if the certificate, user or password is not accepted.
    """
    loop = asyncio.get_running_loop()
    connection = Connection(address, stall_seconds=stall_seconds)
    tls = endpoint.tls.context() if endpoint.tls else None
    try:
        async with asyncio.timeout(endpoint.connect_timeout):
            if address.path:
                await loop.create_unix_connection(lambda: connection, address.path)
            else:
                transport, _ = await loop.create_connection(
                    lambda: connection, address.host, address.port, ssl=tls
                )
                _set_up(transport.get_extra_info("socket"))
            await _log_in(connection, endpoint)
    except ssl.SSLCertVerificationError as error:
        text = f"cannot trust {address}: {error.verify_message}. See ssl_ca_certs and ssl_check_hostname"
        raise StorageRefused(text) from error
    except TimeoutError as error:
        connection.drop("connect timed out")
        text = f"no answer from {address} within {endpoint.connect_timeout:g} s (connect_timeout)"
        raise StorageUnavailable(text) from error
    except BaseException as error:
        connection.drop("connect failed")
        if isinstance(error, ValueError):
            raise InvalidOption(f"{address} is not a valid address ({error}). Check the URL") from error
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageUnavailable(f"cannot connect to {address}: {_reason(error)}") from error
        raise
    return connection


def _reason(error: OSError) -> str:
    """Return why the connection failed, with the remedy for the most common causes."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused. Start the server, or check the host and the port in the URL"
    if isinstance(error, socket.gaierror):
        return "unknown host name. Check the host in the URL, or the name server"
    return str(error)


def _set_up(sock: socket.socket) -> None:
    """Turn off delays, and notice a peer that vanished in about half a minute, idle or not."""
    if sock.getsockname() == sock.getpeername():  # the kernel may give us the dead server's own port
        raise ConnectionRefusedError("connected to itself; no server listens there")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000))
    for name, value in options:
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def _log_in(connection: Connection, endpoint: Endpoint) -> None:
    required: list[tuple[Arg, ...]] = []
    if endpoint.password is not None:
        required.append(("AUTH", *((endpoint.username,) if endpoint.username else ()), endpoint.password))
    if endpoint.db:
        required.append(("SELECT", endpoint.db))
    replies = [connection.call(*command) for command in required]
    name = connection.call("CLIENT", "SETNAME", "penstock")
    results = await asyncio.gather(*replies, name, return_exceptions=True)
    for index, result in enumerate(results):
        if isinstance(result, ReplyError):
            is_tolerable = result.code in ("NOPERM", "ERR") and "max number" not in result.message
            if index < len(required) or not is_tolerable:
                raise storage_error(result, connection.address) from None
        elif isinstance(result, BaseException):
            raise result
