"""The router over a redis-py or valkey-py client that the user passes in."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from weakref import WeakSet

from penstock.errors import StorageError, StorageUnavailable
from penstock.storage.valkey.commands import (
    Again,
    Arg,
    Key,
    OnConnect,
    ReplyError,
    check_server,
    replicated,
    storage_error,
)
from penstock.storage.valkey.connection import ConnectionLost
from penstock.storage.valkey.node import BLOCK_GRACE_SECONDS, backoff


class ClientRouter:
    """Sends commands through an asyncio client of redis-py or valkey-py, which the caller made and closes.

    This router is slower than the others, and subject to the client's own limits: its pool and its timeouts. It does
    not use the retries of a plain client; a cluster client follows redirects by itself. ``on_connect`` runs for each
    primary at ``connect``, after a lost connection, and when the pool of a plain client has reconnected. Cluster
    clients do not report reconnects.
    """

    def __init__(self, client: Any, *, on_connect: OnConnect = check_server, retry_for: float = 30.0) -> None:
        self._client = client
        self._on_connect = on_connect
        self._retry_for = retry_for
        self._is_cluster = hasattr(client, "get_node_from_key")
        self._watched: WeakSet[Any] = WeakSet()
        self._has_reconnected = False
        self._pool_args: tuple[str, ...] = ()
        if not self._is_cluster:  # valkey-py requires this argument, redis-py warns about it
            name = inspect.signature(client.connection_pool.get_connection).parameters.get("command_name")
            self._pool_args = ("_",) if name and name.default is inspect.Parameter.empty else ()

    async def connect(self) -> None:
        try:
            for target in await self._targets():
                await self._on_connect(_ClientCaller(self, target))
        except ReplyError as error:
            raise storage_error(error, "the server") from None

    async def call(self, key: Key, *command: Arg, again: Again | None = None) -> Any:
        return await self._retry(key, command, again=again)

    async def call_blocking(
        self,
        key: Key,
        *command: Arg,
        timeout: float | None,
        then: Sequence[Arg] = (),
        again: Again | None = None,
    ) -> Any:
        limit = math.inf if timeout is None else timeout + BLOCK_GRACE_SECONDS
        if not then:
            return await self._retry(key, command, block_for=limit)
        # We cannot keep two commands on one of the client's connections, so this costs a round trip. If the
        # connection is lost (redis-py closes all those of a cluster now and then), ``then`` has not been sent.
        with contextlib.suppress(ConnectionLost):
            await self._retry(key, command, block_for=limit)
        return await self.call(key, *then, again=again)

    async def lifeline(self, key: Key, *, lost: Callable[[], None]) -> str:
        """Return an empty string: the client's open connections do not show that this process lives."""
        return ""

    def cut_at(self, key: Key) -> float:
        """Return minus infinity: the client does not report reconnects."""
        return float("-inf")

    async def call_replicated(
        self, key: Key, *command: Arg, replicas: int, again: Again | None = None
    ) -> Any:
        wait = ("WAIT", replicas, max(1, int(self._retry_for * 1000)))
        reply, confirmed = await self._retry(key, command, again=again, wait=wait)
        return replicated(reply, confirmed, replicas=replicas)

    async def call_every_node(self, *command: Arg) -> list[Any]:
        return [await self._retry(target, command) for target in await self._targets()]

    async def close(self) -> None:
        """Do nothing: the caller closes the client."""

    async def attempt(
        self, command: Sequence[Arg], *, target: Any = None, block_for: float = 0.0, wait: Sequence[Arg] = ()
    ) -> Any:
        """Make one attempt, without a plain client's own retries. Raise the client's errors as ours.

        With ``wait``, send it as a second command on the same connection, and return both replies.
        """
        try:
            if self._is_cluster:
                name = str(command[0]).lower()  # in upper case the client would apply its reply callbacks
                options = {"target_nodes": target, "NEVER_DECODE": True}
                reply = await self._client.execute_command(name, *command[1:], **options)
            else:
                reply = await self._on_pool(command, block_for=block_for, wait=wait)
        except AttributeError as error:
            if not self._is_cluster:
                raise
            # A redirect to a node that joined since: redis-py looks the node up and gets None.
            await self._client.nodes_manager.initialize()
            raise ReplyError(f"TRYAGAIN the cluster client does not know the node yet: {error}") from error
        except Exception as error:
            raise _client_error(error) from error
        return _resp2(reply, pairs=str(command[0]).upper().startswith("XREAD"))

    async def _on_pool(self, command: Sequence[Arg], *, block_for: float, wait: Sequence[Arg]) -> Any:
        pool = self._client.connection_pool
        connection = await pool.get_connection(*self._pool_args)
        try:
            self._watch(connection)
            if self._has_reconnected:
                self._has_reconnected = False
                await self._on_connect(_ClientCaller(self, None))
            options = {"timeout": min(block_for, 1e9)} if block_for else {}
            await connection.send_command(*command)
            reply = await connection.read_response(disable_decoding=True, **options)
            if not wait:
                return reply
            await connection.send_command(*wait)
            try:
                return reply, await connection.read_response(timeout=self._retry_for + BLOCK_GRACE_SECONDS)
            except Exception as error:
                if isinstance(refusal := _client_error(error), ReplyError):
                    return reply, refusal
                raise
        except BaseException as error:
            if "ResponseError" not in {cls.__name__ for cls in type(error).__mro__}:
                await connection.disconnect(nowait=True)
            raise
        finally:
            await pool.release(connection)

    def _watch(self, connection: Any) -> None:
        """Note when the connection reconnects."""
        register = getattr(connection, "register_connect_callback", None)
        if register is not None and connection not in self._watched:
            self._watched.add(connection)
            register(self._note_reconnect)

    def _note_reconnect(self, connection: Any) -> None:
        self._has_reconnected = True

    async def _retry(
        self,
        key: Any,
        command: Sequence[Arg],
        *,
        again: Again | None = None,
        block_for: float = 0.0,
        wait: Sequence[Arg] = (),
    ) -> Any:
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        attempt, repeat, is_lost = 0, False, False
        while True:
            try:
                target = await self._target(key)
                if is_lost:
                    await self._on_connect(_ClientCaller(self, target))
                    is_lost = False
                attempted = again() if again and repeat else command
                return await self.attempt(attempted, target=target, block_for=block_for, wait=wait)
            except StorageError as error:
                if block_for and isinstance(error, ConnectionLost):
                    raise
                failure = storage_error(error, "the server") if isinstance(error, ReplyError) else error
                deadline = deadline or loop.time() + self._retry_for
                if not isinstance(failure, StorageUnavailable) or loop.time() >= deadline:
                    raise failure from None
                is_lost = is_lost or isinstance(error, ConnectionLost)
                repeat = repeat or isinstance(error, ConnectionLost)
            attempt += 1
            await asyncio.sleep(min(backoff(attempt), max(0.0, deadline - loop.time())))

    async def _target(self, key: Any) -> Any:
        if not self._is_cluster or not isinstance(key, str | bytes):
            return key
        await self._client.initialize()
        return self._client.get_node_from_key(key.decode() if isinstance(key, bytes) else key)

    async def _targets(self) -> list[Any]:
        if not self._is_cluster:
            return [None]
        await self._client.initialize()
        return list(self._client.get_primaries())


class _ClientCaller:
    """Calls one node of a client, for ``on_connect``."""

    def __init__(self, router: ClientRouter, target: Any) -> None:
        self._router = router
        self._target = target

    def call(self, *command: Arg) -> Awaitable[Any]:
        return self._router.attempt(command, target=self._target)


_CLIENT_CODES: Final = {
    "AuthenticationError": "WRONGPASS",
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "NoPermissionError": "NOPERM",
    "NoScriptError": "NOSCRIPT",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
    "ClusterError": "TRYAGAIN",  # redis-py gave up on redirects and TRYAGAIN: the server ran nothing
}
_CLIENT_LOSSES: Final = frozenset(
    {"ConnectionError", "TimeoutError", "OSError", "RedisClusterException", "ValkeyClusterException"}
)


def _client_error(error: Exception) -> StorageError:
    """Return a client's exception as ours, by class names that both libraries share: they cut some codes off."""
    names = {cls.__name__ for cls in type(error).__mro__}
    code = next((code for name, code in _CLIENT_CODES.items() if name in names), None)
    if isinstance(error, StorageError):
        return error
    if code is not None:
        return ReplyError(f"{code} {error}")
    if "ResponseError" in names:
        text = str(error)
        return ReplyError(text if re.match(r"[A-Z]+ ", text) else f"ERR {text}")
    if names & _CLIENT_LOSSES:
        return ConnectionLost(f"the client passed in says: {type(error).__name__}: {error}", sent=True)
    raise error


def _resp2(reply: Any, *, pairs: bool = False) -> Any:
    """Return a RESP3 reply in its RESP2 shape: maps become lists, of pairs for XREAD, else flat."""
    match reply:
        case dict() if pairs:
            return [[name, _resp2(value)] for name, value in reply.items()]
        case dict():
            return [_resp2(part) for item in reply.items() for part in item]
        case list() | tuple() | set():
            return [_resp2(part) for part in reply]
        case bool():
            return int(reply)
        case _:
            return reply
