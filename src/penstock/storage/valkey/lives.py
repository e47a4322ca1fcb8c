"""Proof that a worker's process has died: the server no longer has the connection by which it showed that it lives.

A worker announces the server's run id and the id of a connection that it keeps open (``Node.line``). The kernel closes
that when the process ends, however it ends; a process that is suspended, or too busy to beat, keeps it. A worker whose
connection was cut announces another one within moments, so one look is not enough: what was announced has to be the
same, and gone, ``CONFIRM_S`` later. A client that was itself cut off a moment ago proves nothing: others may have been
cut off, too.
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


class Lives:
    """Announces the workers of one client, and looks at those of others."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._announced: dict[tuple[str, str], str] = {}
        # Proven for good: within one run of a server no client id comes back.
        self._proven: dict[tuple[str, str], str] = {}
        self._is_refused = False

    async def announce(self, queue: str, worker: str, lost: Callable[[], None]) -> None:
        """As ``Storage.announce``."""
        if self._is_refused:
            return
        try:
            life = await self._calls.router.line(self._calls.keys.part(queue, "lifeline"), lost=lost)
            await self._say(queue, worker, life)
        except (ReplyError, StorageRefused) as error:
            self._refused(error)
        except StorageError as error:
            logger.debug("worker %s is not announced for queue %s: %s", worker, queue, error)

    async def withdraw(self) -> None:
        """Take back what was announced: this client goes, and its process need not have died."""
        try:
            async with asyncio.timeout(_WITHDRAW_S):
                for queue, worker in list(self._announced):
                    await self._say(queue, worker, "")
        except (StorageError, TimeoutError):
            pass  # The connection is closed soon after; leases that are left then come back early.

    async def look(self, queue: str) -> dict[str, bool]:
        """As ``Storage.lives``."""
        announced = await self._read(queue)
        found = await self._seen(queue, announced)
        gone = {worker for worker, is_there in found.items() if not is_there}
        if any(self._proven.get((queue, worker)) != announced[worker] for worker in gone):
            await asyncio.sleep(CONFIRM_S)
            now = await self._read(queue)
            again = await self._seen(queue, {w: now[w] for w in gone if now.get(w) == announced[w]})
            found = {worker: again.get(worker, True) if worker in gone else True for worker in found}
            self._proven |= {(queue, w): announced[w] for w, is_there in found.items() if not is_there}
        return found

    async def _say(self, queue: str, worker: str, life: str) -> None:
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

    async def _seen(self, queue: str, announced: Mapping[str, str]) -> dict[str, bool]:
        """Return whose connections this server has, of those it had. Of earlier runs it knows none."""
        own = {w for w, life in announced.items() if self._announced.get((queue, w)) == life}
        gone = {w for w, life in announced.items() if self._proven.get((queue, w)) == life}
        found = dict.fromkeys(own, True) | dict.fromkeys(gone, False)
        asked = {w: life.partition(" ")[::2] for w, life in announced.items() if w not in found}
        if not asked or self._is_refused or self._was_cut_off(queue):
            return found
        try:
            there = await self._clients(queue, [client for _, client in asked.values()])
            if all(client in there for _, client in asked.values()):  # as nearly always
                return found | dict.fromkeys(asked, True)
            return found | await self._examine(queue, asked)
        except (ReplyError, StorageRefused) as error:
            self._refused(error)
            return found

    async def _examine(self, queue: str, asked: Mapping[str, tuple[str, ...]]) -> dict[str, bool]:
        """Return who has a connection here, of those who had one to this run of this server."""
        before = await self._run_id(queue)
        here = {worker: client for worker, (server, client) in asked.items() if server == before}
        clients = await self._clients(queue, here.values()) if here else set()
        # The same before and after: the list in between is of that server.
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
        logger.info("deaths of workers are noticed by their leases only: %s", error)
