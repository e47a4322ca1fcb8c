"""A job that a driver holds as its sign of life: under a lease, kept by a heartbeat, free again soon after a kill."""

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


class Charge(msgspec.Struct, frozen=True):
    """What others need to know to see whether the holder still holds its job."""

    url: str
    queue: str
    id: str
    token: int

    async def is_held(self, storage: Storage) -> bool:
        """By the one who gave us this, that is: the token is that of its lease."""
        await storage.sweep(self.queue)
        (job,) = await storage.get(self.queue, [self.id])
        return job is not None and job.state is State.ACTIVE and job.token == self.token


class HeldJob(ABC):
    """Held within a ``with`` block. ``is_lost`` and ``is_cancelled`` are for whoever is about to write or go on."""

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
        """The lease; the job is put in if need be."""

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
    def charge(self) -> Charge:
        """Only while it is held."""
        assert self._lease is not None
        return Charge(self._url, self._queue, self._lease.id, self._lease.token)

    @property
    def began_at_ms(self) -> int:
        """Return when the lease was taken, on the store's clock."""
        assert self._lease is not None
        return self._lease.claimed_at_ms

    def report(self, progress: object) -> None:
        """What the job shows as its progress, and in the end as its result; sent with the next heartbeat."""
        self._progress = msgspec.json.encode(progress)

    def _beat(self) -> None:
        """Until told to stop, or no longer the holder."""
        while not self._stop.wait(_BEAT_S):
            try:
                with Store(self._url) as store:
                    # At once: if the store was away, there is not much left of the lease.
                    store.run(self._extend(store))
                    while not self.is_lost and not self._stop.wait(_BEAT_S):
                        store.run(self._extend(store))
                return
            except StorageError as error:
                logger.warning("the heartbeat of the run failed and will be repeated: %s", error)

    async def _extend(self, store: Store) -> None:
        assert self._lease is not None
        held = Held(self._lease.id, self._lease.token)
        (answer,) = await store.storage.extend(self._queue, [held], worker=self._worker, lease_ms=LEASE_MS)
        self.is_lost = answer == "lost"
        self.is_cancelled = self.is_cancelled or answer == "cancel"
        if self._progress is not None:
            await store.storage.report(self._queue, [Report(*held, progress=self._progress)])


# Ctrl-C while something runs that wants to come to a good end.


@contextmanager
def noted_interrupts() -> Iterator[threading.Event]:
    """Within the block the first SIGINT sets the event, and every further one raises ``KeyboardInterrupt``.

    In the main thread, that is: elsewhere nobody sees signals. One that the process ignores stays ignored.
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
        # Not here: the thread that was interrupted may hold the lock of the event.
        threading.Thread(target=noted.set, name="penstock-interrupt", daemon=True).start()

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
