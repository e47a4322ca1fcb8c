"""A bad network between clients and servers.

Clients find servers by the addresses that Sentinel and Cluster give them, so the processes of a storm redirect their
connections (``redirect``). Servers talk to each other directly: a planned failover still loses nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, Literal, Self, get_args

from tests.front import Front
from tests.servers import HOST, Sentinel, ValkeyServer

REDIRECTED: Final = "STORM_REDIRECTED"
"""The environment variable with the redirected ports: ``7000:8000 7001:8001``."""

Trouble = Literal["cut", "delay", "stall", "lose_reply", "silence"]

STALL_S = 3.0
DELAY_S = 0.2
DELAYED_FOR_S = 1.5
SILENCE_S = 45.0
"""A silent connection is cut after this long; clients should have given up before."""


class BadNetwork(Front):
    """Passes everything on, until ``trouble`` befalls some of the connections:

    - ``cut``: the connection breaks.
    - ``delay``: for a while, everything takes longer.
    - ``stall``: nothing moves for a while.
    - ``lose_reply``: the server does what it is asked, but the connection breaks before the client has the reply.
    - ``silence``: nothing arrives any more, and the connection stays open.
    """

    def __init__(self, server: ValkeyServer | Sentinel, *, seed: int) -> None:
        super().__init__(server)
        self._chance = random.Random(seed)
        self._troubles: dict[object, Trouble] = {}
        self._links: dict[object, list[asyncio.Task[None]]] = {}

    @property
    def is_used(self) -> bool:
        return bool(self._links)

    def trouble(self) -> str:
        """Disturb one connection, some, or all. Returns what was done."""
        kind = self._chance.choice(get_args(Trouble))
        share = self._chance.choice((0.0, 0.3, 1.0)) if kind != "silence" else 0.0
        return asyncio.run_coroutine_threadsafe(self._disturb(kind, share), self.loop).result()

    def heal(self) -> None:
        """End all troubles."""
        asyncio.run_coroutine_threadsafe(self._heal(), self.loop).result()

    async def _disturb(self, kind: Trouble, share: float) -> str:
        links = [link for link in self._links if link not in self._troubles]
        chosen = self._chance.sample(links, min(len(links), max(1, round(len(links) * share))))
        for link in chosen:
            if kind == "cut":
                self._cut(link)
            else:
                self._troubles[link] = kind
        if kind in ("delay", "stall"):
            seconds = DELAYED_FOR_S if kind == "delay" else self._chance.uniform(0.5, STALL_S)
            self.loop.call_later(seconds, self._end_troubles, chosen)
        return f"{kind} {len(chosen)}"

    async def _heal(self) -> None:
        self._end_troubles(list(self._troubles))
        for link in self._troubles:
            self._cut(link)

    def _end_troubles(self, links: list[object]) -> None:
        """Only what fell silent stays so."""
        for link in links:
            if self._troubles.get(link) != "silence":
                self._troubles.pop(link, None)

    def _cut(self, link: object) -> None:
        for pump in self._links[link]:
            pump.cancel()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, link: object, is_reply: bool
    ) -> None:
        pump = asyncio.current_task()
        assert pump is not None, "each direction has a task of its own"
        self._links.setdefault(link, []).append(pump)
        await super()._pump(source, sink, link=link, is_reply=is_reply)

    async def _let_through(self, link: object, *, is_reply: bool) -> bool:
        match self._troubles.get(link):
            case "delay":
                await asyncio.sleep(self._chance.uniform(0, DELAY_S))
            case "stall":
                while self._troubles.get(link) == "stall":
                    await asyncio.sleep(0.05)
            case "silence":
                await asyncio.sleep(SILENCE_S)
                return False
            case "lose_reply" if is_reply:
                return False
        return True

    def _forget(self, link: object) -> None:
        self._links.pop(link, None)
        self._troubles.pop(link, None)


class BadNetworks:
    """A bad network before each of some servers."""

    def __init__(self, servers: Sequence[ValkeyServer | Sentinel], *, seed: int) -> None:
        self._networks = [BadNetwork(server, seed=seed + n) for n, server in enumerate(servers)]
        self._chance = random.Random(seed)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for network in self._networks:
            self._stack.enter_context(network)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def redirected(self) -> str:
        """The value of ``REDIRECTED`` for the processes of the storm."""
        return " ".join(f"{network.server.port}:{network.port}" for network in self._networks)

    def trouble(self) -> str:
        """Disturb connections to one of the servers that have some. Returns what was done."""
        used = [network for network in self._networks if network.is_used]
        network = self._chance.choice(used or self._networks)
        return f"{network.trouble()}, port {network.server.port}"

    def heal(self) -> None:
        """End all troubles."""
        for network in self._networks:
            network.heal()


def redirect() -> None:
    """Have this process connect through the bad network from now on, if there is one."""
    pairs = [pair.split(":") for pair in os.environ.get(REDIRECTED, "").split()]
    fronts = {(HOST, int(port)): (HOST, int(front)) for port, front in pairs}
    connect = socket.socket.connect

    def connect_to_front(self: socket.socket, address: Any) -> None:
        connect(self, fronts.get(address, address) if isinstance(address, tuple) else address)

    if fronts:
        socket.socket.connect = connect_to_front  # type: ignore[method-assign, assignment]
