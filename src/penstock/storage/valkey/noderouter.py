"""The base of the routers over our own connections: the first attempt, and the retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import NotReplicated, StorageError, StorageUnavailable
from penstock.storage.valkey.connection import Connection, ConnectionLost, open_connection
from penstock.storage.valkey.endpoint import Address, Endpoint
from penstock.storage.valkey.node import CLOSED, Node, RefusedAfterWait, backoff, ignore_outcome
from penstock.storage.valkey.replies import (
    REDIRECT,
    RETRYABLE,
    Again,
    Arg,
    Key,
    OnConnect,
    ReplyError,
    check_server,
    replicated,
    storage_error,
)


class NodeRouter:
    """A router that owns its ``Node``s. A subclass maps keys to nodes (``_node_of``), decides which refusals pass by
    themselves (``_passes``), and learns about the topology from failures (``_follow``).
    """

    def __init__(
        self, endpoint: Endpoint, *, on_connect: OnConnect = check_server, retry_for: float = 30.0
    ) -> None:
        self._endpoint = endpoint
        self._on_connect = on_connect
        self._retry_for = retry_for
        self._closed = False

    async def call(self, key: Key, *command: Arg, again: Again | None = None) -> Any:
        connection = self._node_of(key).connection
        failure: StorageError | None = None
        if connection is not None and connection.ready:
            try:
                return await connection.call(*command)
            except StorageError as error:
                failure = error
        return await self._retry(
            lambda: self._node_of(key), command, again=again, failure=failure, connection=connection
        )

    async def call_blocking(
        self,
        key: Key,
        *command: Arg,
        timeout: float | None,
        then: Sequence[Arg] = (),
        again: Again | None = None,
    ) -> Any:
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        target: Node | None = None
        attempt = 0
        while True:
            self._check_open()
            node = target or self._node_of(key)
            try:
                return await node.call_blocking(
                    command,
                    then=then,
                    timeout=timeout,
                    deadline=deadline or self._first_deadline(),
                    asking=target is not None,
                )
            except StorageError as error:
                if isinstance(error, ConnectionLost) and error.sent:
                    self._check_open()
                    raise
                if isinstance(error, RefusedAfterWait):
                    # Waiting once more would leave the event that woke us unhandled.
                    return await self._retry(lambda: self._node_of(key), then, again=again, failure=error)
                deadline = deadline or loop.time() + self._retry_for
                target = await self._recover(error, node, connection=None, attempt=attempt, deadline=deadline)
            attempt += 1

    async def lifeline(self, key: Key, *, lost: Callable[[], None]) -> str:
        self._check_open()
        deadline = asyncio.get_running_loop().time() + self._endpoint.connect_timeout
        return await self._node_of(key).lifeline(key, deadline=deadline, lost=lost)

    def cut_at(self, key: Key) -> float:
        return self._node_of(key).cut_at

    async def call_replicated(
        self, key: Key, *command: Arg, replicas: int, again: Again | None = None
    ) -> Any:
        wait = ("WAIT", replicas, max(1, int(self._retry_for * 1000)))
        deadline: float | None = None
        target: Node | None = None
        attempt, repeat = 0, False
        while True:
            self._check_open()
            node = target or self._node_of(key)
            try:
                reply, confirmed = await node.call_alone(
                    (again() if again and repeat else command, wait),
                    timeout=self._retry_for,
                    deadline=deadline or self._first_deadline(),
                    asking=target is not None,
                )
                if isinstance(reply, ReplyError):
                    raise reply
                return replicated(reply, confirmed, replicas=replicas)
            except NotReplicated:
                raise
            except StorageError as error:
                repeat = repeat or (isinstance(error, ConnectionLost) and error.sent)
                deadline = deadline or asyncio.get_running_loop().time() + self._retry_for
                target = await self._recover(error, node, connection=None, attempt=attempt, deadline=deadline)
            attempt += 1

    async def _retry(
        self,
        choose: Callable[[], Node],
        command: Sequence[Arg],
        *,
        again: Again | None = None,
        failure: StorageError | None = None,
        connection: Connection | None = None,
    ) -> Any:
        """Attempt ``command`` until it is answered, refused for good, or ``retry_for`` has passed.

        The time that a first attempt spent on a silent connection counts.
        """
        waited_s = failure.waited_s if isinstance(failure, ConnectionLost) else 0.0
        retry_s = max(self._retry_for - waited_s, min(self._retry_for, self._endpoint.connect_timeout))
        deadline = asyncio.get_running_loop().time() + retry_s
        node, target = choose(), None
        attempt, repeat = 0, False
        while True:
            if failure is not None:
                repeat = repeat or (isinstance(failure, ConnectionLost) and failure.sent)
                target = await self._recover(
                    failure, node, connection=connection, attempt=attempt, deadline=deadline
                )
                attempt += 1
            self._check_open()
            node = target or choose()
            try:
                connection = await node.ready(deadline if failure else self._first_deadline())
                if target is not None:
                    ignore_outcome(connection.call("ASKING"))
                return await connection.call(*(again() if again and repeat else command))
            except StorageError as error:
                failure = error

    async def _recover(
        self,
        failure: StorageError,
        node: Node,
        *,
        connection: Connection | None,
        attempt: int,
        deadline: float,
    ) -> Node | None:
        """Wait as long as ``failure`` requires. Return the node to ASK next, if any. Raise final failures."""
        self._check_open()
        where = connection.address if connection else node.name
        pause = backoff(attempt)
        if isinstance(failure, ReplyError):
            if failure.code == "READONLY":
                node.forget(connection, "it is not the primary")
            if failure.code not in RETRYABLE and not self._passes(failure):
                raise storage_error(failure, where) from None
            if failure.code in RETRYABLE:
                pause = backoff(attempt + 1)
        elif not isinstance(failure, StorageUnavailable):
            raise failure
        elif not isinstance(failure, ConnectionLost):
            pause = 0.0  # the node itself waits before it connects again
        remaining = deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            raise self._given_up(failure, where) from failure
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(pause)
                return await self._follow(failure, node)
        except TimeoutError:
            return None  # the next attempt is the last

    def _given_up(self, failure: StorageError, where: object) -> StorageError:
        reason = failure
        if isinstance(failure, ReplyError):
            redirect = StorageUnavailable(f"{where} still says: {failure}")
            reason = redirect if REDIRECT.match(str(failure)) else storage_error(failure, where)
        if not isinstance(reason, StorageUnavailable):
            return reason
        return StorageUnavailable(
            f"{reason}. Gave up on {where} after {self._retry_for:g} s. Check that the server runs, that it "
            "can be reached from here, and that the URL is right"
        )

    def _first_deadline(self) -> float:
        """Return the deadline of a first attempt, which includes the time to connect even if nothing is retried."""
        allowed = max(self._retry_for, 2 * self._endpoint.connect_timeout)
        return asyncio.get_running_loop().time() + allowed

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(CLOSED)

    def _passes(self, failure: ReplyError) -> bool:
        """Return whether a refusal that is final for other routers is worth another attempt here."""
        return False

    async def _follow(self, failure: StorageError, node: Node) -> Node | None:
        """Learn about the topology from ``failure``. Return the node to ASK, if any."""
        return None

    def _node_of(self, key: Key) -> Node:
        raise NotImplementedError

    async def _open(self, address: Address, *, primary_only: bool = False) -> Connection:
        connection = await open_connection(address, self._endpoint)
        try:
            if primary_only and (role := (await connection.call("ROLE"))[0]) != b"master":
                raise StorageUnavailable(f"{address}, named as the primary, is a {role.decode()}")
            await self._on_connect(connection)
        except BaseException as error:
            connection.drop("its setup failed")
            if isinstance(error, ReplyError):
                raise storage_error(error, address) from None
            raise
        return connection
