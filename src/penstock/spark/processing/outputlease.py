"""One writer per output: a run of ``process`` is itself a job, and its lease is the right to write.

So the lease is fenced, a heartbeat extends it, and it expires soon after its holder is killed. A run can be inspected,
followed and cancelled like any job. Every output has its own queue, ``penstock.output.<hash>``.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from hashlib import blake2b
from typing import Final

import msgspec

from penstock.core.job import Job, Lease, NewJob, Options
from penstock.core.lifecycle import State
from penstock.core.text import get_logger
from penstock.spark.driver_lease import LEASE_MS, DriverLease
from penstock.spark.errors import OutputBusy
from penstock.spark.publishing import local_path
from penstock.spark.store import Store
from penstock.storage.values import Take

logger = get_logger("penstock.spark")

_JOB: Final = "run"
_OPTIONS: Final = Options(task="penstock.process", attempts=1, max_stalls=1_000_000)


class Runner(msgspec.Struct, frozen=True):
    """The run that holds the output, for the error message of the next one."""

    run_id: str
    output: str
    host: str
    pid: int


def output_identity(output: str, *, is_path: bool) -> str:
    """Return an identity that all spellings of an output share. It is absolute, because several folders may share a
    store."""
    if not is_path:
        return f"table:{output}"
    here = local_path(output)
    return output.rstrip("/") if here is None else os.path.abspath(here)


def output_name(output: str) -> str:
    """Return a short name for the identity of an output, for queues and consumers."""
    return blake2b(output.encode(), digest_size=8).hexdigest()


class OutputLease(DriverLease):
    """The right to write to an output, given its identity.

    Raises (on entering): ``OutputBusy``, if a live run holds it.
    """

    def __init__(self, url: str, output: str, run_id: str) -> None:
        super().__init__(url, f"penstock.output.{output_name(output)}", holder="process")
        self._runner = Runner(run_id, output, platform.node(), os.getpid())

    async def take(self, store: Store) -> Lease:
        """Return the lease. If it is taken, wait until its holder either renews it or turns out to be dead."""
        storage = store.storage
        deadline = time.monotonic() + 2 * LEASE_MS / 1000
        seen_until = 0
        while True:
            await storage.sweep(self._queue)
            new = NewJob(_JOB, msgspec.json.encode(self._runner), _OPTIONS)
            (answer,) = await storage.enqueue(self._queue, [new])
            if answer.status == "completed":
                await storage.remove(self._queue, [_JOB])
                continue
            claimed = await storage.claim(self._queue, Take(self._worker, 1, LEASE_MS))
            if claimed.leases:
                return claimed.leases[0]
            (job,) = await storage.get(self._queue, [_JOB])
            if job is not None and job.state is State.ACTIVE:
                if (seen_until and job.lease_until_ms > seen_until) or time.monotonic() > deadline:
                    raise _busy(job)
                if not seen_until:
                    logger.warning(
                        "the output is held by a run that may be dead; waiting for its lease to expire"
                    )
                seen_until = job.lease_until_ms
            await asyncio.sleep(0.5)


def _busy(job: Job) -> OutputBusy:
    runner = msgspec.json.decode(job.payload, type=Runner)
    return OutputBusy(
        f"{runner.output} is being written by another run: {runner.run_id}, process {runner.pid} on {runner.host}. "
        "Wait until it finishes, cancel it, or choose another output."
    )
