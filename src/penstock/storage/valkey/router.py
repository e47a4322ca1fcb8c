"""Which server a command goes to, and what happens when that server does not answer.

The engine sees only ``Router``. ``StandaloneRouter``, ``SentinelRouter`` and ``ClusterRouter`` stand on
our own connections, ``ClientRouter`` on a redis-py or valkey-py client that the user brought along.

A call is repeated on loss of the connection and on refusals that pass by themselves, until ``retry_for``
seconds after its first failure; then StorageUnavailable is raised. Once an attempt may have been carried
out, the command for each further one comes from ``again()``, so that the server can be told it is a repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.storage.valkey.client import ClientRouter
from penstock.storage.valkey.cluster import ClusterRouter
from penstock.storage.valkey.command import Again, Arg, Key, OnConnect
from penstock.storage.valkey.connection import ConnectionLost
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.replies import ReplyError, check_server
from penstock.storage.valkey.sentinel import SentinelRouter
from penstock.storage.valkey.standalone import StandaloneRouter

__all__ = [
    "ClientRouter",
    "ConnectionLost",
    "ReplyError",
    "Router",
    "router_for",
]


class Router(Protocol):
    """The seam. A router belongs to the loop it was first used in; ``connect`` is optional, and eager."""

    async def connect(self) -> None:
        """Connect once, without retries, so that a wrong URL or password is told at once."""

    async def call(self, key: Key, *command: Arg, again: Again | None = None) -> Any:
        """Send ``command`` to the server of ``key``; see the module for repeats. Raises StorageError."""

    async def call_blocking(
        self,
        key: Key,
        *command: Arg,
        timeout: float | None,
        then: Sequence[Arg] = (),
        again: Again | None = None,
    ) -> Any:
        """Send a command that blocks up to ``timeout`` seconds, on a connection nobody else uses.

        ``then`` is a second command, sent right behind it: the server carries it out the moment the first one
        ends, without a round trip in between. The reply is that of the last command. If the server refuses
        ``then`` for now, it alone is sent again, as ``call`` does with ``again``.

        If the caller is cancelled the connection is dropped, so a late reply reaches nobody. A connection
        lost after the command was written is not retried: StorageUnavailable tells the caller to look again.
        """

    async def line(self, key: Key, *, lost: Callable[[], None]) -> str:
        """Return what names the connection by which the server of ``key`` sees that this process lives, such as
        ``<run id> <client id>``; empty if there can be none. ``lost`` is called when that connection ends."""

    def cut_at(self, key: Key) -> float:
        """Return when a connection to the server of ``key`` was last found lost, by the loop's clock; minus infinity
        if none was."""

    async def call_replicated(
        self, key: Key, *command: Arg, replicas: int, again: Again | None = None
    ) -> Any:
        """As ``call``, and wait until ``replicas`` replicas have confirmed it, on a connection nobody else uses.

        Raises NotReplicated if they have not within ``retry_for`` seconds: then the command was carried out.
        """

    async def call_every_node(self, *command: Arg) -> list[Any]:
        """Send ``command`` to every primary; the replies in no particular order."""

    async def close(self) -> None:
        """Close what this router opened. Calls under way, and later ones, raise StorageError."""


def router_for(
    endpoint: Endpoint, *, on_connect: OnConnect = check_server, retry_for: float = 30.0
) -> Router:
    """The router for a URL. ``on_connect`` is run on each new connection before anybody uses it."""
    match endpoint.topology:
        case "standalone":
            return StandaloneRouter(endpoint, on_connect=on_connect, retry_for=retry_for)
        case "sentinel":
            return SentinelRouter(endpoint, on_connect=on_connect, retry_for=retry_for)
        case "cluster":
            return ClusterRouter(endpoint, on_connect=on_connect, retry_for=retry_for)
