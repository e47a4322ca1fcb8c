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
from typing import Any, Final, Protocol

from penstock.errors import StorageError, StorageUnavailable
from penstock.storage.valkey.connection import Connection, open_connection
from penstock.storage.valkey.endpoint import Address, Endpoint
from penstock.storage.valkey.node import Node, cancel_and_wait, ignore_outcome, shared_result
from penstock.storage.valkey.noderouter import NodeRouter
from penstock.storage.valkey.replies import (
    REDIRECT,
    Again,
    Arg,
    Key,
    OnConnect,
    ReplyError,
    check_server,
    storage_error,
)


class Router(Protocol):
    """Sends commands to the servers of keys. It belongs to the loop that first used it; ``connect`` is optional."""

    async def connect(self) -> None:
        """Connect once, without retries, so that a wrong URL or password fails immediately."""

    async def call(self, key: Key, *command: Arg, again: Again | None = None) -> Any:
        """Send ``command`` to the server of ``key``, with retries. Raises StorageError."""

    async def call_blocking(
        self,
        key: Key,
        *command: Arg,
        timeout: float | None,
        then: Sequence[Arg] = (),
        again: Again | None = None,
    ) -> Any:
        """Send a command that blocks up to ``timeout`` seconds, on a connection of its own.

        ``then`` is a second command, sent right behind it: the server runs it the moment the first one ends, without
        a round trip in between. The reply is that of the last command. If the server refuses ``then`` for now, only
        ``then`` is sent again, as ``call`` does with ``again``.

        If the caller is cancelled, the connection is dropped, so a late reply reaches no other call. A connection
        lost after the command was written is not retried: StorageUnavailable tells the caller to look again.
        """

    async def lifeline(self, key: Key, *, lost: Callable[[], None]) -> str:
        """Return the name of the connection by which the server of ``key`` sees that this process lives, such as
        ``<run id> <client id>``; empty if there can be none. ``lost`` is called when that connection ends."""

    def cut_at(self, key: Key) -> float:
        """Return when a connection to the server of ``key`` was last found lost, by the loop's clock; minus infinity
        if never."""

    async def call_replicated(
        self, key: Key, *command: Arg, replicas: int, again: Again | None = None
    ) -> Any:
        """Call, and wait until ``replicas`` replicas have confirmed the command, on a connection of its own.

        Raises NotReplicated if they do not within ``retry_for`` seconds; then the command was carried out.
        """

    async def call_every_node(self, *command: Arg) -> list[Any]:
        """Send ``command`` to every primary. Return the replies in no particular order."""

    async def close(self) -> None:
        """Close the router's connections. Calls under way, and later ones, raise StorageError."""


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
    match endpoint.topology:
        case "standalone":
            return StandaloneRouter(endpoint, on_connect=on_connect, retry_for=retry_for)
        case "sentinel":
            return SentinelRouter(endpoint, on_connect=on_connect, retry_for=retry_for)
        case "cluster":
            return ClusterRouter(endpoint, on_connect=on_connect, retry_for=retry_for)
