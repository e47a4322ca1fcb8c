"""The server of a work queue, given by a URL or by a client, for each event loop that uses it."""

from __future__ import annotations

import inspect
from typing import Any

from penstock.errors import InvalidOption
from penstock.loops import PerLoop
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.router import ClientRouter, Router, router_for

__all__ = ["Server"]


class Server:
    """``given`` is a URL, as in ``docs/stores.md``, or an asyncio client of redis-py or valkey-py.

    With a URL each event loop gets connections of its own, which end with it. A client stays the caller's to
    close, and serves its own event loop only. Raises ``InvalidOption``; connects when first used.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._endpoint = Endpoint.parse(given) if isinstance(given, str) else None
        if self._endpoint is None and not inspect.iscoroutinefunction(
            getattr(given, "execute_command", None)
        ):
            raise InvalidOption(
                f"a work queue cannot use a {type(given).__qualname__}: it is neither a URL nor an asyncio client. "
                "Give redis.asyncio.Redis(...), or the URL; from synchronous code, the URL and .sync."
            )
        self._routers = PerLoop(self._connect, end=lambda router: router.close())
        self.router = self._routers.get
        self.close = self._routers.close

    @property
    def is_cluster(self) -> bool:
        if self._endpoint is not None:
            return self._endpoint.topology == "cluster"
        return hasattr(self._given, "get_node_from_key")

    def __str__(self) -> str:
        return "a client passed in" if self._endpoint is None else str(self._endpoint)

    async def _connect(self) -> Router:
        endpoint = self._endpoint
        router: Router = ClientRouter(self._given) if endpoint is None else router_for(endpoint)
        await router.connect()
        return router
