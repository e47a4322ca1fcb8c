"""Moving work over: from a work queue into a queue of Penstock, while producers still write to the former."""

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
    """How many items went over, and how many were known there by their id."""

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

    None is lost: an item is completed after its job was accepted, and one whose forwarder died comes back by a clean.
    None is doubled: an item that comes back finds its job by the id, whatever has become of it, for as long as that is
    kept (``result_ttl``, 1 h unless set; let it be longer than the lease and the interval of cleans). So an id that
    is added anew while the job before it is kept counts as known; ``on_conflict`` says otherwise.

    Runs until it is cancelled; with ``wait``, until no item came for so long. Several may run at once. ``payload``
    makes the payload of an item: its JSON, or ``lambda item: item.data`` for a queue with ``serde="raw"``. ``task``
    and further options are those of ``Queue.enqueue``.

    Raises ``InvalidInput`` for an item that cannot be a job: it stays in the work queue, and is leased again when a
    clean has seen that its lease is over.
    """
    queued = known = 0
    options.setdefault("on_conflict", "absent")
    while (item := await source.lease(lease, wait=wait)) is not None:
        try:
            options["id"] = item.id
            job = await target.enqueue(payload(item), task=task, **options)
        except InvalidInput as error:
            error.add_note(f"This was item {item.id!r} of work queue {source.prefix!r}, where it stays.")
            raise
        try:
            await source.complete(item)
        except StorageUnavailable:
            # Completed, or it comes back and finds its job. If the server is away, the next lease says so.
            pass
        if job.status == "queued":
            queued += 1
        else:
            known += 1
    return Forwarded(queued, known)
