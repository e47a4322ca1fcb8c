"""The Valkey/Redis engine: every verb is one call of a function that runs inside the server.

The functions are in ``lua/``, a file per verb; the keys they use are told at the top of ``lua/prelude.lua``.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Final, Self, TypeVar

import msgspec

from penstock.core.names import check_namespace
from penstock.errors import InvalidOption, PenstockError, StorageError, StorageRefused
from penstock.storage.base import Storage
from penstock.storage.valkey.calls import Calls
from penstock.storage.valkey.courier import Courier
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.flowing import Flowing
from penstock.storage.valkey.identity import Identity
from penstock.storage.valkey.keys import DEFAULT_NAMESPACE, Keys
from penstock.storage.valkey.library import library
from penstock.storage.valkey.limiting import Limiting
from penstock.storage.valkey.lives import Lives
from penstock.storage.valkey.operating import Operating
from penstock.storage.valkey.reading import Reading
from penstock.storage.valkey.router import ClientRouter, Router, router_for
from penstock.storage.valkey.running import Running
from penstock.storage.valkey.scheduling import Scheduling
from penstock.storage.values import WorkerRecord, with_deaths

__all__ = ["ValkeyStorage"]


T = TypeVar("T")

_NONSENSE: Final = (AttributeError, LookupError, TypeError, ValueError, msgspec.MsgspecError, struct.error)


def _answered(verb: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Return ``verb``, with a ``StorageError`` in place of what Python raises for an answer of the wrong shape."""

    @wraps(verb)
    async def call(self: ValkeyStorage, *args: Any, **kwargs: Any) -> T:
        try:
            return await verb(self, *args, **kwargs)
        except PenstockError:
            # Some are a LookupError or a ValueError as well.
            raise
        except _NONSENSE as error:
            raise StorageError(
                f"{self.url} gave an answer to {verb.__name__} that makes no sense: {type(error).__name__}: "
                f"{error!s:.200}. See that the URL names a Valkey or Redis server, with no proxy in between that "
                "changes answers, and that all clients run compatible releases of Penstock."
            ) from error

    return call


class ValkeyStorage(Scheduling, Flowing, Operating, Limiting, Reading):
    """``Storage`` on Valkey, or Redis 7.0 and newer: standalone, Sentinel, Cluster.

    Made by ``from_url``, or with ``client``: an asyncio client of redis-py or valkey-py, which stays the
    caller's to close. ``replicas``, with such a client: as in a URL.
    """

    capabilities = frozenset({"shared", "processes"})

    def __init__(
        self,
        client: Any = None,
        *,
        endpoint: Endpoint | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        url: str = "a client passed in",
        retry_for: float = 30.0,
        replicas: int = 0,
    ) -> None:
        replicas = endpoint.replicas if endpoint else replicas
        if type(replicas) is not int or replicas < 0:
            raise InvalidOption(f"replicas must be an integer >= 0, got {replicas!r}.")
        if replicas and client is not None and hasattr(client, "get_node_from_key"):
            raise InvalidOption(
                "replicas is not available with a cluster client, whose connections cannot be told apart. "
                "Give a URL (valkey+cluster://…?replicas=1), or a client of one server."
            )
        Running.__init__(self)
        Reading.__init__(self)
        self.url = url
        self.namespace = check_namespace(namespace)
        keys = Keys(self.namespace)
        identity = Identity(keys, library(), seen=self._seen)
        self._router: Router = (
            router_for(endpoint, on_connect=identity.prepare, retry_for=retry_for)
            if endpoint
            else ClientRouter(client, on_connect=identity.prepare, retry_for=retry_for)
        )
        self._calls = Calls(self._router, keys, identity=identity, replicas=replicas)
        self._courier = Courier(self._calls, meet=self._register)
        self._lives = Lives(self._calls)

    @classmethod
    def from_url(cls, url: str, *, namespace: str | None = None, retry_for: float = 30.0) -> Self:
        """An engine for a URL. ``retry_for``: how many seconds a call insists when the server is away.

        Raises InvalidOption or InvalidName; connects nowhere yet.
        """
        endpoint = Endpoint.parse(url)
        return cls(
            endpoint=endpoint,
            retry_for=retry_for,
            namespace=namespace or endpoint.namespace or DEFAULT_NAMESPACE,
            url=f"{url.partition('://')[0]}://{endpoint}",
        )

    def _seen(self, queue: str) -> tuple[int, int]:
        """Return the highest number and the highest event of a queue that this process was told of."""
        return self._seen_seq.get(queue, 0), self._seen_events.get(queue, 0)

    async def open(self) -> None:
        """Connect and load the function library, without retries: a wrong URL or password is told at once."""
        await self._router.connect()

    async def close(self) -> None:
        """Close the connections. Calls under way raise StorageError; a client passed in stays open."""
        await self._courier.close()
        await self._lives.withdraw()
        await self._router.close()

    async def announce(self, queue: str, worker: str, *, lost: Callable[[], None]) -> None:
        """As ``Storage.announce``."""
        await self._lives.announce(queue, worker, lost)

    async def lives(self, queue: str) -> dict[str, bool]:
        """As ``Storage.lives``."""
        return await self._lives.look(queue)

    async def workers(self, queue: str) -> list[WorkerRecord]:
        """As ``Storage.workers``."""
        return with_deaths(await self._workers(queue), await self._lives.look(queue))

    async def server_facts(self) -> list[dict[str, str]]:
        """What each server says of itself (INFO), and its clock as ``time_ms``: for whoever checks the set-up."""
        facts: list[dict[str, str]] = []
        times = await self._router.call_every_node("TIME")
        for info, (seconds, micros) in zip(await self._router.call_every_node("INFO"), times, strict=True):
            text = info.decode() if isinstance(info, bytes) else info
            lines = (line.partition(":") for line in text.splitlines())
            node = {name: value for name, colon, value in lines if colon}
            facts.append({**node, "time_ms": str(int(seconds) * 1000 + int(micros) // 1000)})
        try:
            told = [
                await self._router.call_every_node("CONFIG", "GET", name) for name in ("save", "appendfsync")
            ]
        except StorageRefused:
            return facts  # This user may not ask for the configuration.
        for name, replies in zip(("save", "appendfsync"), told, strict=True):
            for node, reply in zip(facts, replies, strict=True):
                [*_, value] = reply.values() if isinstance(reply, dict) else reply
                node[name] = value.decode() if isinstance(value, bytes) else str(value)
        return facts

    async def shift_clock(self, queue: str, ms: int, *, jump: bool = False) -> None:
        """As ``Storage.shift_clock``."""
        await self._calls.call(queue, "shift_clock", ms, "1" if jump else "")


for _name, _verb in inspect.getmembers(Storage, inspect.iscoroutinefunction):
    setattr(ValkeyStorage, _name, _answered(getattr(ValkeyStorage, _name)))
ValkeyStorage.server_facts = _answered(ValkeyStorage.server_facts)  # type: ignore[method-assign, assignment]
