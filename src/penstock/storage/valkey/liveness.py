"""Proof that a worker's process died: the server no longer has the connection that showed it was alive.

A worker announces the server's run id and the client id of a connection that it keeps open (``Node.lifeline``). The
kernel closes the connection when the process ends, however it ends; a process that is suspended, or too busy to send
heartbeats, keeps it. A worker whose connection was cut announces another one within moments. So one look is not
enough: the announcement must be unchanged, and its connection gone, ``CONFIRM_S`` later. A client that was itself cut
off a moment ago proves nothing, because others may have been cut off too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from typing import Final

from penstock.core.text import get_logger
from penstock.errors import StorageError, StorageRefused
from penstock.storage.valkey.calls import Calls
from penstock.storage.valkey.replies import ReplyError, run_id

logger = get_logger("penstock.storage")

CONFIRM_S: Final = 2.0
_DISTRUST_S: Final = 10.0
_WITHDRAW_S: Final = 1.0
_CLIENT: Final = re.compile(rb"^id=(\d+) ", re.MULTILINE)


class Liveness:
    """Announces the workers of one client, and checks those of others."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._announced: dict[tuple[str, str], str] = {}
        # Proven for good: within one run of a server, no client id is used twice.
        self._proven: dict[tuple[str, str], str] = {}
        self._is_refused = False

    async def announce(self, queue: str, worker: str, lost: Callable[[], None]) -> None:
        if self._is_refused:
            return
        try:
            life = await self._calls.router.lifeline(self._calls.keys.part(queue, "lifeline"), lost=lost)
            await self._write(queue, worker, life)
        except (ReplyError, StorageRefused) as error:
            self._refused(error)
        except StorageError as error:
            logger.debug("worker %s is not announced for queue %s: %s", worker, queue, error)

    async def withdraw(self) -> None:
        """Delete this client's announcements: it closes, although its process may live on."""
        try:
            async with asyncio.timeout(_WITHDRAW_S):
                for queue, worker in list(self._announced):
                    await self._write(queue, worker, "")
        except (StorageError, TimeoutError):
            pass  # The connection closes soon after; then leases that are left come back early.

    async def check(self, queue: str) -> dict[str, bool]:
        """Return whether each announced worker is alive, as far as this client can tell."""
        announced = await self._read(queue)
        alive = await self._alive(queue, announced)
        gone = {worker for worker, is_alive in alive.items() if not is_alive}
        if any(self._proven.get((queue, worker)) != announced[worker] for worker in gone):
            await asyncio.sleep(CONFIRM_S)
            now = await self._read(queue)
            again = await self._alive(queue, {w: now[w] for w in gone if now.get(w) == announced[w]})
            alive = {worker: again.get(worker, True) if worker in gone else True for worker in alive}
            self._proven |= {(queue, w): announced[w] for w, is_alive in alive.items() if not is_alive}
        return alive

    async def _write(self, queue: str, worker: str, life: str) -> None:
        if self._announced.get((queue, worker), "") == life:
            return
        key = self._calls.keys.part(queue, "lives")
        command = ("HSET", key, worker, life) if life else ("HDEL", key, worker)
        await self._calls.plain(key, *command)
        self._announced[queue, worker] = life

    async def _read(self, queue: str) -> dict[str, str]:
        key = self._calls.keys.part(queue, "lives")
        rows = [text.decode() for text in await self._calls.plain(key, "HGETALL", key)]
        return dict(zip(rows[::2], rows[1::2], strict=True))

    async def _alive(self, queue: str, announced: Mapping[str, str]) -> dict[str, bool]:
        """Return which of the announced connections to this run of the server it still has."""
        own = {w for w, life in announced.items() if self._announced.get((queue, w)) == life}
        gone = {w for w, life in announced.items() if self._proven.get((queue, w)) == life}
        alive = dict.fromkeys(own, True) | dict.fromkeys(gone, False)
        unknown = {w: life.partition(" ")[::2] for w, life in announced.items() if w not in alive}
        if not unknown or self._is_refused or self._was_cut_off(queue):
            return alive
        try:
            clients = await self._clients(queue, [client for _, client in unknown.values()])
            if all(client in clients for _, client in unknown.values()):  # nearly always
                return alive | dict.fromkeys(unknown, True)
            return alive | await self._examine(queue, unknown)
        except (ReplyError, StorageRefused) as error:
            self._refused(error)
            return alive

    async def _examine(self, queue: str, announced: Mapping[str, tuple[str, ...]]) -> dict[str, bool]:
        """Return which workers have a connection here, of those that announced one to this run of this server."""
        before = await self._run_id(queue)
        here = {worker: client for worker, (server, client) in announced.items() if server == before}
        clients = await self._clients(queue, here.values()) if here else set()
        # If the run id is the same before and after, the list in between is that server's.
        if await self._run_id(queue) != before:
            return {}
        return {worker: client in clients for worker, client in here.items()}

    def _was_cut_off(self, queue: str) -> bool:
        cut_at = self._calls.router.cut_at(self._calls.keys.of(queue))
        return asyncio.get_running_loop().time() - cut_at < _DISTRUST_S

    async def _run_id(self, queue: str) -> str:
        return run_id(await self._calls.plain(self._calls.keys.of(queue), "INFO", "server"))

    async def _clients(self, queue: str, ids: Collection[str]) -> set[str]:
        listed: bytes = await self._calls.plain(
            self._calls.keys.of(queue), "CLIENT", "LIST", "ID", *sorted(ids)
        )
        return {client.decode() for client in _CLIENT.findall(listed)}

    def _refused(self, error: StorageError) -> None:
        self._is_refused = True
        logger.info("deaths of workers show only when their leases run out: %s", error)
