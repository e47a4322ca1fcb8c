"""The heartbeat: renews the leases and learns which runs must stop.

It has its own thread, event loop and connection, because a handler that blocks the worker's loop must not look dead.
The sweeper of a worker runs there as well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from penstock.core.text import get_logger
from penstock.errors import StorageError
from penstock.storage.contract import Storage
from penstock.storage.values import Extended, Held
from penstock.worker.recovery import ROUND_PATIENCE_S, Rounds
from penstock.worker.run import Run
from penstock.worker.slots import ServedQueue

logger = get_logger("penstock.worker")

Notice = tuple[Run, Extended]

_RETRY_S: Final = 0.5
_SHORTEST_PAUSE_S: Final = 0.2
_CLOSE_PATIENCE_S: Final = 2.0


class Heartbeat:
    """Extends the leases of ``served_queues``, unless the worker is ``stuck``.

    ``notify`` receives the runs that must stop; it is called in this thread.
    """

    def __init__(
        self,
        storage: Storage,
        served_queues: Sequence[ServedQueue],
        *,
        worker_id: str,
        lease_ms: int,
        interval_s: float,
        info: Callable[[], bytes],
        notify: Callable[[list[Notice]], None],
        stuck: Callable[[], bool] = lambda: False,
    ) -> None:
        self._storage = storage
        self._served_queues = {served.name: served for served in served_queues}
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._interval_s = interval_s
        self._info = info
        self._notify = notify
        self._stuck = stuck
        self._renewing = True
        self._hurried = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rounds = Rounds(self._beat, patience_s=min(ROUND_PATIENCE_S, interval_s))
        self.last_at = time.monotonic()
        """The time of the last beat that reached all queues."""

    async def run(self) -> None:
        """Beat until cancelled. After a failure the next beat comes soon, because leases are running out."""
        self._loop = asyncio.get_running_loop()
        with closing(self._rounds):
            await self._keep_beating()

    async def _keep_beating(self) -> None:
        failing = False
        while True:
            began = time.monotonic()
            pause_s = self._interval_s
            try:
                await self.run_once()
                failing = False
            # Any error: without a heartbeat the store would take back all jobs of this worker.
            except Exception as error:
                _log_failure(error, again=failing)
                failing = True
                pause_s = min(_RETRY_S, self._interval_s)
            await self._rest(max(0.0, pause_s - (time.monotonic() - began)))

    def beat_soon(self) -> None:
        """Beat immediately, because this worker's record has changed. Any thread may call this."""
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed, and the worker stopped.
                self._loop.call_soon_threadsafe(self._hurried.set)

    async def _rest(self, seconds: float) -> None:
        """Wait for the next beat. It comes early if the store has lost the announcement of this process."""
        try:
            # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the event.
            async with asyncio.timeout(seconds):
                await self._hurried.wait()
            # The announcement may be lost again immediately, for example while a slot moves.
            await asyncio.sleep(min(_SHORTEST_PAUSE_S, seconds))
        except TimeoutError:
            pass
        self._hurried.clear()

    async def run_once(self) -> None:
        """Renew the leases of every queue and write the worker's record to each.

        Raise the first failure after all other queues had their turn.
        """
        self._renewing = self._may_renew()
        beat = await self._rounds.run(self._served_queues)
        if beat.failure is not None:
            raise beat.failure
        if not beat.is_late:
            self.last_at = time.monotonic()

    def _may_renew(self) -> bool:
        stuck = self._stuck()
        if stuck and self._renewing:
            logger.error(
                "worker %s is stuck and stops renewing the leases of its %d jobs: other workers take them over",
                *(self._worker_id, sum(len(served.held) for served in self._served_queues.values())),
            )
        return not stuck

    async def _beat(self, queue: str) -> None:
        served = self._served_queues[queue]
        now = time.monotonic()
        # A lease that has just begun needs no renewal; most such runs finish before the next beat.
        young = now - self._interval_s / 10
        held_runs = list(served.held.values()) if self._renewing else []
        runs = [run for run in held_runs if run.claimed_at <= young]
        held = [Held(run.lease.id, run.lease.token) for run in runs]
        late = served.unsure or now - min(served.call_starts.copy(), default=now) > self._interval_s / 2
        if late and self._renewing:
            held += await self._unread_leases(served)
        answers = await self._storage.extend(
            served.name, held, worker=self._worker_id, lease_ms=self._lease_ms, info=self._info()
        )
        notices: list[Notice] = [
            (run, answer) for run, answer in zip(runs, answers, strict=False) if answer != "extended"
        ]
        if notices:
            self._notify(notices)
        await self._storage.announce(served.name, self._worker_id, lost=self._hurried.set)

    async def _unread_leases(self, served: ServedQueue) -> list[Held]:
        """Return leases from claims whose answers the busy loop has not read, or that it abandoned."""
        held = await self._storage.leases_of(served.name, self._worker_id)
        return [lease for lease in held if lease.token not in served.held]


def _log_failure(error: Exception, *, again: bool) -> None:
    """Log an outage of the store as a warning, any other failure as an error, and repetitions at debug level."""
    is_outage = isinstance(error, StorageError)
    level = logging.DEBUG if again else logging.WARNING if is_outage else logging.ERROR
    logger.log(
        level, "the heartbeat failed and will be repeated: %s", error, exc_info=None if is_outage else error
    )


class HeartbeatThread:
    """Runs duties on a separate loop. ``connect`` is called there and returns their storage, or ``None``."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Storage | None]],
        duties: Callable[[Storage], Sequence[Coroutine[Any, Any, None]]],
    ) -> None:
        self._connect = connect
        self._duties = duties
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-heartbeat", daemon=True)

    async def start(self) -> bool:
        """Wait until the storage is open; return false if there is none. Raise what opening it raises."""
        self._thread.start()
        await asyncio.to_thread(self._started.wait)
        if self._error is not None:
            raise self._error
        return bool(self._tasks)

    async def stop(self) -> None:
        """End the duties and close the connection."""
        if self._loop is None or not self._thread.is_alive():
            return
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:
            return
        await asyncio.to_thread(self._thread.join, _CLOSE_PATIENCE_S)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = self._error or error
            if self._started.is_set():
                logger.exception("the heartbeat thread ended")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        storage = await self._connect()
        if storage is None:
            return
        self._tasks = [self._loop.create_task(duty) for duty in self._duties(storage)]
        self._started.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
