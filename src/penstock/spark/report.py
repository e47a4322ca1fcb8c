"""The report of a write, kept in the store as a finished job of the queue ``penstock.writes``.

So it is read like any job: by id, by ``spark.read``, from the command line.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.core.ids import uuid7
from penstock.core.job import DAY_MS, NewJob, Options
from penstock.core.outcome import Complete
from penstock.errors import JobNotFound
from penstock.spark.rows import Refused
from penstock.spark.store import Store
from penstock.storage.base import Storage
from penstock.storage.values import Settlement, Take

__all__ = ["WRITES", "WriteReport", "keep_report", "write_report"]

WRITES: Final = "penstock.writes"
_KEPT: Final = Options(task="penstock.write", result_ttl_ms=7 * DAY_MS, max_stalls=1000)
_LEASE_MS: Final = 30_000


class WriteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a table's rows. ``accepted``: jobs put in. ``duplicate``: rows whose job was there already, or is
    that of an equal key; a task that Spark repeats finds its own. ``refused``: rows that cannot be jobs, with some
    ``examples``."""

    write_id: str
    queue: str
    task: str
    accepted: int
    duplicate: int
    refused: int
    examples: tuple[Refused, ...] = ()


def write_report(url: str, write_id: str) -> WriteReport:
    """The report of a save by its ``writeId``, for a week.

    Raises:
        JobNotFound: there is none: the save has not ended, or it was too long ago.
    """
    with Store(url) as store:
        (job,) = store.run(store.storage.get(WRITES, [write_id]))
    if job is None:
        raise JobNotFound(
            f"there is no report of a write {write_id!r}: it has not ended, or ended more than a week ago.",
            job_id=write_id,
        )
    return msgspec.json.decode(job.payload, type=WriteReport)


async def keep_report(storage: Storage, report: WriteReport) -> None:
    """Keep it for a week; a later one of the same write takes its place."""
    payload = msgspec.json.encode(report)
    await storage.remove(WRITES, [report.write_id])
    await storage.enqueue(WRITES, [NewJob(report.write_id, payload, _KEPT)])
    # Whoever finishes a report, its result is its payload: there is no telling which one a claim brings.
    claimed = await storage.claim(WRITES, Take(f"write-{uuid7()}", 100, _LEASE_MS))
    done = [Settlement(lease.id, lease.token, Complete(lease.payload)) for lease in claimed.leases]
    if done:
        await storage.settle(WRITES, done)
