"""One writer per output: a run of ``process`` is itself a job, and its lease is the right to write.

So the lease is fenced, kept alive by a heartbeat, and free again soon after its holder was killed; and a run can be
looked at, followed and cancelled like any job. Every output has a queue of its own, ``penstock.output.<hash>``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import threading
import time
from hashlib import blake2b
from types import TracebackType
from typing import Final

import msgspec

from penstock.core.ids import uuid7
from penstock.core.job import Job, Lease, NewJob, Options
from penstock.core.lifecycle import State
from penstock.core.outcome import Cancel, Complete, Fail, Failure, Outcome
from penstock.errors import StorageError
from penstock.spark.errors import OutputBusy
from penstock.spark.store import Store
from penstock.storage.values import Held, Report, Settlement, Take

__all__ = ["OutputLease", "Runner", "output_name"]

logger = logging.getLogger("penstock.spark")

_JOB: Final = "run"
_LEASE_MS: Final = 20_000
_BEAT_S: Final = 4.0
_OPTIONS: Final = Options(task="penstock.process", attempts=1, max_stalls=1_000_000)


class Runner(msgspec.Struct, frozen=True):
    """Who runs, for whoever finds the output taken."""

    run_id: str
    output: str
    host: str
    pid: int


def output_name(output: str) -> str:
    """A short name for an output, for queues and consumers."""
    return blake2b(output.encode(), digest_size=8).hexdigest()


class OutputLease:
    """Held within a ``with`` block. ``is_lost`` and ``is_cancelled`` are for whoever is about to write or go on.

    Raises (on entering): ``OutputBusy``, if another run holds it and lives.
    """

    def __init__(self, url: str, output: str, run_id: str) -> None:
        self._url = url
        self._queue = f"penstock.output.{output_name(output)}"
        self._runner = Runner(run_id, output, platform.node(), os.getpid())
        self._worker = f"process-{uuid7()}"
        self._lease: Lease | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress: bytes | None = None
        self.is_lost = False
        self.is_cancelled = False

    def __enter__(self) -> OutputLease:
        with Store(self._url) as store:
            self._lease = store.run(self._take(store))
        self._thread = threading.Thread(target=self._beat, name="penstock-output-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lease is not None
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        outcome: Outcome = Complete(self._progress or b"null")
        if self.is_cancelled:
            outcome = Cancel()
        elif error is not None:
            outcome = Fail(Failure(type(error).__qualname__, str(error)[:1000]), final=True)
        with Store(self._url) as store:
            settlement = Settlement(self._lease.id, self._lease.token, outcome)
            store.run(store.storage.settle(self._queue, [settlement]))

    def report(self, progress: object) -> None:
        """What the run's job shows as its progress, and in the end as its result; sent with the next heartbeat."""
        self._progress = msgspec.json.encode(progress)

    async def _take(self, store: Store) -> Lease:
        """The lease. If it is held, wait for as long as its holder has to renew it: one that was killed does not."""
        storage = store.storage
        deadline = time.monotonic() + 2 * _LEASE_MS / 1000
        seen_until = 0
        while True:
            await storage.sweep(self._queue)
            new = NewJob(_JOB, msgspec.json.encode(self._runner), _OPTIONS)
            (answer,) = await storage.enqueue(self._queue, [new])
            if answer.status == "completed":
                await storage.remove(self._queue, [_JOB])
                continue
            claimed = await storage.claim(self._queue, Take(self._worker, 1, _LEASE_MS))
            if claimed.leases:
                return claimed.leases[0]
            (job,) = await storage.get(self._queue, [_JOB])
            if job is not None and job.state is State.ACTIVE:
                if (seen_until and job.lease_until_ms > seen_until) or time.monotonic() > deadline:
                    raise _busy(job)
                if not seen_until:
                    logger.warning(
                        "the output is held by a run that may be dead; waiting for its lease to end"
                    )
                seen_until = job.lease_until_ms
            await asyncio.sleep(0.5)

    def _beat(self) -> None:
        """Until told to stop, or no longer the holder."""
        while not self._stop.wait(_BEAT_S):
            try:
                with Store(self._url) as store:
                    while not self.is_lost and not self._stop.wait(_BEAT_S):
                        store.run(self._extend(store))
                return
            except StorageError as error:
                logger.warning("the heartbeat of the run failed and will be repeated: %s", error)

    async def _extend(self, store: Store) -> None:
        assert self._lease is not None
        held = Held(self._lease.id, self._lease.token)
        (answer,) = await store.storage.extend(self._queue, [held], worker=self._worker, lease_ms=_LEASE_MS)
        self.is_lost = answer == "lost"
        self.is_cancelled = self.is_cancelled or answer == "cancel"
        if self._progress is not None:
            await store.storage.report(self._queue, [Report(*held, progress=self._progress)])


def _busy(job: Job) -> OutputBusy:
    runner = msgspec.json.decode(job.payload, type=Runner)
    return OutputBusy(
        f"{runner.output} is being written by another run: {runner.run_id}, process {runner.pid} on {runner.host}. "
        "Wait for its end, cancel it, or give another output."
    )
