"""A job that a driver holds to show that it is alive. A heartbeat extends its lease until the driver dies."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Final, Self

import msgspec

from penstock.core.job import Lease
from penstock.core.lifecycle import State
from penstock.core.names import uuid7
from penstock.core.outcome import Cancel, Complete, Fail, Failure, Outcome
from penstock.core.text import get_logger
from penstock.errors import StorageError
from penstock.spark.store import Store
from penstock.storage.contract import Storage
from penstock.storage.values import Held, Report, Settlement

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                    # Without a wait: if the store was away, little of the lease is left.
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
    """Let the first SIGINT set the event, so that work can stop cleanly, and every further one raise
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
        # In another thread, because the interrupted one may hold the lock of the event.
        threading.Thread(target=noted.set, name="penstock-interrupt", daemon=True).start()

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
