"""Waking waiters: directly inside this process, by a datagram in others.

A waiter for work (``w``), news (``n``) or events (``e``) binds a datagram socket, named
``<process>.<number>.<kind>``, in a private directory that belongs to the database file. A commit sends the names of
the queues it touched to the sockets of that kind. A datagram is a hint. A lost one costs only latency, because
every wait has a timeout and reads the database before it sleeps.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import secrets
import socket
import stat
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from penstock.storage.sqlite.files import remove
from penstock.storage.sqlite.lock import TURN_FILE
from penstock.storage.sqlite.transaction import Signal

CAN_SIGNAL: Final = hasattr(socket, "AF_UNIX") and hasattr(os, "getuid")
POLL_S: Final = 0.05
"""The polling interval on systems without sockets."""

_LONGEST_PATH: Final = 100
_DATAGRAM: Final = 8192
_LISTING_SETTLED_NS: Final = 50_000_000
"""A directory that changes twice within a clock tick shows one mtime; only an older mtime can be trusted."""

_numbers = itertools.count(1)
_token = secrets.token_hex(4)


def _process() -> str:
    """Return this process's prefix of socket names. A pid alone is not unique across containers."""
    return f"{os.getpid()}-{_token}."


def signal_directory(identity: str) -> Path | None:
    """Return the directory of a database's sockets, created if needed; ``None`` if it cannot be private."""
    if not CAN_SIGNAL:
        return None
    for base in (tempfile.gettempdir(), "/tmp"):
        home = Path(base) / f"penstock-{os.getuid()}"
        folder = home / identity
        if len(str(folder)) > _LONGEST_PATH - 30:
            continue
        try:
            for path in (home, folder):
                path.mkdir(mode=0o700, exist_ok=True)
                if not _is_ours(path):
                    return None
        except OSError:
            continue
        return folder
    return None


def _is_ours(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


class Exchange:
    """Sends a database's signals to waiters. One per process and database; ``publish`` may be called from any thread.

    ``alone``: the database is in memory, so all waiters are in this process. ``folder`` contains the sockets.
    """

    def __init__(self, folder: Path | None, *, alone: bool) -> None:
        self.folder = folder
        self.alone = alone
        self._bells: set[Bell] = set()
        self._sender: socket.socket | None = None
        self._listed_at: tuple[int, bool] = (0, False)
        self._sockets: dict[str, list[str]] = {}

    def join(self, bell: Bell) -> None:
        """Ring this bell for commits of this process."""
        self._bells = {*self._bells, bell}

    def leave(self, bell: Bell) -> None:
        """Stop ringing this bell."""
        self._bells = self._bells - {bell}

    def publish(self, signals: Iterable[Signal]) -> None:
        """Wake everyone who may wait for one of these signals."""
        by_kind: defaultdict[str, list[str]] = defaultdict(list)
        for kind, address in signals:
            by_kind[kind].append(address)
        for bell in self._bells:
            bell.ring_from_thread(by_kind)
        if self.folder is not None:
            self._look(self.folder)
            for kind, addresses in by_kind.items():
                self._send(self._sockets.get(kind, ()), "\n".join(addresses).encode())

    def close(self) -> None:
        """Close the sending socket, and remove the directory if it is unused."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self.folder is not None:
            try:
                if os.listdir(self.folder) == [TURN_FILE]:
                    os.unlink(self.folder / TURN_FILE)
                self.folder.rmdir()
            except OSError:
                pass

    def _look(self, folder: Path) -> None:
        """Update the list of sockets. The directory's mtime shows whether it has changed."""
        try:
            changed_ns = folder.stat().st_mtime_ns
            if self._listed_at == (changed_ns, True):
                return
            self._listed_at = (changed_ns, time.time_ns() - changed_ns > _LISTING_SETTLED_NS)
            names = os.listdir(folder)
        except OSError:
            return
        own = _process()
        self._sockets = {}
        for name in names:
            if name != TURN_FILE and not name.startswith(own):
                self._sockets.setdefault(name[-1], []).append(str(folder / name))

    def _send(self, paths: Iterable[str], datagram: bytes) -> None:
        for path in paths:
            try:
                if self._sender is None:
                    self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                    self._sender.setblocking(False)
                self._sender.sendto(datagram, path)
            except BlockingIOError:
                continue  # It has unread datagrams, so it wakes anyway.
            except OSError as error:
                if error.errno == errno.ECONNREFUSED:
                    remove(path)  # Its process is gone.


class Bell:
    """The waits of one storage object. Used on its loop's thread, except ``ring_from_thread``."""

    def __init__(self, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> None:
        self._exchange = exchange
        self._loop = loop
        self._waiting: defaultdict[Signal, deque[asyncio.Future[None]]] = defaultdict(deque)
        self._sockets: dict[str, tuple[socket.socket, str]] = {}
        exchange.join(self)

    def expect(self, kind: str, address: str) -> asyncio.Future[None]:
        """Return a future that is done when such a signal comes. Read the database after this call, then sleep."""
        if kind not in self._sockets and self._exchange.folder is not None:
            self._bind(kind, self._exchange.folder)
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[kind, address].append(future)
        return future

    def hears(self, kind: str) -> bool:
        """Return whether signals of other processes arrive. Otherwise, a wait must poll."""
        return self._exchange.alone or kind in self._sockets

    def forget(self, kind: str, address: str, future: asyncio.Future[None]) -> None:
        """End a wait. A ring that came too late for it goes to the next in line."""
        line = self._waiting[kind, address]
        if future in line:
            line.remove(future)
        if not line:
            del self._waiting[kind, address]
        future.cancel()

    def ring(self, kind: str, address: str) -> None:
        """Wake one waiter for work, or all waiters for news or events."""
        line = self._waiting.get((kind, address))
        while line:
            future = line.popleft()
            if not future.done():
                future.set_result(None)
                if kind == "w":
                    return

    def ring_from_thread(self, by_kind: dict[str, list[str]]) -> None:
        """Ring for each signal on the loop's thread. Costs nothing without waiters."""
        if self._waiting:
            try:
                self._loop.call_soon_threadsafe(self._ring_all, by_kind)
            except RuntimeError:
                pass  # The loop is closed.

    def close(self) -> None:
        """End all waits and remove the sockets."""
        self._exchange.leave(self)
        for line in list(self._waiting.values()):
            while line:
                future = line.popleft()
                if not future.done():
                    future.set_result(None)
        for receiver, path in self._sockets.values():
            self._loop.remove_reader(receiver)
            receiver.close()
            remove(path)
        self._sockets.clear()

    def _ring_all(self, by_kind: dict[str, list[str]]) -> None:
        for kind, addresses in by_kind.items():
            for address in addresses:
                self.ring(kind, address)

    def _bind(self, kind: str, folder: Path) -> None:
        path = str(folder / f"{_process()}{next(_numbers)}.{kind}")
        try:
            receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError:
            return  # No file descriptor is left. Datagrams are only hints.
        receiver.setblocking(False)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)  # The last to leave may have removed it.
            receiver.bind(path)
        except OSError:
            receiver.close()
            return
        self._sockets[kind] = (receiver, path)
        self._loop.add_reader(receiver, self._receive, kind, receiver)

    def _receive(self, kind: str, receiver: socket.socket) -> None:
        addresses: set[str] = set()
        try:
            while True:
                addresses.update(receiver.recv(_DATAGRAM).decode().split("\n"))
        except OSError:
            pass
        for address in addresses:
            self.ring(kind, address)
