"""Forwarding: move items from a work queue into a queue of Penstock while producers still write to the former."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from penstock.bridges.redis_work_queue.layout import Item
from penstock.core.units import Duration
from penstock.errors import InvalidInput, StorageUnavailable

if TYPE_CHECKING:
    from penstock.bridges.redis_work_queue.queue import WorkQueue
    from penstock.client.options import JobOptions
    from penstock.client.queue import Queue


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
    No item is doubled: a returned item finds its job by id, in whatever state, for as long as the job is kept
    (``result_ttl``, default 1 h; make it longer than the lease and the interval of cleans). So an id that is added
    again while its old job is kept counts as known; ``on_conflict`` can change that.

    This runs until it is cancelled, or until no item arrives for ``wait``. Several may run in parallel. ``payload``
    turns an item into a payload: its JSON, or ``lambda item: item.data`` for a queue with ``serde="raw"``. ``task`` and
    further options are those of ``Queue.enqueue``.

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
            # The item is completed, or returns and finds its job. If the server is away, the next lease raises.
            pass
        if job.status == "queued":
            queued += 1
        else:
            known += 1
    return Forwarded(queued, known)
