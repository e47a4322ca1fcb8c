"""What the model keeps of a job, and how jobs are ordered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.core.job import STAGED_FROM_MS, Extras, Lease, Options
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Failure
from penstock.core.step import SENT_RESULT, Step
from penstock.storage.values import Finished

__all__ = [
    "ORDER",
    "Entry",
    "Happened",
    "Record",
    "Slot",
    "by_time",
    "in_line",
    "lease_of",
    "news_of",
    "replaces",
]


@dataclass
class Slot:
    """A dispatch as it is applied to a job that exists. ``None`` keeps what the job has."""

    payload: bytes | None
    terms: tuple[Options, int, bool, int] | None
    run_at: int
    when: str
    reset_counts: bool
    run_id: str
    write_id: str
    waiters: set[str] = field(default_factory=set)
    wall_at: int = 0


@dataclass
class Entry:
    """What a job knows of one it depends on."""

    policy: str
    state: str = "pending"
    result: bytes | None = None
    failure: Failure | None = None

    @property
    def counts(self) -> bool:
        if self.policy == "wait":
            return self.state in ("completed", "removed")
        return self.state != "pending"


@dataclass
class Record:
    id: str
    incarnation: int
    state: State
    payload: bytes
    options: Options
    priority: int
    lifo: bool
    ttl_ms: int
    run_id: str
    write_id: str
    number: int
    ready_at: int
    run_at: int
    enqueued_at: int
    expires_at: int
    runs: int = 0
    failures: int = 0
    stalls: int = 0
    claimed_at: int = 0
    finished_at: int = 0
    kept_until: int = 0
    token: int = 0
    settled_as: State | None = None
    worker: str = ""
    lease_until: int = 0
    cancelling: bool = False
    failure: Failure | None = None
    result: bytes | None = None
    progress: bytes | None = None
    log: list[str] = field(default_factory=list)
    slot: Slot | None = None
    waiters: set[str] = field(default_factory=set)
    extras: Extras | None = None
    flow: str = ""
    dependents: list[tuple[str, str]] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    awaited: int = 0
    failed_by: str = ""
    blocked_by: str = ""
    signal: bytes | None = None
    early: list[tuple[str, bytes]] = field(default_factory=list)
    slot_hold: int = 0
    wall_at: int = 0
    wall_run_at: int = 0
    steps: dict[str, Step] = field(default_factory=dict)

    @property
    def recorded(self) -> list[Step]:
        """The steps in their order, without large results."""
        ordered = sorted(self.steps.values(), key=lambda step: step.number)
        return [replace(step, result=None) if step.size > SENT_RESULT else step for step in ordered]

    @property
    def follows_the_clock(self) -> bool:
        is_timed = self.state is State.SCHEDULED or self.blocked_by == "children"
        return is_timed and self.wall_at > 0 and self.run_at == self.wall_run_at

    @property
    def holds(self) -> dict[str, int]:
        return (self.extras and self.extras.holds) or {}

    @property
    def group(self) -> str:
        return self.extras.group if self.extras else ""

    @property
    def cost(self) -> int:
        return self.extras.cost if self.extras else 1

    @property
    def is_staged(self) -> bool:
        return self.state is State.SCHEDULED and self.run_at >= STAGED_FROM_MS

    @property
    def awaits(self) -> bool:
        """Whether some of the jobs it depends on do not count yet."""
        return not all(entry.counts for entry in self.entries.values())


class Happened(NamedTuple):
    """An event, as far as engines must agree on it. ``token`` is 0 where the event does not carry one."""

    type: EventType | str
    id: str
    incarnation: int
    state: str
    token: int


def replaces(when: str, new: int, old: int) -> bool:
    match when:
        case "always":
            return True
        case "if_earlier":
            return new < old
        case "if_later":
            return new > old
        case _:
            return False


def by_time(name: str) -> Callable[[Record], tuple[int, bytes]]:
    return lambda record: (getattr(record, name), record.id.encode())


def in_line(record: Record) -> tuple[int, int, int]:
    if record.lifo:
        return (record.priority, 0, -record.number)
    return (record.priority, 1, record.number)


ORDER: dict[State, Callable[[Record], Any]] = {
    State.SCHEDULED: by_time("run_at"),
    State.WAITING: in_line,
    State.BLOCKED: lambda record: (-record.number if record.lifo else record.number, record.id.encode()),
    State.ACTIVE: by_time("lease_until"),
    State.COMPLETED: by_time("kept_until"),
    State.FAILED: by_time("kept_until"),
    State.CANCELLED: by_time("kept_until"),
}


def news_of(record: Record) -> Finished:
    failure = record.failure
    if record.state is not State.FAILED and not (failure and failure.type == "Replaced"):
        failure = None
    return Finished(record.id, record.incarnation, record.state, record.result, failure)


def lease_of(record: Record) -> Lease:
    return Lease(
        id=record.id,
        token=record.token,
        incarnation=record.incarnation,
        run=record.runs,
        failures=record.failures,
        stalls=record.stalls,
        payload=record.payload,
        options=record.options,
        priority=record.priority,
        enqueued_at_ms=record.enqueued_at,
        claimed_at_ms=record.claimed_at,
        expires_at_ms=record.expires_at,
        cancelling=record.cancelling,
        run_id=record.run_id,
        extras=record.extras,
        signal=record.signal,
        steps=tuple(record.recorded) or None,
    )
