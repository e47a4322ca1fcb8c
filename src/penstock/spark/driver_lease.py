"""A job that a driver holds to show that it is alive. A heartbeat extends its lease until the driver dies.

``OutputLease`` is the lease that ``process`` takes: the right to write to an output.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import FrameType
from typing import Final, Self

import msgspec

from penstock.core.job import Job, Lease, NewJob, Options
from penstock.core.lifecycle import State
from penstock.core.names import uuid7
from penstock.core.outcome import Cancel, Complete, Fail, Failure, Outcome
from penstock.core.text import get_logger
from penstock.errors import OutputBusy, StorageError
from penstock.spark.publishing import local_path
from penstock.spark.store import Store
from penstock.storage.contract import Storage
from penstock.storage.values import Held, Report, Settlement, Take

logger = get_logger("penstock.spark")

LEASE_MS: Final = 20_000
_BEAT_S: Final = 4.0


class LeaseCheck(msgspec.Struct, frozen=True):
    """A lease that other processes can check."""

    url: str
    queue: str
    id: str
    token: int

    async def is_held(self, storage: Storage) -> bool:
        """Return whether the driver that created this check still holds the lease."""
        await storage.sweep(self.queue)
        (job,) = await storage.get(self.queue, [self.id])
        return job is not None and job.state is State.ACTIVE and job.token == self.token


class DriverLease(ABC):
    """A job held within a ``with`` block. Check ``is_lost`` before a write, and ``is_cancelled`` before going on."""

    def __init__(self, url: str, queue: str, *, holder: str) -> None:
        self._url = url
        self._queue = queue
        self._worker = f"{holder}-{uuid7()}"
        self._lease: Lease | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress: bytes | None = None
        self.is_lost = False
        self.is_cancelled = False

    @abstractmethod
    async def take(self, store: Store) -> Lease:
        """Return the lease. Enqueue the job first if necessary."""

    def __enter__(self) -> Self:
        with Store(self._url) as store:
            self._lease = store.run(self.take(store))
        self._thread = threading.Thread(target=self._beat, name="penstock-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._lease is not None
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        outcome: Outcome = Complete(self._progress or b"null")
        if self.is_cancelled or isinstance(error, KeyboardInterrupt):
            outcome = Cancel()
        elif error is not None:
            outcome = Fail(Failure(type(error).__qualname__, str(error)[:1000]), final=True)
        with Store(self._url) as store:
            settlement = Settlement(self._lease.id, self._lease.token, outcome)
            store.run(store.storage.settle(self._queue, [settlement]))

    @property
    def lease_check(self) -> LeaseCheck:
        """Return the check for this lease. Call it only while the lease is held."""
        assert self._lease is not None
        return LeaseCheck(self._url, self._queue, self._lease.id, self._lease.token)

    @property
    def began_at_ms(self) -> int:
        """Return when the lease was taken, on the store's clock."""
        assert self._lease is not None
        return self._lease.claimed_at_ms

    def report(self, progress: object) -> None:
        """Set the progress of the job, which is also its result in the end. The next heartbeat sends it."""
        self._progress = msgspec.json.encode(progress)

    def _beat(self) -> None:
        """Extend the lease until it is released or lost."""
        while not self._stop.wait(_BEAT_S):
            try:
                with Store(self._url) as store:
                    # Extend it at once: if the store was away, little of the lease is left.
                    store.run(self._extend(store))
                    while not self.is_lost and not self._stop.wait(_BEAT_S):
                        store.run(self._extend(store))
                return
            except StorageError as error:
                logger.warning("the heartbeat of the run failed; retrying: %s", error)

    async def _extend(self, store: Store) -> None:
        assert self._lease is not None
        held = Held(self._lease.id, self._lease.token)
        (answer,) = await store.storage.extend(self._queue, [held], worker=self._worker, lease_ms=LEASE_MS)
        self.is_lost = answer == "lost"
        self.is_cancelled = self.is_cancelled or answer == "cancel"
        if self._progress is not None:
            await store.storage.report(self._queue, [Report(*held, progress=self._progress)])


@contextmanager
def noted_interrupts() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT sets, so that work can stop cleanly. Each further SIGINT raises
    ``KeyboardInterrupt``.

    Only the main thread receives signals; elsewhere the event is never set. An ignored SIGINT stays ignored.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield noted
        return
    is_first = True

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_first
        if not is_first:
            raise KeyboardInterrupt
        is_first = False
        # Set it in another thread, because the interrupted thread may hold the lock of the event.
        threading.Thread(target=noted.set, name="penstock-interrupt", daemon=True).start()

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


# One writer per output: a run of ``process`` is itself a job, and its lease is the right to write.
#
# So the lease is fenced, a heartbeat extends it, and it expires soon after its holder is killed. A run
# can be inspected, followed and cancelled like any job. Every output has its own queue,
# ``penstock.output.<hash>``.


_JOB: Final = "run"
_OPTIONS: Final = Options(task="penstock.process", attempts=1, max_stalls=1_000_000)


class Runner(msgspec.Struct, frozen=True):
    """The run that holds the output, for the error message of the next one."""

    run_id: str
    output: str
    host: str
    pid: int


def output_identity(output: str, *, is_path: bool) -> str:
    """Return an identity that all spellings of an output share. It is absolute, because drivers in different
    folders may share a store."""
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
