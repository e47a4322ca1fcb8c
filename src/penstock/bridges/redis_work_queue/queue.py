"""The server of a work queue, given by a URL or by a client, for each event loop that uses it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from penstock.bridges.redis_work_queue.cleaning import Cleaned, Cleaner
from penstock.bridges.redis_work_queue.layout import Item, Keys, Verb, run_script, wire_id
from penstock.client.session import PerLoop
from penstock.core.names import uuid7
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption, StorageUnavailable
from penstock.storage.valkey.client import ClientRouter
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.routers import Router, router_for

if TYPE_CHECKING:
    from penstock.bridges.redis_work_queue.sync import SyncWorkQueue
    from penstock.storage.valkey.replies import Again, Arg


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


# A work queue in the layout of redis-work-queue, shared with that project's clients in other languages.
#
# Compatible on the wire, and strict where the published clients (0.1) are not. Every step here is one
# script that runs inside the server as a whole, or one command:
#
# | step | atomically | |---|---| | add | write the data, then push the id: whoever takes the id finds the
# data | | lease | move the id from the queue to processing, look for data and leases, write the lease | |
# complete | remove the id from processing, then the leases, then the data | | clean, per item | see that
# there are data and no lease; remove from processing, then push to the queue |
#
# Only a lease that has to wait takes two: the server cannot wait inside a script, so it moves the id
# first. An id whose taker dies in between, or is cancelled, is in processing without a lease, where a
# light clean finds it; and if a cleaner comes in between, the second step sees that the id is gone and
# waits for another.


_ADDS_AT_ONCE: Final = 500
_STEPS_AT_ONCE: Final = 1000
# As OURS in lua/prelude.lua.
_OUR_LEASES: Final = "penstock-"
# Longer waits are made of these, so that a client's socket timeout (5 s in redis-py) is never reached.
_LONGEST_WAIT_S: Final = 2.0


class Lengths(NamedTuple):
    """How many entries the lists have."""

    queue: int
    processing: int


class WorkQueue:
    """The queue with the key prefix ``prefix`` on ``server``.

    ``server`` is a URL (``valkey://``, ``redis://``, with TLS, Sentinel or Cluster, see ``docs/stores.md``) or an
    asyncio client of redis-py or valkey-py. All methods raise ``StorageError`` if the server is away or refuses.

    In a cluster the prefix must carry a hash tag (``{jobs}``), in all clients: the layout has none of its own. No
    prefix may be another one's with ``:item:`` behind it: their keys would be mistaken for each other.
    """

    def __init__(self, server: Any, prefix: str) -> None:
        self._server = Server(server)
        self._keys = Keys(prefix, in_cluster=self._server.is_cluster)

    def __repr__(self) -> str:
        return f"<WorkQueue {self.prefix!r} on {self._server}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def prefix(self) -> str:
        return self._keys.prefix.decode()

    @property
    def sync(self) -> SyncWorkQueue:
        """The same for synchronous code."""
        from penstock.bridges.redis_work_queue.sync import SyncWorkQueue

        return SyncWorkQueue(self)

    async def add_item(self, item: Item) -> bool:
        """Add an item; false, and nothing is written, if one with its id exists: waiting, leased or abandoned.

        Repeated by itself if the connection is lost; then false may mean that the first attempt had added it.
        """
        [added] = await self.add_items([item])
        return added

    async def add_items(self, items: Iterable[Item]) -> list[bool]:
        """Add items in this order, as ``add_item`` does, in a round trip per 500, each of them atomic."""
        return await self._add(list(items), b"checked")

    async def add_unique_item(self, item: Item) -> None:
        """Add an item whose id is known to be new, without the check.

        If it is not new the data are replaced and the id is in the queue twice: lengths are wrong until a deep
        clean. Our leases step over the surplus entry; the published clients hand the item out again.
        """
        await self._add([item], b"unchecked")

    async def lease(self, lease: Duration, *, wait: Duration | None = None) -> Item | None:
        """Take the next item for ``lease``: complete it within that time, or it counts as abandoned.

        Waits for an item; with ``wait``, at most so long, and gives ``None`` if there was none; ``wait=0`` does not
        wait. Ids without an item are removed on the way. An item that somebody holds is not handed out a second
        time. Nothing renews the lease, and no item comes back without a cleaner.
        """
        lease_ms = milliseconds(lease, what="lease")
        if lease_ms < 1:
            raise InvalidOption(f"lease={lease!r} is over at once. Give a time longer than the work takes.")
        loop = asyncio.get_running_loop()
        until = None if wait is None else loop.time() + milliseconds(wait, what="wait") / 1000
        # The layout calls this the session's id. Ours is the lease's own, so that two of one process are not confused.
        holder, moved = f"{_OUR_LEASES}{uuid7()}", b""
        while True:
            reply = await self._run("take", holder, lease_ms, _STEPS_AT_ONCE, moved)
            if isinstance(reply, list):
                return Item.from_wire(*reply, lease=holder)
            moved = b""
            if reply == 0:
                rest = _LONGEST_WAIT_S if until is None else until - loop.time()
                if rest <= 0:
                    return None
                moved = await self._move_next(min(rest, _LONGEST_WAIT_S))

    async def complete(self, item: Item) -> bool:
        """End an item that was leased, here or by another client. True for exactly one caller per item.

        False if it has ended, or is somebody else's by now (waiting again, or leased again): then it is run again.
        A lease that is over counts as long as no cleaner has seen that. Items made by hand, that know no lease, are
        completed whoever holds them, as the other clients do.

        Raises ``StorageUnavailable`` too if the connection was lost and it cannot be known whose the completion was.
        """
        args = (wire_id(item.id), item.lease)
        repeats = 0

        def again() -> tuple[Arg, ...]:
            nonlocal repeats
            repeats += 1
            return (self._keys.prefix, *args)

        completed = bool(await self._run("complete", *args, again=again))
        if repeats and not completed:
            raise StorageUnavailable(
                f"the connection was lost while item {item.id!r} was being completed, so nobody can tell whether this "
                "call or another did it. If the item is leased again it was neither."
            )
        return completed

    async def light_clean(self, *, grace: Duration = "1s") -> Cleaned:
        """Put items back whose lease is over, or was never written: of all that are being processed.

        Also what a cleaner of the published clients had in hand when it died. Run it about as often as the shortest
        lease lasts. Its cost goes by what is being processed; with something to do it takes ``grace`` besides (the
        module ``cleaning`` says why).
        """
        return await (await self._cleaner(grace)).clean_lightly()

    async def deep_clean(self, *, grace: Duration = "1s") -> Cleaned:
        """Put back every item that exists, is in no list and has no lease, and remove every entry too many.

        For what died in the middle of a step. Walks over all keys of the server (SCAN, no KEYS), and reads all ids
        of the queue: run it seldom. It includes a light clean.
        """
        return await (await self._cleaner(grace)).clean_deeply()

    async def queue_len(self) -> int:
        """How many entries wait; those being processed are not among them."""
        return (await self.lengths()).queue

    async def processing(self) -> int:
        """How many entries are being processed, or were abandoned and no cleaner has seen it yet."""
        return (await self.lengths()).processing

    async def lengths(self) -> Lengths:
        """Both, as of one instant."""
        return Lengths(*await self._run("lengths"))

    async def close(self) -> None:
        """Close the connections; a client passed in stays open. The next call connects again."""
        await self._server.close()

    async def _add(self, items: list[Item], mode: bytes) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(items), _ADDS_AT_ONCE):
            pairs = [
                part
                for item in items[start : start + _ADDS_AT_ONCE]
                for part in (wire_id(item.id), item.data)
            ]
            # A repeat is checked always: the first attempt may have arrived.
            answers += map(
                bool, await self._run("add", mode, *pairs, again=_checked(self._keys.prefix, pairs))
            )
        return answers

    async def _move_next(self, seconds: float) -> bytes:
        """Wait for an id to move from the queue to processing; empty if none came, or nobody can tell."""
        keys = self._keys
        command = ("BLMOVE", keys.queue, keys.processing, "RIGHT", "LEFT", seconds)
        router = await self._server.router()
        try:
            return await router.call_blocking(keys.queue, *command, timeout=seconds) or b""
        except StorageUnavailable:  # the next call insists, or says so
            return b""

    async def _cleaner(self, grace: Duration) -> Cleaner:
        grace_ms = milliseconds(grace, what="grace")
        return Cleaner(await self._server.router(), self._keys, grace_ms=grace_ms)

    async def _run(self, verb: Verb, *args: Arg, again: Again | None = None) -> Any:
        router = await self._server.router()
        return await run_script(
            router, verb, keys=self._keys.lists, args=(self._keys.prefix, *args), again=again
        )


def _checked(prefix: bytes, pairs: list[bytes]) -> Again:
    return lambda: (prefix, b"checked", *pairs)
