"""The router of a single server."""

from __future__ import annotations

from typing import Any

from penstock.storage.valkey.command import Arg, Key, OnConnect
from penstock.storage.valkey.connection import Connection
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.node import Node
from penstock.storage.valkey.noderouter import NodeRouter
from penstock.storage.valkey.replies import check_server

__all__ = ["StandaloneRouter"]


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
