"""Notice that a server was restarted or replaced since a queue was last used.

A queue keeps the run id of the server that it was used on (``recognise`` in ``lua/renew_epoch.lua``). A process tells
it the server's run id before its first call, and again when a connection leads to another one, before anybody uses
that connection. If they differ, fencing tokens jump ahead, so that none comes back even if writes were lost. The epoch
changes if writes may have been lost: the server was a replica of the earlier one, it began with a snapshot, or this
process was told of more than there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.core.text import get_logger
from penstock.errors import StorageError, StorageUnavailable
from penstock.storage.valkey.library import Keys, Library
from penstock.storage.valkey.replies import Arg, Caller, Server, check_server

_log: Final = get_logger("penstock.storage")
_warned: Final[set[str]] = set()  # run ids of servers


class Identity:
    """The servers that one process knows its queues on. ``seen`` gives the highest number and the highest event
    of a queue that it was told of."""

    def __init__(self, keys: Keys, functions: Library, *, seen: Callable[[str], tuple[int, int]]) -> None:
        self._keys = keys
        self._library = functions
        self._seen = seen
        self._servers: dict[str, str] = {}
        self._connected: dict[str, Server] = {}

    async def prepare(self, caller: Caller) -> None:
        """Make a new connection ready: a server new enough, the library, and the queues that are known here."""
        server = await check_server(caller)
        self._connected[server.run_id] = server
        await self._library.ensure(caller)
        moved = [queue for queue, known in self._servers.items() if not known.startswith(server.run_id)]
        # A node of a cluster answers for those that it has. The others wait until theirs is connected to.
        await asyncio.gather(*(self.recognise(caller, queue, server) for queue in moved))

    def warn(self) -> None:
        """Log what is wrong with how the servers keep jobs: once per process and server."""
        for run_id, server in self._connected.items():
            if run_id not in _warned:
                _warned.add(run_id)
                _log_doubts(server)

    async def recognise(self, caller: Caller, queue: str, server: Server) -> None:
        """Tell a queue which server it is on. An error reply is left to the call that follows."""
        known, (seq, events) = self._servers.get(queue, ""), self._seen(queue)
        here = server.run_id + server.history
        began_ms = server.up_ms if server.from_snapshot else -1
        args: list[Arg] = [server.run_id, server.history, server.earlier, began_ms, known, seq, events]
        function = self._library.function("recognise")
        try:
            renewed = await caller.call("FCALL", function, 2, *self._keys.declared(queue), *args)
        except StorageUnavailable:
            raise
        except StorageError:
            return
        self._servers[queue] = here
        if renewed:
            _log.warning("queue %r may have lost its last writes: its event log begins a new epoch", queue)


def _log_doubts(server: Server) -> None:
    if not server.appends:
        _log.warning(
            "the %s server has no append-only file: if it dies, accepted jobs and results are lost. "
            "Set 'appendonly yes'",
            server.name,
        )
    if server.eviction != "noeviction":
        _log.warning(
            "the %s server deletes jobs when its memory is full (maxmemory-policy %s). "
            "Set 'maxmemory-policy noeviction'",
            server.name,
            server.eviction,
        )
