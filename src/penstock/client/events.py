"""Readers of event logs: of one queue, one job, or several queues; past events first, then new ones.

Sequence numbers are dense and never reset, so a reader needs to remember only an offset. Readers never skip
events silently: ``EventsLost`` says which ones are no longer kept, and where to continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from penstock.client.parsers import listed, whole_number
from penstock.core.lifecycle import OPEN, EventType
from penstock.core.names import check_id
from penstock.core.text import shown
from penstock.errors import EventsLost, InvalidOption, JobNotFound

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.core.event import Event, EventPage
    from penstock.storage.contract import Storage


After: TypeAlias = int | Literal["earliest"] | None
"""The start: after a sequence number, at the earliest event that is kept, or (``None``) after the newest."""
EventTypes: TypeAlias = EventType | str | Iterable[EventType | str] | None
"""One type of event, several, or (``None``) all."""

Offsets: TypeAlias = After | Mapping[str, After]
"""The start in all queues, or by queue."""

_AT_ONCE: Final = 1_000
_TAIL_MS: Final = 10_000
_FURTHEST: Final = 2**53


class Filter(NamedTuple):
    """A filter of events. With ``id``, it admits only events of that job."""

    types: frozenset[str] | None = None
    id: str | None = None

    @classmethod
    def of(cls, types: EventTypes, id: str | None = None) -> Filter:
        """Return a filter. Raise ``InvalidOption`` for an unknown type, ``InvalidName`` for an invalid id."""
        return cls(_checked_types(types), None if id is None else check_id(id))

    def admits(self, event: Event) -> bool:
        return (self.types is None or event.type in self.types) and (self.id is None or event.id == self.id)


class LogReader:
    """A reader of one queue's log, page by page. ``position`` is the last sequence number that it read."""

    __slots__ = ("_epoch", "_queue", "_storage", "position")

    def __init__(self, storage: Storage, queue: str, *, position: int) -> None:
        self._storage = storage
        self._queue = queue
        self._epoch = ""
        self.position = position

    @classmethod
    async def at(cls, storage: Storage, queue: str, after: After) -> LogReader:
        """Return a reader that begins at ``after``."""
        if not isinstance(after, int):
            page = await storage.read_events(queue, after=0, limit=1)
            after = page.last if after is None else _first_kept(page) - 1
        return cls(storage, queue, position=after)

    async def read(self, *, wait: bool) -> EventPage:
        """Return the next page. With ``wait``, wait a while for new events.

        Raises:
            EventsLost: some events are no longer kept, or the store was rolled back. ``position`` does not change.
        """
        page = await self._storage.read_events(self._queue, after=self.position, limit=_AT_ONCE)
        if wait and not page.events and page.gap is None and page.last >= self.position:
            page = await self._storage.tail(self._queue, after=self.position, timeout_ms=_TAIL_MS)
        self._check(page)
        self._epoch = page.epoch
        self.position = page.next
        return page

    async def go_on(self, lost: EventsLost) -> None:
        """Continue after the lost events, or at the earliest event of a new log."""
        self.position = lost.last
        if not lost.last:
            self._epoch = ""
            self.position = _first_kept(await self._storage.read_events(self._queue, after=0, limit=1)) - 1

    def _check(self, page: EventPage) -> None:
        if (self._epoch and page.epoch != self._epoch) or page.last < self.position:
            raise EventsLost(
                f"the event log of queue {self._queue!r} was replaced: its store was restored or failed over, or "
                f"offset {self.position} does not belong to it. Continue with after=0, and expect to see events twice.",
                first=0,
                last=0,
            )
        if page.gap is not None:
            first, last = page.gap
            raise EventsLost(
                f"events {first} to {last} of queue {self._queue!r} are no longer kept ({last - first + 1} of them). "
                f"Continue with after={last}. A named consumer keeps events until it has read them.",
                first=first,
                last=last,
            )


async def queue_events(
    app: App, queue: str, *, after: After, follow: bool, wanted: Filter
) -> AsyncGenerator[Event, None]:
    """Yield the events of a queue after ``after``; with ``follow``, new ones, too. Raise ``EventsLost``."""
    reader = await LogReader.at(await app.connect(), queue, after)
    while True:
        page = await reader.read(wait=follow)
        for event in page.events:
            if wanted.admits(event):
                yield event
        if not follow and reader.position >= page.last:
            return


async def job_events(
    app: App, queue: str, id: str, *, follow: bool, types: frozenset[str] | None
) -> AsyncGenerator[Event, None]:
    """Yield the events of a job since its enqueue; with ``follow``, new ones until it finishes.

    Raises:
        JobNotFound: neither the store nor the log has the id.
        EventsLost: the log no longer has all of its events, or the store was rolled back.
    """
    storage = await app.connect()
    [job] = await storage.get(queue, [id])
    since, begins_at_ms = (job.incarnation, job.enqueued_at_ms) if job else (0, 0)
    reader = LogReader(storage, queue, position=await _offset_at(storage, queue, begins_at_ms))
    begins_after = reader.position
    newest = (await storage.read_events(queue, after=reader.position, limit=1)).last
    if job is None and reader.position >= newest:
        raise _unknown(queue, id)
    seen = ended = False
    while True:
        page = await reader.read(wait=follow and reader.position >= newest)
        for event in page.events:
            # This one event removes all jobs.
            ended = ended or event.type == EventType.OBLITERATED
            if event.id == id and event.incarnation >= since:
                if not seen and event.type != EventType.ENQUEUED:
                    raise _beginning_lost(queue, id, event.seq - 1)
                seen, ended = True, event.state not in OPEN
                if types is None or event.type in types:
                    yield event
            if ended and event.seq > newest:
                return
        if reader.position >= newest:
            if not seen:
                raise _unknown(queue, id) if job is None else _beginning_lost(queue, id, begins_after)
            if ended or not follow:
                return


async def app_events(
    app: App, queues: Sequence[str], *, after: Offsets, follow: bool, wanted: Filter
) -> AsyncGenerator[Event, None]:
    """Yield the events of these queues, or of all current queues, as they arrive. Raise ``EventsLost``."""
    names = queues or await app.queues()
    sources = [
        queue_events(app, name, after=offset_of(after, name, 0), follow=follow, wanted=wanted)
        for name in names
    ]
    events = _merged(sources)
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()


async def _merged(sources: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Yield the events of several logs as they arrive. Only events of one queue are in order."""
    coming = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in coming if task in done]:
                source = coming.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                yield event
                coming[asyncio.ensure_future(anext(source))] = source
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for source in sources:
            await source.aclose()


def offset_of(after: Offsets, queue: str, default: After) -> After:
    """Return the start in ``queue``. Raise ``InvalidOption`` if it is not a position."""
    return check_after(after.get(queue, default) if isinstance(after, Mapping) else after)


def check_after(after: After) -> After:
    """Return ``after``. Raise ``InvalidOption`` if it is not a position."""
    if after is None or after == "earliest":
        return after
    if isinstance(after, str):
        raise InvalidOption(
            f"after must be a sequence number (0 for all events), 'earliest', or None for new events only, got "
            f"{shown(after)}."
        )
    return whole_number("after", after, least=0, most=_FURTHEST)


async def _offset_at(storage: Storage, queue: str, at_ms: int) -> int:
    """Return the number of events before ``at_ms``. Times never decrease along a log."""
    page = await storage.read_events(queue, after=0, limit=1)
    low, high = _first_kept(page) - 1, page.last
    while at_ms and low < high:
        middle = (low + high) // 2
        events = (await storage.read_events(queue, after=middle, limit=1)).events
        if events and events[0].at_ms < at_ms:
            low = middle + 1
        else:
            high = middle
    return low


def _first_kept(page: EventPage) -> int:
    return 1 if page.gap is None else page.gap.last + 1


def _checked_types(types: EventTypes) -> frozenset[str] | None:
    if types is None:
        return None
    given: Collection[Any] = [types] if isinstance(types, str) else listed("types", types, of="event types")
    unknown = [kind for kind in given if not isinstance(kind, str) or kind not in set(EventType)]
    if unknown or not given:
        culprit = shown(unknown[0]) if unknown else "it is empty"
        raise InvalidOption(
            f"types={shown(types)} contains an unknown type of event: {culprit}. Types are: {', '.join(EventType)}."
        )
    return frozenset(map(str, given))


def _beginning_lost(queue: str, id: str, last: int) -> EventsLost:
    return EventsLost(
        f"the log of queue {queue!r} no longer has the first events of job {id!r}, which are among those up to "
        f"{last}. Use queue.events(id={id!r}, after={last}) for the rest.",
        first=1,
        last=last,
    )


def _unknown(queue: str, id: str) -> JobNotFound:
    return JobNotFound.in_queue(
        queue,
        id,
        "It is in neither the store nor the log. To wait for a job that is not enqueued yet, follow "
        f"queue.events(id={id!r}, after=None).",
    )
