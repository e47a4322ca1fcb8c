"""The event log of one queue, followed from its first event to its last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.event import Event, EventPage
from penstock.core.lifecycle import TERMINAL, TRANSITIONS, EventType, State
from tests.storm.plan import CAPS

ALLOWED = {(row.source, row.target, row.event) for row in TRANSITIONS}

Report = Callable[[str, str], None]


@dataclass(slots=True)
class Claim:
    """One lease, as the log tells it. ``end`` is the type of the event that ended it, ``ended_ms`` its time."""

    id: str
    run: int
    token: int
    worker: str
    end: str = ""
    ended_ms: int = 0


@dataclass(slots=True)
class Trail:
    """What the log says of one job."""

    state: State | None = None
    claims: list[int] = field(default_factory=list)
    failures: int = 0
    stalls: int = 0
    enqueued: int = 0
    completed_token: int = 0


class History:
    """Follows the events of a queue and reports every one that must not be.

    ``trails`` are the jobs by id, ``claims`` the leases by token, ``writes`` the times of each worker's events.
    """

    def __init__(self, queue: str, report: Report) -> None:
        self.queue = queue
        self.trails: dict[str, Trail] = {}
        self.claims: dict[int, Claim] = {}
        self.writes: dict[str, list[int]] = {}
        self.figures: Counter[str] = Counter()
        self._report = report
        self._seq = 0
        self._last = 0
        self._at_ms = 0
        self._token = 0
        self._epoch = ""
        self._running: dict[str, set[str]] = {}
        self._begun: dict[str, str] = {}

    def read(self, page: EventPage) -> None:
        if page.gap is not None:
            self._report("event missing", f"{self.queue}: gap {page.gap}")
            self._seq = max(self._seq, page.gap.last)
        if self._epoch not in ("", page.epoch):
            self._report("epoch changed", f"{self.queue}: {self._epoch}, then {page.epoch}")
        self._epoch = page.epoch
        for event in page.events:
            self._follow(event)
        self._last = page.last

    def close(self) -> None:
        """Look at the log as a whole."""
        if self._seq != self._last:
            self._report("event missing", f"{self.queue}: the last is {self._last}, read up to {self._seq}")
        for id, trail in self.trails.items():
            if trail.enqueued != 1:
                self._report("wrong number of enqueue events", f"{id}: {trail.enqueued}")
        self.figures["events"] += self._seq

    def _follow(self, event: Event) -> None:
        self._check_order(event)
        if not event.id:
            return
        if event.worker and event.type is not EventType.STALLED:
            self.writes.setdefault(event.worker, []).append(event.at_ms)
        trail = self.trails.setdefault(event.id, Trail())
        target = State(event.state) if event.state else None
        if (trail.state, target, event.type) not in ALLOWED:
            self._report("illegal transition", f"{trail.state} -> {event}")
        if event.type is EventType.CLAIMED:
            self._claim(trail, event)
        elif trail.state is State.ACTIVE and target is not State.ACTIVE:
            self._end(trail, event)
        self._count(trail, event)
        if event.group:
            self._check_group(event, target)
        trail.state = target

    def _check_order(self, event: Event) -> None:
        if event.seq != self._seq + 1:
            self._report("event missing", f"{self.queue}: {self._seq} is followed by {event.seq}")
        if event.at_ms < self._at_ms:
            self._report("time runs backwards", f"{self._at_ms}, then {event}")
        self._seq, self._at_ms = event.seq, event.at_ms

    def _claim(self, trail: Trail, event: Event) -> None:
        if event.token <= self._token:
            self._report("token came back", f"{self._token}, then {event}")
        self._token = event.token
        if event.run != len(trail.claims) + 1:
            self._report("wrong run number", f"{event}: {len(trail.claims)} runs before")
        trail.claims.append(event.token)
        self.claims[event.token] = Claim(event.id, event.run, event.token, event.worker)

    def _end(self, trail: Trail, event: Event) -> None:
        token = trail.claims[-1] if trail.claims else 0
        if event.type is not EventType.STALLED and event.token != token:
            self._report("settled under a stale token", f"{event}: the lease is {token}")
        if token:
            self.claims[token].end, self.claims[token].ended_ms = event.type, event.at_ms

    def _count(self, trail: Trail, event: Event) -> None:
        match event.type:
            case EventType.ENQUEUED:
                trail.enqueued += 1
            case EventType.RETRYING | EventType.FAILED:
                trail.failures += 1
            case EventType.STALLED:
                trail.stalls += 1
                self.figures["rescued"] += 1
            case EventType.RELEASED:
                self.figures["released"] += 1
            case EventType.COMPLETED:
                if trail.completed_token:
                    self._report("completed twice", f"{event}")
                trail.completed_token = event.token
            case _:
                pass

    def _check_group(self, event: Event, target: State | None) -> None:
        """At most as many members run as the group allows; one of a strict group ends before the next begins."""
        kind = event.group.partition("-")[0]
        running = self._running.setdefault(event.group, set())
        if target is State.ACTIVE:
            running.add(event.id)
            if len(running) > CAPS[kind]:
                self._report("group limit exceeded", f"{event}: {len(running)} run")
            if kind == "strict" and self._begun.setdefault(event.group, event.id) != event.id:
                self._report("strict group out of order", f"{event}: {self._begun[event.group]} has begun")
            return
        running.discard(event.id)
        if target in TERMINAL and self._begun.get(event.group) == event.id:
            del self._begun[event.group]
