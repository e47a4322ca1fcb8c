"""Routers: which server a command goes to, and what happens when that server does not answer.

The engine sees only ``Router``. ``StandaloneRouter``, ``SentinelRouter`` and ``ClusterRouter`` use our own connections;
``ClientRouter`` uses a redis-py or valkey-py client that the user passes in.

A router retries a call after a lost connection, and after refusals that pass by themselves, until ``retry_for`` seconds
after the first failure; then it raises StorageUnavailable. Once an attempt may have been carried out, ``again()`` makes
the command for each further one, so that the server can recognise a repetition.
"""

from __future__ import annotations

import asyncio
import random
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from penstock.errors import NotReplicated, StorageError, StorageUnavailable
from penstock.storage.valkey.commands import (
    REDIRECT,
    RETRYABLE,
    Again,
    Arg,
    Key,
    OnConnect,
    ReplyError,
    Router,
    check_server,
    replicated,
    storage_error,
)
from penstock.storage.valkey.connection import Connection, ConnectionLost, open_connection
from penstock.storage.valkey.endpoint import Address, Endpoint, Topology
from penstock.storage.valkey.node import (
    CLOSED,
    Node,
    RefusedAfterWait,
    backoff,
    cancel_and_wait,
    ignore_outcome,
    shared_result,
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


class StandaloneRouter(NodeRouter):
    """One server, at one address."""

    def __init__(
        self, endpoint: Endpoint, *, on_connect: OnConnect = check_server, retry_for: float = 30.0
    ) -> None:
        super().__init__(endpoint, on_connect=on_connect, retry_for=retry_for)
        self._node = Node(endpoint, self._dial)

    async def connect(self) -> None:
        self._check_open()
        await self._node.ready(self._first_deadline())

    async def call_every_node(self, *command: Arg) -> list[Any]:
        return [await self.call(b"", *command)]

    async def close(self) -> None:
        self._closed = True
        await self._node.close()

    def _node_of(self, key: Key) -> Node:
        return self._node

    async def _dial(self) -> Connection:
        return await self._open(self._endpoint.addresses[0])


class SentinelRouter(StandaloneRouter):
    """The primary that the sentinels name. Asks them again when it is lost, or says that it is a replica."""

    def _passes(self, failure: ReplyError) -> bool:
        return failure.code == "READONLY"

    async def _dial(self) -> Connection:
        causes: list[str] = []
        for sentinel in self._endpoint.addresses:
            try:
                return await self._open(await self._ask(sentinel), primary_only=True)
            except StorageUnavailable as error:
                causes.append(f"{sentinel}: {error}")
        service = self._endpoint.service
        raise StorageUnavailable(f"no sentinel led to the primary of {service!r}; {'; '.join(causes)}")

    async def _ask(self, sentinel: Address) -> Address:
        connection = await open_connection(sentinel, self._endpoint.for_sentinels())
        try:
            reply = await connection.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._endpoint.service)
        except ReplyError as error:
            raise storage_error(error, sentinel) from None
        finally:
            await connection.close()
        if reply is None:
            raise StorageUnavailable(f"it does not know the service {self._endpoint.service!r}")
        return Address(reply[0].decode(), int(reply[1]))


_SLOTS: Final = 16384
_REFRESH_EVERY_SECONDS: Final = 1.0


@lru_cache(maxsize=4096)
def slot_of(key: Key) -> int:
    """Return the cluster slot of a key: the CRC16 of its ``{tag}``, or of the whole key."""
    name = key.encode() if isinstance(key, str) else key
    start = name.find(b"{")
    if start >= 0 and (end := name.find(b"}", start + 1)) > start + 1:
        name = name[start + 1 : end]
    return crc_hqx(name, 0) % _SLOTS


class ClusterRouter(NodeRouter):
    """The primaries of a cluster, by slot. Reads the slot map at ``connect``, and again when it proves wrong."""

    def __init__(
        self, endpoint: Endpoint, *, on_connect: OnConnect = check_server, retry_for: float = 30.0
    ) -> None:
        super().__init__(endpoint, on_connect=on_connect, retry_for=retry_for)
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node] = [self._node_at(endpoint.addresses[0])] * _SLOTS
        self._refreshing: asyncio.Task[None] | None = None
        self._fresh_until = 0.0

    async def connect(self) -> None:
        self._check_open()
        await self._refresh()

    async def call_every_node(self, *command: Arg) -> list[Any]:
        if not self._fresh_until:
            await self._refresh()
        used = set(self._slots)
        addresses = [address for address, node in self._nodes.items() if node in used]
        calls = [self._retry(partial(self._node_at, address), command) for address in addresses]
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    async def close(self) -> None:
        self._closed = True
        await cancel_and_wait(self._refreshing)
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    def _node_of(self, key: Key) -> Node:
        return self._slots[slot_of(key)]

    def _node_at(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(address, lambda: self._open(address))
        return node

    def _passes(self, failure: ReplyError) -> bool:
        return failure.code in ("MOVED", "ASK")

    async def _follow(self, failure: StorageError, node: Node) -> Node | None:
        moved = REDIRECT.match(str(failure))
        if moved is None:
            await self._refresh(quietly=True)
            return None
        host = moved[3] or (node.name.host if isinstance(node.name, Address) else "")
        target = self._node_at(Address(host, int(moved[4])))
        if moved[1] == "ASK":
            return target
        self._slots[int(moved[2])] = target
        if asyncio.get_running_loop().time() >= self._fresh_until:
            self._start_refresh()
        return None

    def _start_refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._load_slots())
            self._refreshing.add_done_callback(ignore_outcome)
        return self._refreshing

    async def _refresh(self, *, quietly: bool = False) -> None:
        """Read the slot map; concurrent callers share one read."""
        refreshing = self._start_refresh()
        await asyncio.wait([refreshing])
        try:
            shared_result(refreshing)
        except StorageError:
            if not quietly:
                raise

    async def _load_slots(self) -> None:
        loop = asyncio.get_running_loop()
        seeds = [self._node_at(address) for address in self._endpoint.addresses]
        known = random.sample([*self._nodes.values()], len(self._nodes))
        known.sort(key=lambda node: node.connection is None or not node.connection.ready)
        failure: StorageError | None = None
        for node in dict.fromkeys([*known, *seeds]):
            try:
                connection = await node.ready(loop.time() + self._endpoint.connect_timeout)
                rows = await connection.call("CLUSTER", "SLOTS")
            except ReplyError as error:
                failure = storage_error(error, node.name)
            except StorageError as error:
                failure = error
            else:
                return await self._adopt(rows, connection.address.host)
        raise failure or StorageUnavailable(f"no node of the cluster {self._endpoint} answers")

    async def _adopt(self, rows: list[Any], asked_host: str) -> None:
        for first, last, (host, port, *_), *_ in rows:
            if host != b"?":
                name = host.decode() if host else asked_host
                self._slots[first : last + 1] = [self._node_at(Address(name, port))] * (last - first + 1)
        self._fresh_until = asyncio.get_running_loop().time() + _REFRESH_EVERY_SECONDS
        used = set(self._slots)
        for address, node in [*self._nodes.items()]:
            if node not in used and not node.busy:
                del self._nodes[address]
                await node.close()


def router_for(
    endpoint: Endpoint, *, on_connect: OnConnect = check_server, retry_for: float = 30.0
) -> Router:
    """Return the router for a URL. ``on_connect`` runs on each new connection before any call uses it."""
    kinds: dict[Topology, Callable[..., Router]] = {
        "standalone": StandaloneRouter,
        "sentinel": SentinelRouter,
        "cluster": ClusterRouter,
    }
    return kinds[endpoint.topology](endpoint, on_connect=on_connect, retry_for=retry_for)
