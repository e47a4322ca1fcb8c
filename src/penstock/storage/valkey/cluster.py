"""The router of a cluster: which node has a key, learnt from the nodes themselves."""

from __future__ import annotations

import asyncio
import random
from binascii import crc_hqx
from functools import lru_cache, partial
from typing import Any, Final

from penstock.errors import StorageError, StorageUnavailable
from penstock.storage.valkey.command import Arg, Key, OnConnect
from penstock.storage.valkey.endpoint import Address, Endpoint
from penstock.storage.valkey.node import Node, cancel_and_wait, ignore_outcome, shared_result
from penstock.storage.valkey.noderouter import NodeRouter
from penstock.storage.valkey.replies import REDIRECT, ReplyError, check_server, storage_error

__all__ = ["ClusterRouter", "slot_of"]

_SLOTS: Final = 16384
_REFRESH_EVERY_SECONDS: Final = 1.0


@lru_cache(maxsize=4096)
def slot_of(key: Key) -> int:
    """The cluster slot of a key: CRC16 of its ``{tag}``, or of all of it."""
    name = key.encode() if isinstance(key, str) else key
    start = name.find(b"{")
    if start >= 0 and (end := name.find(b"}", start + 1)) > start + 1:
        name = name[start + 1 : end]
    return crc_hqx(name, 0) % _SLOTS


class ClusterRouter(NodeRouter):
    """The primaries of a cluster, by slot. The map is read at ``connect``, and again when it proves wrong."""

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
        calls = [self._insist(partial(self._node_at, address), command) for address in addresses]
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
        """Read the slot map; concurrent callers share one reading."""
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
