"""Following a queue's event log."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from penstock.errors import EventsLost

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.core.event import Event
    from penstock.storage.values import EventPage

__all__ = ["read_events"]

_AT_ONCE: Final = 1_000
_TAIL_MS: Final = 10_000


async def read_events(
    app: App, queue: str, *, after: int | None, follow: bool
) -> AsyncGenerator[Event, None]:
    """The events after sequence number ``after`` (``None``: after the newest), then, if asked, those to come.

    Raises:
        EventsLost: some are no longer kept, or the store has gone back in time (another epoch). It says from
            where to go on.
    """
    storage = await app.connect()
    if after is None:
        after = (await storage.read_events(queue, after=0, limit=1)).last
    epoch = ""
    while True:
        page = await storage.read_events(queue, after=after, limit=_AT_ONCE)
        if not page.events and page.gap is None and follow:
            page = await storage.tail(queue, after=after, timeout_ms=_TAIL_MS)
        _check(queue, page, epoch)
        epoch = page.epoch
        for event in page.events:
            yield event
        after = page.next
        if not follow and after >= page.last:
            return


def _check(queue: str, page: EventPage, epoch: str) -> None:
    if epoch and page.epoch != epoch:
        raise EventsLost(
            f"the event log of queue {queue!r} is another one since the store was restored or failed over. "
            "Go on from the beginning, events(after=0), and expect to see events twice.",
            first=0,
            last=0,
        )
    if page.gap is not None:
        first, last = page.gap
        raise EventsLost(
            f"events {first} to {last} of queue {queue!r} are no longer kept ({last - first + 1} of them). "
            f"Go on with events(after={last}), and hold events by hold_events() to keep them next time.",
            first=first,
            last=last,
        )
