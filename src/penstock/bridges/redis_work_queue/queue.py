"""A work queue in the layout of redis-work-queue, shared with that project's clients in other languages.

It is compatible on the wire, and strict where the published clients (0.1) are not. Each step is one script that runs
atomically in the server, or one command:

| step | atomically |
|---|---|
| add | write the data, then push the id: a taker of the id finds the data |
| lease | move the id from the queue to processing, check data and leases, write the lease |
| complete | remove the id from processing, then the leases, then the data |
| clean, per item | check that there are data and no lease; remove from processing, then push to the queue |

Only a lease that must wait takes two steps: the server cannot wait inside a script, so it moves the id first. If the
taker dies or is cancelled in between, the id is in processing without a lease, where a light clean finds it. If a
cleaner comes in between, the second step notices that the id is gone and waits for another.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, Unpack

from penstock.bridges.redis_work_queue.layout import Cleaned, Cleaner, Item, Keys, Verb, run_script, wire_id
from penstock.client.loopthread import Face, as_sync
from penstock.client.session import PerLoop
from penstock.core.names import uuid7
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidInput, InvalidOption, StorageUnavailable
from penstock.storage.valkey.client import ClientRouter
from penstock.storage.valkey.commands import Router
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.routers import router_for

if TYPE_CHECKING:
    from penstock.client.options import JobOptions
    from penstock.client.queue import Queue
    from penstock.storage.valkey.commands import Again, Arg


_ADDS_AT_ONCE: Final = 500
_STEPS_AT_ONCE: Final = 1000
# The same as OURS in lua/prelude.lua.
_OUR_LEASES: Final = "penstock-"
# Longer waits are split, so that a client's socket timeout (5 s in redis-py) is never reached.
_LONGEST_WAIT_S: Final = 2.0


class Server:
    """The server of a work queue: ``target`` is a URL, as in ``docs/stores.md``, or a redis-py or valkey-py client.

    With a URL each event loop gets its own connections, which end with it. A client must be an asyncio client; the
    caller closes it, and it works only on its own event loop. Raises ``InvalidOption``; connects on first use.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._endpoint = Endpoint.parse(target) if isinstance(target, str) else None
        if self._endpoint is None and not inspect.iscoroutinefunction(
            getattr(target, "execute_command", None)
        ):
            raise InvalidOption(
                f"a work queue needs a URL or an asyncio client, got {type(target).__qualname__}. "
                "Give redis.asyncio.Redis(...) or the URL; in synchronous code, the URL and .sync."
            )
        self._routers = PerLoop(self._connect, end=lambda router: router.close())
        self.router = self._routers.get
        self.close = self._routers.close

    @property
    def is_cluster(self) -> bool:
        if self._endpoint is not None:
            return self._endpoint.topology == "cluster"
        return hasattr(self._target, "get_node_from_key")

    def __str__(self) -> str:
        return "a client passed in" if self._endpoint is None else str(self._endpoint)

    async def _connect(self) -> Router:
        endpoint = self._endpoint
        router: Router = ClientRouter(self._target) if endpoint is None else router_for(endpoint)
        await router.connect()
        return router


class Lengths(NamedTuple):
    """The number of entries in the lists."""

    queue: int
    processing: int


class WorkQueue:
    """The queue with the key prefix ``prefix`` on ``server``.

    ``server`` is a URL (``valkey://``, ``redis://``, with TLS, Sentinel or Cluster, see ``docs/stores.md``) or an
    asyncio client of redis-py or valkey-py. All methods raise ``StorageError`` if the server is away or refuses.

    In a cluster the prefix must have a hash tag (``{jobs}``) in all clients, because the layout adds none. No prefix
    may be another prefix followed by ``:item:``: their keys would collide.
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
        """Return the same queue for synchronous code."""
        return SyncWorkQueue(self)

    async def add_item(self, item: Item) -> bool:
        """Add an item. Return false, and write nothing, if an item with its id is waiting, leased or abandoned.

        If the connection is lost, the call repeats itself; then false may mean that the first attempt added the item.
        """
        [added] = await self.add_items([item])
        return added

    async def add_items(self, items: Iterable[Item]) -> list[bool]:
        """Add items in this order, as ``add_item`` does, in atomic round trips of up to 500 items."""
        return await self._add(list(items), b"checked")

    async def add_unique_item(self, item: Item) -> None:
        """Add an item without checking that its id is new.

        If the id exists, its data is replaced and the id is in the queue twice: lengths are wrong until a deep clean.
        Penstock's leases skip the surplus entry; the published clients hand out the item again.
        """
        await self._add([item], b"unchecked")

    async def lease(self, lease: Duration, *, wait: Duration | None = None) -> Item | None:
        """Take the next item for ``lease``: complete it within that time, or it counts as abandoned.

        Wait for an item, or return ``None`` after ``wait``; ``wait=0`` does not wait. Ids without an item are removed.
        An item that is leased is not handed out again. Leases are not renewed, and only cleaners return items.
        """
        lease_ms = milliseconds(lease, what="lease")
        if lease_ms < 1:
            raise InvalidOption(f"lease must be longer than 0, and than the work takes, got {lease!r}.")
        loop = asyncio.get_running_loop()
        until = None if wait is None else loop.time() + milliseconds(wait, what="wait") / 1000
        # The layout calls this the session id. Ours is unique per lease, so that two leases of a process
        # differ.
        holder, next_id = f"{_OUR_LEASES}{uuid7()}", b""
        while True:
            reply = await self._run("take", holder, lease_ms, _STEPS_AT_ONCE, next_id)
            if isinstance(reply, list):
                return Item.from_wire(*reply, lease=holder)
            next_id = b""
            if reply == 0:
                rest = _LONGEST_WAIT_S if until is None else until - loop.time()
                if rest <= 0:
                    return None
                next_id = await self._move_next(min(rest, _LONGEST_WAIT_S))

    async def complete(self, item: Item) -> bool:
        """Complete an item that was leased here or by another client. Return true for exactly one caller per item.

        Return false if the item is already completed, or if it waits or is leased again and so runs again. An expired
        lease counts until a cleaner notices it. An item without a lease, created by hand, is completed whatever its
        holder, as the other clients do.

        Raise ``StorageUnavailable`` also if the connection was lost and it is unknown which call completed the item.
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
                f"the connection was lost while completing item {item.id!r}, so it is unknown whether this call or "
                "another completed it. If the item is leased again, neither did."
            )
        return completed

    async def light_clean(self, *, grace: Duration = "1s") -> Cleaned:
        """Return to the queue the items in processing whose lease is over or was never written.

        This includes items that a cleaner of the published clients was handling when it died. Run it about once per
        shortest lease. Its cost depends on the number of items in processing; if it finds any, it takes ``grace``
        longer (see the module ``layout``).
        """
        return await (await self._cleaner(grace)).clean_lightly()

    async def deep_clean(self, *, grace: Duration = "1s") -> Cleaned:
        """Return to the queue every item that is in no list and has no lease, and remove surplus entries.

        This repairs the effects of clients that died in the middle of a step. It scans all keys of the server (SCAN,
        not KEYS) and reads all ids of the queue, so run it rarely. It includes a light clean.
        """
        return await (await self._cleaner(grace)).clean_deeply()

    async def queue_len(self) -> int:
        """Return the number of waiting entries, without those in processing."""
        return (await self.lengths()).queue

    async def processing(self) -> int:
        """Return the number of entries in processing, including abandoned ones that no cleaner has noticed."""
        return (await self.lengths()).processing

    async def lengths(self) -> Lengths:
        """Return both lengths at the same instant."""
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
            # A repeat is always checked, because the first attempt may have arrived.
            answers += map(
                bool, await self._run("add", mode, *pairs, again=_checked(self._keys.prefix, pairs))
            )
        return answers

    async def _move_next(self, seconds: float) -> bytes:
        """Wait for an id to move from the queue to processing; return it, or ``b""`` if none came or it is unknown."""
        keys = self._keys
        command = ("BLMOVE", keys.queue, keys.processing, "RIGHT", "LEFT", seconds)
        router = await self._server.router()
        try:
            return await router.call_blocking(keys.queue, *command, timeout=seconds) or b""
        except StorageUnavailable:  # the next call retries or raises
            return b""

    async def _cleaner(self, grace: Duration) -> Cleaner:
        return Cleaner(await self._server.router(), self._keys, milliseconds(grace, what="grace"))

    async def _run(self, verb: Verb, *args: Arg, again: Again | None = None) -> Any:
        router = await self._server.router()
        return await run_script(
            router, verb, keys=self._keys.lists, args=(self._keys.prefix, *args), again=again
        )


def _checked(prefix: bytes, pairs: list[bytes]) -> Again:
    return lambda: (prefix, b"checked", *pairs)


class Forwarded(NamedTuple):
    """The number of items enqueued, and of those whose id was already known."""

    queued: int = 0
    known: int = 0


async def forward(
    source: WorkQueue,
    target: Queue,
    *,
    payload: Callable[[Item], Any] = Item.json,
    lease: Duration = "1m",
    wait: Duration | None = None,
    task: str = "",
    **options: Unpack[JobOptions],
) -> Forwarded:
    """Lease item after item, enqueue each with its id as the job's id, then complete it.

    No item is lost: an item is completed after its job was accepted, and a clean returns the items of a dead forwarder.
    No item becomes two jobs: a returned item finds its job by id, in whatever state, for as long as the job is kept
    (``result_ttl``, default 1 h; make it longer than the lease and the interval of cleans). So an id that is added
    again while its old job is kept counts as known; ``on_conflict`` can change that.

    This runs until it is cancelled, or until no item arrives for ``wait``. Several calls may run in parallel.
    ``payload`` turns an item into a payload: its JSON, or ``lambda item: item.data`` for a queue with ``serde="raw"``.
    ``task`` and further options are those of ``Queue.enqueue``.

    Raise ``InvalidInput`` for an item that cannot become a job: it stays in the work queue, and is leased again when
    its lease is over and a clean has returned it.
    """
    queued = known = 0
    options.setdefault("on_conflict", "absent")
    while (item := await source.lease(lease, wait=wait)) is not None:
        try:
            options["id"] = item.id
            job = await target.enqueue(payload(item), task=task, **options)
        except InvalidInput as error:
            error.add_note(f"Item {item.id!r} stays in work queue {source.prefix!r}.")
            raise
        try:
            await source.complete(item)
        except StorageUnavailable:
            # The item is completed, or returns and finds its job. Without the server, the next lease raises.
            pass
        if job.status == "queued":
            queued += 1
        else:
            known += 1
    return Forwarded(queued, known)


class SyncWorkQueue(Face[WorkQueue]):
    """See ``WorkQueue``. Any number of threads may use it."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def prefix(self) -> str:
        return self._target.prefix

    add_item = as_sync(WorkQueue.add_item)
    add_items = as_sync(WorkQueue.add_items)
    add_unique_item = as_sync(WorkQueue.add_unique_item)
    lease = as_sync(WorkQueue.lease)
    complete = as_sync(WorkQueue.complete)
    light_clean = as_sync(WorkQueue.light_clean)
    deep_clean = as_sync(WorkQueue.deep_clean)
    queue_len = as_sync(WorkQueue.queue_len)
    processing = as_sync(WorkQueue.processing)
    lengths = as_sync(WorkQueue.lengths)
    forward = as_sync(forward)
    close = as_sync(WorkQueue.close)
