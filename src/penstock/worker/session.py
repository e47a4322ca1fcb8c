"""The worker session connects the parts of a worker while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from penstock.client.firing import Fire, fire_due
from penstock.client.situation import listed
from penstock.core.names import ref_of
from penstock.core.outcome import Abort
from penstock.core.text import get_logger
from penstock.errors import StorageError
from penstock.storage.contract import Storage
from penstock.storage.values import DueScheduler
from penstock.worker import recovery
from penstock.worker.executor import Executor
from penstock.worker.fetcher import Fetcher
from penstock.worker.handlers import Handlers
from penstock.worker.health import Health, Watchdog, describe, examine
from penstock.worker.heartbeat import Heartbeat, HeartbeatThread, Notice
from penstock.worker.reporter import Reporter
from penstock.worker.run import PATIENCE_S
from penstock.worker.slots import ServedQueue
from penstock.worker.sweeper import DeathWatch, DrainWatch, Sweeper

if TYPE_CHECKING:
    from penstock.worker.worker import Worker


logger = get_logger("penstock.worker")

_CHECK_EVERY_S: Final = 0.1
_FIRING_S: Final = 5.0
_MOST_NAMED: Final = 10
# After the grace and ``PATIENCE_S``, a stop waits this long for the store to accept the last outcomes.
_SETTLE_S: Final = 3.0
_DEPART_S: Final = 2.0


class WorkerSession:
    """A worker at work, on the open storage of its loop. Call ``start``, ``finish`` and ``close``, in this order."""

    def __init__(self, worker: Worker, storage: Storage) -> None:
        self.worker = worker
        self.options = worker.options
        self.storage = storage
        self.started_at_ms = time.time_ns() // 1_000_000
        self.started_at = time.monotonic()
        self.failing: dict[str, BaseException] = {}
        """The errors of the queues whose calls to the store fail."""
        self.loop = asyncio.get_running_loop()
        self._served_queues = [ServedQueue(name, weight) for name, weight in self.options.queues.items()]
        self._changed = asyncio.Event()
        self._deadline = float("inf")
        self._is_cut_short = False
        self._own_duties: list[asyncio.Task[None]] = []
        self.heartbeat: Heartbeat | None = None
        self.watchdog = Watchdog(
            self._served_queues,
            worker_id=self.options.id,
            stuck_after_s=self.options.stuck_after_ms / 1000,
            interrupt_at=lambda: worker.interrupt_at,
        )
        self._thread = HeartbeatThread(self._connect_apart, self._duties)
        self.handlers = Handlers(
            worker, self.options.middleware, unknown_after_ms=self.options.unknown_after_ms
        )
        self.fetcher = Fetcher(
            worker,
            storage,
            self._served_queues,
            dried=self._dried,
            failed=self._failed,
            recovered=self._recovered,
            ended=self._changed.set,
        )
        self.executor = self.fetcher.executor = self._make_executor()
        self._drain = DrainWatch(
            storage,
            self._served_queues,
            drained=lambda queue: worker.recorder.emit("drained", queue=queue),
            ended=worker.end_burst if self.options.burst else None,
        )

    # Wiring

    def _make_executor(self) -> Executor:
        reporter = Reporter(self.storage, self.loop)
        for served in self._served_queues:
            served.reporter, served.app = reporter, self.worker.app
            served.lease_ms = self.options.lease_ms
        return Executor(
            self.worker,
            self.handlers,
            reporter=reporter,
            finished=self.fetcher.finished,
            freed=self._freed,
            interrupts=False,
        )

    def _duties(self, storage: Storage) -> Sequence[Coroutine[Any, Any, None]]:
        self.heartbeat = Heartbeat(
            storage,
            self._served_queues,
            worker_id=self.options.id,
            lease_ms=self.options.lease_ms,
            interval_s=self.options.heartbeat_ms / 1000,
            info=lambda: describe(self),
            notify=self._relay,
            stuck=lambda: self.watchdog.stuck,
        )
        duties = [self.heartbeat.run(), self.watchdog.run()]
        if self.options.sweep:
            queues = list(self.options.queues)
            duties += [
                Sweeper(storage, queues, fire=self._fires(storage)).run(),
                DeathWatch(storage, queues).run(),
            ]
        return duties

    def _fires(self, storage: Storage) -> Fire:
        """Return a function that fires schedulers. Enqueue middleware is user code, so it runs on the worker's loop."""
        enqueue_chain = self.worker.app.enqueue_chain

        async def fire(queue: str, due: DueScheduler) -> int | None:
            if not enqueue_chain.layers:
                return await fire_due(storage, queue, due)
            call = asyncio.run_coroutine_threadsafe(
                fire_due(self.storage, queue, due, enqueue_chain), self.loop
            )
            try:
                return await asyncio.wait_for(asyncio.wrap_future(call), _FIRING_S)
            except TimeoutError:
                return None  # the next sweep tries again; a slot is fired only once

        return fire

    async def _connect_apart(self) -> Storage | None:
        """Return a connection for the heartbeat's loop, or None if the app was given one open storage."""
        try:
            storage = await recovery.connected(self.worker.app, stopped=self.worker.is_stopping)
        except StorageError as error:
            # Connection failures are subclasses; the class itself means that the storage belongs to another loop.
            if type(error) is not StorageError:
                raise
            return None
        return None if storage is self.storage else storage

    # Callbacks of the parts

    def _relay(self, notices: list[Notice]) -> None:
        """Pass notices from the heartbeat's thread to the worker's loop."""
        with suppress(RuntimeError):  # The loop is closed: it is too late to stop anything.
            self.loop.call_soon_threadsafe(self._take_notice, notices)

    def _take_notice(self, notices: list[Notice]) -> None:
        """Stop the runs that the heartbeat reports, unless they have their outcome."""
        for run, answer in notices:
            if run.outcome is not None or run.lease.token not in run.served.held:
                continue
            try:
                if answer == "lost":
                    self.fetcher.forget(run)
                    self.worker.recorder.stalled(run)
                    self.executor.abort(run, Abort.LOST)
                else:
                    self.executor.abort(run, Abort.CANCEL if answer == "cancel" else Abort.EXPIRED)
            except Exception:
                logger.exception("job %r could not be stopped", run.lease.id)

    def _freed(self) -> None:
        self._changed.set()
        self.fetcher.pump_soon()

    def _dried(self, served: ServedQueue) -> None:
        if self.options.burst or "drained" in self.worker.listeners:
            self._drain.dried(served)

    def _failed(self, served: ServedQueue, error: BaseException) -> None:
        if served.name not in self.failing:
            reason = str(error).rstrip(".")
            logger.warning("queue %s: %s; trying again until the store answers", served.name, reason)
        self.failing[served.name] = error
        self.worker.recorder.error(error, queue=served.name)

    def _recovered(self, served: ServedQueue) -> None:
        self.failing.pop(served.name, None)
        logger.info("queue %s: the store answers again", served.name)
        self.worker.recorder.emit("reconnected", queue=served.name)

    # Start and stop

    async def start(self) -> None:
        """Start the heartbeat. Raise what connecting raises."""
        if not await self._thread.start():
            logger.warning("the app was given one open storage: heartbeats share the worker's loop")
            self._own_duties = [self.loop.create_task(duty) for duty in self._duties(self.storage)]

    def hurry(self, grace_ms: int) -> None:
        """Give running jobs at most ``grace_ms`` from now."""
        deadline = time.monotonic() + grace_ms / 1000
        self._is_cut_short |= deadline < self._deadline < float("inf")
        self._deadline = min(self._deadline, deadline)
        self._changed.set()

    async def finish(self, grace_ms: int) -> None:
        """Let jobs finish and hand back the rest; return when all jobs are settled or the time is up.

        That takes at most ``grace_ms``, plus ``PATIENCE_S`` for handlers that ignore their abort and ``_SETTLE_S``
        for the store. A job that is not settled by then returns when its lease expires.
        """
        self.fetcher.hand_back_new = True
        self.fetcher.stop_claiming()
        self.hurry(grace_ms)
        if grace_ms:
            self.handlers.hurry()
        await self._until_idle(lambda: self._deadline)
        await self._hand_back()
        settled_by = time.monotonic() + _SETTLE_S
        await self._until_idle(lambda: settled_by)
        if not self.fetcher.idle:
            jobs = sum(len(served.held) for served in self._served_queues)
            logger.warning(
                "worker %s stops with %d jobs that the store did not take back", self.options.id, jobs
            )

    async def close(self) -> None:
        """Close everything. Handlers that still run are abandoned."""
        self._drain.close()
        await self._thread.stop()
        for duty in self._own_duties:
            duty.cancel()
        await self.fetcher.close()
        if self.fetcher.limits is not None:
            self.fetcher.limits.close()
        self.executor.close()
        await self._depart()

    def health(self) -> Health:
        """Return the worker's health. Any thread may call this."""
        return examine(self)

    async def _hand_back(self) -> None:
        running = [run for run in self.executor.running if run.outcome is None]
        if running:
            refs = [ref_of(run.served.name, run.lease.id) for run in running]
            logger.warning(
                "worker %s hands back jobs %s: %s",
                self.options.id,
                "because a second stop ended its grace"
                if self._is_cut_short
                else "that did not finish within its grace",
                listed(refs[:_MOST_NAMED], len(refs)),
            )
        for run in running:
            self.executor.abort(run, Abort.RELEASE)
        patience_until = time.monotonic() + PATIENCE_S
        await self._until_idle(lambda: patience_until)
        for run in list(self.executor.running):
            self.executor.give_up(run)

    async def until_idle(self, deadline: float) -> bool:
        """Wait until the worker holds no job. Return false if it still does at ``deadline``."""
        await self._until_idle(lambda: deadline)
        return self.fetcher.idle

    async def _until_idle(self, deadline: Callable[[], float]) -> None:
        """Wait until the worker holds no job, or for the deadline, which may move closer."""
        while not self.fetcher.idle:
            rest_s = deadline() - time.monotonic()
            if rest_s <= 0:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(min(rest_s, _CHECK_EVERY_S)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _depart(self) -> None:
        try:
            async with asyncio.timeout(_DEPART_S):
                await asyncio.gather(
                    *(self.storage.depart(served.name, self.options.id) for served in self._served_queues),
                    return_exceptions=True,
                )
        except TimeoutError:
            # The store drops the record of the worker after an hour anyway.
            return
