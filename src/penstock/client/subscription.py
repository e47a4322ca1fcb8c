"""Subscriptions: functions that are called for the events of queues, once each or, after a crash, again.

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

from penstock.client.events import After, Filter, LogReader, Offsets, check_after, offset_of
from penstock.client.loopthread import run
from penstock.core.lifecycle import EventType
from penstock.core.names import check_consumer, check_queue
from penstock.core.text import get_logger, shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import EventsLost, InvalidOption, StorageUnavailable

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.core.event import Event
    from penstock.storage.contract import Storage
    from penstock.storage.values import EventPage


EventHandler: TypeAlias = "Callable[[Event], Any]"
"""Gets one event. A coroutine function is awaited on the loop, any other runs in a thread."""
LostHandler: TypeAlias = Callable[[str, EventsLost], Any]
"""Gets the queue, and which of its events are gone."""

H = TypeVar("H", bound=EventHandler)
L = TypeVar("L", bound=LostHandler)
T = TypeVar("T")

_log = get_logger(__name__)

_SHORTEST_HOLD_MS: Final = 60_000
_LONGEST_REST_S: Final = 5.0
_LONGEST_UNKEPT_S: Final = 1.0


class SubscriptionOptions(TypedDict, total=False):
    """What ``app.subscribe(...)`` takes besides the queues."""

    after: Offsets
    id: str | None
    consumer: str | None
    hold: Duration
    on_error: Literal["raise", "log"]


class Subscription:
    """Made by ``app.subscribe(...)``. Runs once at a time.

    Events of one queue are handled one after the other, in order; those of different queues independently of each
    other. With a ``consumer`` the position is kept in the store: it moves on when the handlers of an event have
    returned, so after a crash, a stop or a handler's error the next run begins with the first event that was not
    handled. Two runs under one name both get all events.
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
            raise InvalidOption(f"on_error={shown(on_error)} is not known. Give 'raise' or 'log'.")
        self._app = app
        self._queues = tuple(dict.fromkeys(check_queue(queue) for queue in queues))
        self._after = dict(after) if isinstance(after, Mapping) else after
        for offset in self._after.values() if isinstance(self._after, dict) else [self._after]:
            check_after(offset)
        self._id = Filter.of(None, id).id
        self._consumer = None if consumer is None else check_consumer(consumer)
        self._hold_ms = milliseconds(hold, what="hold")
        if self._hold_ms < _SHORTEST_HOLD_MS:
            raise InvalidOption(f"hold={shown(hold)} would not outlive a restart. Give at least a minute.")
        self._goes_on = on_error == "log"
        self._handlers: list[tuple[Filter, EventHandler]] = []
        self._lost_handlers: list[LostHandler] = []
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # The position the store has, by queue, and when it was told.
        self._kept: dict[str, tuple[int, float]] = {}
        self.positions: dict[str, int] = {}
        """The last event handled, by queue."""

    def on(self, *types: EventType | str) -> Callable[[H], H]:
        """Decorates a function to be called for events of these types; without any, for all."""
        wanted = Filter.of(types or None, self._id)

        def register(handler: H) -> H:
            self._handlers.append((wanted, handler))
            return handler

        return register

    def on_lost(self, handler: L) -> L:
        """Decorates a function to be told of events that are gone; then the subscription goes on behind them.

        Without one, ``run()`` raises ``EventsLost``.
        """
        self._lost_handlers.append(handler)
        return handler

    async def run(self) -> None:
        """Call the handlers until ``stop()``. Without queues of its own: for all that are there by now.

        A store that goes away meanwhile is waited for.

        Raises:
            StorageError: the store could not be reached at the start, or refused us.
            EventsLost: some events are gone, and there is no ``on_lost``.
            Exception: what a handler raised, unless ``on_error="log"``. A note names the event.
        """
        if self._stopping is not None:
            raise InvalidOption("this subscription is running already. Stop it first, or make another.")
        storage = await self._app.connect()
        queues = self._queues or await storage.queues()
        self._stopping, self._loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            await _together([self._follow(storage, queue) for queue in queues])
        finally:
            self._stopping = None

    def stop(self) -> None:
        """Have a ``run()`` under way return when its handlers have. May be called from any thread, and twice."""
        stopping, loop = self._stopping, self._loop
        if stopping is None or loop is None:
            return
        if loop is asyncio._get_running_loop():
            stopping.set()  # a handler that stops its subscription is its last
        else:
            loop.call_soon_threadsafe(stopping.set)

    @property
    def sync(self) -> SyncSubscription:
        """Return the same interface for synchronous code."""
        return SyncSubscription(self)

    async def _follow(self, storage: Storage, queue: str) -> None:
        reader = await LogReader.at(storage, queue, await self._beginning(storage, queue))
        self.positions[queue] = reader.position
        await self._keep(storage, queue)
        try:
            while (page := await self._next(storage, queue, reader)) is not None:
                await self._handle_all(storage, queue, page)
                await self._keep_if_due(storage, queue)
        finally:
            await self._keep_if_due(storage, queue)

    async def _beginning(self, storage: Storage, queue: str) -> After:
        if self._consumer is not None:
            for known in await storage.consumers(queue):
                if known.name == self._consumer:
                    return known.offset
        return offset_of(self._after, queue, None)

    async def _keep(self, storage: Storage, queue: str) -> None:
        if self._consumer is not None:
            position = self.positions[queue]
            await storage.hold_events(queue, self._consumer, offset=position, ttl_ms=self._hold_ms)
            self._kept[queue] = position, asyncio.get_running_loop().time()

    async def _keep_now_and_then(self, storage: Storage, queue: str) -> None:
        """Within a page, which slow handlers may be at for long: a crash is not to bring all of it again."""
        if self._consumer is not None:
            _, kept_at = self._kept[queue]
            if asyncio.get_running_loop().time() - kept_at > _LONGEST_UNKEPT_S:
                await self._keep_if_due(storage, queue)

    async def _keep_if_due(self, storage: Storage, queue: str) -> None:
        kept, kept_at = self._kept.get(queue, (0, 0.0))
        is_old = asyncio.get_running_loop().time() - kept_at > self._hold_ms / 3000
        if self.positions[queue] == kept and not is_old:
            return
        try:
            await self._keep(storage, queue)
        except StorageUnavailable as error:
            # Kept with the next page; until then a crash would bring some events again, as it may at any time.
            _log.warning("queue %s: the position of %s was not kept: %s", queue, self._consumer, error)

    async def _next(self, storage: Storage, queue: str, reader: LogReader) -> EventPage | None:
        """The next page; ``None`` when it is time to stop."""
        rest_s = 0.0
        while True:
            try:
                return await self._unless_stopped(reader.read(wait=True))
            except EventsLost as lost:
                if not self._lost_handlers:
                    raise
                await self._pass_over(storage, queue, reader, lost)
            except StorageUnavailable as error:
                rest_s = min(rest_s * 2 or 0.05, _LONGEST_REST_S)
                _log.warning("queue %s: no events to be had, again in %.2f s: %s", queue, rest_s, error)
                await self._unless_stopped(asyncio.sleep(rest_s))

    async def _pass_over(self, storage: Storage, queue: str, reader: LogReader, lost: EventsLost) -> None:
        for handler in self._lost_handlers:
            await _call(handler, queue, lost)
        if not lost.last and self._consumer is not None:
            # Another log: the old position says nothing in it, and would never move back by itself.
            await storage.release_events(queue, self._consumer)
        await reader.go_on(lost)
        self.positions[queue] = reader.position
        await self._keep(storage, queue)

    async def _unless_stopped(self, awaited: Coroutine[Any, Any, T]) -> T | None:
        """What is awaited, or ``None`` as soon as it is time to stop."""
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
            await self._keep_now_and_then(storage, queue)
        self.positions[queue] = page.next

    async def _handle(self, handler: EventHandler, event: Event) -> None:
        try:
            await _call(handler, event)
        except Exception as error:
            if not self._goes_on:
                error.add_note(
                    f"while handling event {event.seq} ({event.type}) of queue {shown(event.queue)}"
                )
                raise
            _log.exception(
                "the handler of event %d (%s) of queue %s failed", event.seq, event.type, event.queue
            )


class SyncSubscription:
    """See ``Subscription``. ``run()`` blocks until another thread calls ``stop()``."""

    __slots__ = ("_target", "on", "on_lost", "stop")

    def __init__(self, target: Subscription) -> None:
        self._target = target
        self.on = target.on
        self.on_lost = target.on_lost
        self.stop = target.stop

    @property
    def positions(self) -> dict[str, int]:
        return self._target.positions

    def run(self) -> None:
        """See ``Subscription.run``."""
        run(self._target.run())


async def _call(handler: Callable[..., Any], *args: Any) -> None:
    if inspect.iscoroutinefunction(handler):
        await handler(*args)
    else:
        # In a thread: it may block, and it may use the sync face.
        await asyncio.to_thread(handler, *args)


async def _together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
