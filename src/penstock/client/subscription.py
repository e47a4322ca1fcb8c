"""Subscriptions: functions that are called for each event of queues, at least once.

::

    subscription = app.subscribe("mail", consumer="billing")

    @subscription.on("completed", "failed")
    async def note(event): ...

    await subscription.run()
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, TypeVar

from penstock import client
from penstock.client.events import After, Filter, LogReader, Offsets, check_after, offset_of
from penstock.core.lifecycle import EventType
from penstock.core.names import check_consumer, check_queue
from penstock.core.text import get_logger, shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import EventsLost, InvalidOption, StorageUnavailable

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.core.event import Event, EventPage
    from penstock.storage.contract import Storage


EventHandler: TypeAlias = "Callable[[Event], Any]"
"""A function of one event. A coroutine function runs on the loop, any other in a thread."""
LostHandler: TypeAlias = Callable[[str, EventsLost], Any]
"""A function of the queue and the error that names its lost events."""

H = TypeVar("H", bound=EventHandler)
L = TypeVar("L", bound=LostHandler)
T = TypeVar("T")

_log = get_logger(__name__)

_SHORTEST_HOLD_MS: Final = 60_000
_LONGEST_DELAY_S: Final = 5.0
_LONGEST_UNSTORED_S: Final = 1.0


class SubscriptionOptions(TypedDict, total=False):
    """The options of ``app.subscribe(...)``."""

    after: Offsets
    id: str | None
    consumer: str | None
    hold: Duration
    on_error: Literal["raise", "log"]


class Subscription:
    """A subscription, which ``app.subscribe(...)`` makes. Only one ``run()`` at a time is allowed.

    Events of one queue are handled in order, one after the other; queues are independent. With a ``consumer``, the
    store keeps the position. It advances when the handlers of an event have returned, so after a crash, a stop or an
    error the next run begins with the first unhandled event. Two runs with the same name both get all events.
    """

    def __init__(
        self,
        app: App,
        queues: Sequence[str],
        *,
        after: Offsets = None,
        id: str | None = None,
        consumer: str | None = None,
        hold: Duration = "7d",
        on_error: str = "raise",
    ) -> None:
        if on_error not in ("raise", "log"):
            raise InvalidOption(f"on_error must be 'raise' or 'log', got {shown(on_error)}.")
        self._app = app
        self._queues = tuple(dict.fromkeys(check_queue(queue) for queue in queues))
        self._after = dict(after) if isinstance(after, Mapping) else after
        for offset in self._after.values() if isinstance(self._after, dict) else [self._after]:
            check_after(offset)
        self._id = Filter.of(None, id).id
        self._consumer = None if consumer is None else check_consumer(consumer)
        self._hold_ms = milliseconds(hold, what="hold")
        if self._hold_ms < _SHORTEST_HOLD_MS:
            raise InvalidOption(f"hold must be at least a minute, to outlive a restart, got {shown(hold)}.")
        self._logs_errors = on_error == "log"
        self._handlers: list[tuple[Filter, EventHandler]] = []
        self._lost_handlers: list[LostHandler] = []
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # By queue: the position in the store, and when it was written.
        self._stored: dict[str, tuple[int, float]] = {}
        self.positions: dict[str, int] = {}
        """The last handled event, by queue."""

    def on(self, *types: EventType | str) -> Callable[[H], H]:
        """Decorate a function to call for events of these types (default: all)."""
        wanted = Filter.of(types or None, self._id)

        def register(handler: H) -> H:
            self._handlers.append((wanted, handler))
            return handler

        return register

    def on_lost(self, handler: L) -> L:
        """Decorate a function to call when events are lost. The subscription then continues after them.

        Without such a function, ``run()`` raises ``EventsLost``.
        """
        self._lost_handlers.append(handler)
        return handler

    async def run(self) -> None:
        """Call the handlers until ``stop()``. A subscription without queues runs for all current queues.

        If the store becomes unavailable, it waits and tries again.

        Raises:
            StorageError: the store cannot be reached at the start, or refuses access.
            EventsLost: some events are lost, and there is no ``on_lost``.
            Exception: a handler raised it, unless ``on_error="log"``. A note names the event.
        """
        if self._stopping is not None:
            raise InvalidOption("this subscription is already running. Stop it first, or make another.")
        storage = await self._app.connect()
        queues = self._queues or await storage.queues()
        self._stopping, self._loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            await _together([self._follow(storage, queue) for queue in queues])
        finally:
            self._stopping = None

    def stop(self) -> None:
        """Make ``run()`` return after the current handlers. Any thread may call it, more than once."""
        stopping, loop = self._stopping, self._loop
        if stopping is None or loop is None:
            return
        if loop is asyncio._get_running_loop():
            stopping.set()  # at once, so that no other handler runs after the one that stops it
        else:
            loop.call_soon_threadsafe(stopping.set)

    @property
    def sync(self) -> client.SyncSubscription:
        """Return the same interface for synchronous code."""
        return client.SyncSubscription(self)

    async def _follow(self, storage: Storage, queue: str) -> None:
        reader = await LogReader.at(storage, queue, await self._beginning(storage, queue))
        self.positions[queue] = reader.position
        await self._store_position(storage, queue)
        try:
            while (page := await self._next(storage, queue, reader)) is not None:
                await self._handle_all(storage, queue, page)
                await self._store_if_due(storage, queue)
        finally:
            await self._store_if_due(storage, queue)

    async def _beginning(self, storage: Storage, queue: str) -> After:
        if self._consumer is not None:
            for known in await storage.consumers(queue):
                if known.name == self._consumer:
                    return known.offset
        return offset_of(self._after, queue, None)

    async def _store_position(self, storage: Storage, queue: str) -> None:
        if self._consumer is not None:
            position = self.positions[queue]
            await storage.hold_events(queue, self._consumer, offset=position, ttl_ms=self._hold_ms)
            self._stored[queue] = position, asyncio.get_running_loop().time()

    async def _store_at_intervals(self, storage: Storage, queue: str) -> None:
        """Store the position within a page: slow handlers would repeat all of it after a crash."""
        if self._consumer is not None:
            _, stored_at = self._stored[queue]
            if asyncio.get_running_loop().time() - stored_at > _LONGEST_UNSTORED_S:
                await self._store_if_due(storage, queue)

    async def _store_if_due(self, storage: Storage, queue: str) -> None:
        stored, stored_at = self._stored.get(queue, (0, 0.0))
        is_old = asyncio.get_running_loop().time() - stored_at > self._hold_ms / 3000
        if self.positions[queue] == stored and not is_old:
            return
        try:
            await self._store_position(storage, queue)
        except StorageUnavailable as error:
            # The next page stores it. Until then, a crash would repeat some events.
            _log.warning(
                "queue %s: the position of consumer %s was not stored: %s", queue, self._consumer, error
            )

    async def _next(self, storage: Storage, queue: str, reader: LogReader) -> EventPage | None:
        """Return the next page, or ``None`` to stop."""
        delay_s = 0.0
        while True:
            try:
                return await self._unless_stopped(reader.read(wait=True))
            except EventsLost as lost:
                if not self._lost_handlers:
                    raise
                await self._pass_over(storage, queue, reader, lost)
            except StorageUnavailable as error:
                delay_s = min(delay_s * 2 or 0.05, _LONGEST_DELAY_S)
                _log.warning(
                    "queue %s: events cannot be read, trying again in %.2f s: %s", queue, delay_s, error
                )
                await self._unless_stopped(asyncio.sleep(delay_s))

    async def _pass_over(self, storage: Storage, queue: str, reader: LogReader, lost: EventsLost) -> None:
        for handler in self._lost_handlers:
            await _call(handler, queue, lost)
        if not lost.last and self._consumer is not None:
            # The old position means nothing in a new log, and would never move back.
            await storage.release_events(queue, self._consumer)
        await reader.go_on(lost)
        self.positions[queue] = reader.position
        await self._store_position(storage, queue)

    async def _unless_stopped(self, awaited: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``awaited``, or ``None`` as soon as ``stop()`` is called."""
        assert self._stopping is not None
        read, stopped = asyncio.ensure_future(awaited), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([read, stopped], return_when=asyncio.FIRST_COMPLETED)
            return None if self._stopping.is_set() else read.result()
        finally:
            read.cancel()
            stopped.cancel()
            await asyncio.gather(read, stopped, return_exceptions=True)

    async def _handle_all(self, storage: Storage, queue: str, page: EventPage) -> None:
        assert self._stopping is not None
        for event in page.events:
            if self._stopping.is_set():
                return
            for wanted, handler in self._handlers:
                if wanted.admits(event):
                    await self._handle(handler, event)
            self.positions[queue] = event.seq
            await self._store_at_intervals(storage, queue)
        self.positions[queue] = page.next

    async def _handle(self, handler: EventHandler, event: Event) -> None:
        try:
            await _call(handler, event)
        except Exception as error:
            if not self._logs_errors:
                error.add_note(
                    f"while handling event {event.seq} ({event.type}) of queue {shown(event.queue)}"
                )
                raise
            _log.exception(
                "the handler of event %d (%s) of queue %s failed", event.seq, event.type, event.queue
            )


async def _call(handler: Callable[..., Any], *args: Any) -> None:
    if inspect.iscoroutinefunction(handler):
        await handler(*args)
    else:
        # In a thread, because it may block or use ``.sync``.
        await asyncio.to_thread(handler, *args)


async def _together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all of them. Raise the first error and cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
