"""One server as the routers see it: its connections, and when to reconnect."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from penstock.errors import StorageError, StorageUnavailable
from penstock.storage.valkey.commands import Arg, Key, ReplyError, run_id
from penstock.storage.valkey.connection import Connection, ConnectionLost

T = TypeVar("T")

CLOSED: Final = "this store was closed; open a new one"

BLOCK_GRACE_SECONDS: Final = 5.0
"""The time that a blocking command may take to answer beyond its own timeout."""

_KEPT_IDLE: Final = 4


def backoff(failures: int) -> float:
    """Return the seconds to wait after ``failures`` failures in a row: 50 ms, doubling up to 2 s, with jitter."""
    return min(2.0, 0.05 * 2 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0) if failures else 0.0


class RefusedAfterWait(ReplyError):
    """A blocking command finished, and the server refused the one sent behind it."""


class Node:
    """One server: its command connection, renewed when lost, and idle connections for blocking commands."""

    def __init__(self, name: object, dial: Callable[[], Awaitable[Connection]]) -> None:
        self.name = name
        self.connection: Connection | None = None
        self._dial = dial
        self._idle: list[Connection] = []
        self._leased: set[Connection] = set()
        self._dialing: asyncio.Task[Connection] | None = None
        self._failures = 0
        self._cause: StorageError | None = None
        self._closed = False
        self._lifeline: Connection | None = None
        self._lifeline_lock = asyncio.Lock()
        self._life = ""
        self.cut_at = float("-inf")
        """The time at which a connection to this server was last found lost, by the loop's clock."""

    async def ready(self, deadline: float) -> Connection:
        """Return the command connection, ready for a command. Concurrent callers share one attempt to connect."""
        connection = self.connection
        try:
            async with asyncio.timeout_at(deadline):
                if connection is None or connection.lost:
                    if self._dialing is None:
                        self._dialing = asyncio.create_task(self._connect())
                        self._dialing.add_done_callback(self._dialed)
                    dialing = self._dialing
                    await asyncio.wait([dialing])
                    connection = shared_result(dialing)
                await connection.writable()
        except TimeoutError:
            text = str(self._cause or f"{self.name} does not answer, or takes no more commands")
            raise StorageUnavailable(text) from self._cause
        return connection

    async def call_blocking(
        self,
        command: Sequence[Arg],
        *,
        then: Sequence[Arg] = (),
        timeout: float | None,
        deadline: float,
        asking: bool,
    ) -> Any:
        """Do what ``Router.call_blocking`` says, without retries. The last command decides: the server runs ``then``
        even if it answers the first command with an error."""
        commands = (command, then) if then else (command,)
        replies = await self.call_alone(commands, timeout=timeout, deadline=deadline, asking=asking)
        reply = replies[-1]
        if isinstance(reply, ReplyError):
            raise RefusedAfterWait(str(reply)) if then and not isinstance(replies[0], ReplyError) else reply
        return reply

    async def call_alone(
        self, commands: Sequence[Sequence[Arg]], *, timeout: float | None, deadline: float, asking: bool
    ) -> list[Any]:
        """Send commands in a row, on a connection of their own that may be silent for ``timeout`` seconds. Return the
        replies, including ``ReplyError``s."""
        await self.ready(deadline)
        while (connection := self._idle.pop() if self._idle else await self._connect_once()).lost:
            pass
        connection.expect_silence()
        self._leased.add(connection)
        try:
            pending = []
            for command in commands:
                if asking:
                    ignore_outcome(connection.call("ASKING"))
                pending.append(connection.call(*command))
                ignore_outcome(pending[-1])
            async with asyncio.timeout(None if timeout is None else timeout + BLOCK_GRACE_SECONDS):
                replies = [await _replied(future) for future in pending]
        except BaseException as error:
            connection.drop("its blocking call was given up")
            if isinstance(error, TimeoutError):
                text = f"lost the connection to {connection.address}: no answer to a blocking call in time"
                raise ConnectionLost(text, sent=True) from error
            raise
        finally:
            self._leased.discard(connection)
        if any(isinstance(reply, ReplyError) for reply in replies):
            # The connection may lead to a server that is no longer the primary.
            connection.drop("its blocking call was refused")
        elif len(self._idle) < _KEPT_IDLE:
            self._idle.append(connection)
        else:
            connection.drop("one idle connection too many")
        return replies

    async def lifeline(self, key: Key, *, deadline: float, lost: Callable[[], None]) -> str:
        """Return the run id and client id of the connection by which the server sees that this process lives.

        The connection blocks forever, on a key that is never written, so that the server does not close it as idle
        while this process is suspended. ``lost`` is called when it ends. All callers share it, and renew it when it is
        lost.
        """
        await self.ready(deadline)
        async with self._lifeline_lock:
            if self._lifeline is None or self._lifeline.lost:
                self._lifeline = await self._open_lifeline(key, lost)
        return self._life

    async def _open_lifeline(self, key: Key, lost: Callable[[], None]) -> Connection:
        connection = await self._connect_once()
        try:
            info, client = await asyncio.gather(
                connection.call("INFO", "server"), connection.call("CLIENT", "ID")
            )
        except BaseException:
            connection.drop("it may not ask for its client id")
            raise
        self._life = f"{run_id(info)} {client}"
        connection.expect_silence()

        def ended(reply: asyncio.Future[Any]) -> None:
            ignore_outcome(reply)
            connection.drop("it stopped waiting")  # Its slot has moved, or the server is a replica now.
            self.cut_at = asyncio.get_running_loop().time()
            if not self._closed:
                lost()

        connection.call("BLPOP", key, 0).add_done_callback(ended)
        return connection

    @property
    def busy(self) -> bool:
        """Return whether a caller waits for this node."""
        return bool(self._leased or self._dialing or (self.connection and not self.connection.idle))

    def forget(self, connection: Connection | None, reason: str) -> None:
        """Drop ``connection`` if it is still the current one, and all idle ones."""
        if connection is not None and connection is self.connection:
            connection.drop(reason)
            while self._idle:
                self._idle.pop().drop(reason)

    async def close(self) -> None:
        self._closed = True
        await cancel_and_wait(self._dialing)
        mine = [connection for connection in (self.connection, self._lifeline) if connection is not None]
        await asyncio.gather(*(connection.close() for connection in [*mine, *self._idle, *self._leased]))
        self._idle.clear()

    async def _connect(self) -> Connection:
        if self.connection is not None:
            self.cut_at = asyncio.get_running_loop().time()
        self.connection = await self._connect_once()
        return self.connection

    async def _connect_once(self) -> Connection:
        await asyncio.sleep(backoff(self._failures))
        try:
            connection = await self._dial()
        except StorageError as error:
            self._failures += 1
            self._cause = error
            if isinstance(error, ConnectionLost):  # only our setup was sent, not the caller's command
                raise StorageUnavailable(str(error)) from error
            raise
        if self._closed:
            connection.drop("closed by this client")
            raise StorageUnavailable(CLOSED)
        self._failures, self._cause = 0, None
        return connection

    def _dialed(self, task: asyncio.Task[Connection]) -> None:
        self._dialing = None
        ignore_outcome(task)


async def _replied(future: asyncio.Future[Any]) -> Any:
    try:
        return await future
    except ReplyError as error:
        return error


async def cancel_and_wait(task: asyncio.Task[Any] | None) -> None:
    """Cancel ``task`` if it runs, and wait until it is done."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task])


def shared_result(task: asyncio.Task[T]) -> T:
    """Return the result of a task that several callers share. It is cancelled only when its owner closes: the router,
    or a node that owns no slot (a call redirected there tries again, and finds a new node)."""
    if task.cancelled():
        raise StorageUnavailable(CLOSED)
    return task.result()


def ignore_outcome(future: asyncio.Future[Any]) -> None:
    """Retrieve the outcome of ``future`` when it is done, so that asyncio does not warn about its error."""
    if not future.done():
        future.add_done_callback(ignore_outcome)
    elif not future.cancelled():
        future.exception()
