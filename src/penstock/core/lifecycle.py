"""The states of a job, the answers of the verbs on jobs, and the transitions that they make, as data.

Engines implement ``TRANSITIONS``, and the contract tests walk it. Only a verb changes a state; time alone never
does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple


class State(StrEnum):
    """The state of a job. ``failed`` is the dead-letter set."""

    SCHEDULED = "scheduled"
    WAITING = "waiting"
    BLOCKED = "blocked"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


BlockedBy = Literal["group", "children", "signal"]
"""The thing that a blocked job waits for: room in its group, its dependencies, or a signal."""

OPEN = frozenset({State.SCHEDULED, State.WAITING, State.BLOCKED, State.ACTIVE})
TERMINAL = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})


class EventType(StrEnum):
    """The type of an event in the log."""

    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    COMPLETED = "completed"
    FAILED = "failed"
    RETRYING = "retrying"
    SNOOZED = "snoozed"
    SUSPENDED = "suspended"
    SIGNALLED = "signalled"
    UNBLOCKED = "unblocked"
    RELEASED = "released"
    LIMITED = "limited"
    STALLED = "stalled"
    EXPIRED = "expired"
    PROMOTED = "promoted"
    BLOCKED = "blocked"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    RETRIED = "retried"
    CHANGED = "changed"
    REMOVED = "removed"
    PROGRESSED = "progressed"
    RECORDED = "recorded"
    USED = "used"
    PAUSED = "paused"
    RESUMED = "resumed"
    CONFIGURED = "configured"
    OBLITERATED = "obliterated"


# The answers of verbs, for each job


CancelAnswer = Literal[
    "cancelled",
    "requested",
    "completed",
    "failed",
    "already_cancelled",
    "not_found",
    "rerun_cancelled",
    "no_rerun",
]
RetryAnswer = Literal["retried", "not_failed", "not_found"]
PromoteAnswer = Literal["promoted", "not_scheduled", "not_found"]
ChangeAnswer = Literal["changed", "wrong_state", "not_found"]
AttachAnswer = Literal["attached", "ended", "not_found"]
RemoveAnswer = Literal["removed", "active", "not_found"]
UnchangedAnswer = Literal["removed", "changed", "held", "not_found"]
SchedulerAnswer = Literal["created", "updated", "unchanged"]
StepAnswer = Literal["recorded", "known", "lost"]
CopyStepsAnswer = Literal["copied", "active", "unknown_step", "not_found"]
ResetAnswer = Literal["reset", "active", "unknown_step", "not_found"]
SignalAnswer = Literal["resumed", "kept", "full", "ended", "not_found"]
HoldAnswer = Literal["held", "not_found"]
ReleaseAnswer = Literal["released", "not_held", "not_found"]


class Transition(NamedTuple):
    """``verb`` may take a job from ``source`` to ``target`` and log ``event``.

    A source of ``None`` is an id without a record; a target of ``None`` removes the record. Retention logs no event
    when it removes a finished job, and ``obliterate`` logs one event for the queue. Three names are not verbs of
    the contract: ``deliver`` is the effect of a dependency's end on its dependents, ``fill`` the effect of room in
    a group on its members, and ``quarantine`` the effect of a record that cannot be read; any verb may cause them.
    """

    verb: str
    source: State | None
    target: State | None
    event: EventType | None


def _table() -> tuple[Transition, ...]:
    s, e, t = State, EventType, Transition
    pending = (s.SCHEDULED, s.WAITING, s.BLOCKED)
    finished = (s.COMPLETED, s.FAILED, s.CANCELLED)
    rows = [
        *(t("enqueue", source, s.WAITING, e.ENQUEUED) for source in (None, *finished)),
        *(t("enqueue", source, s.SCHEDULED, e.ENQUEUED) for source in (None, *finished)),
        *(t("enqueue", source, s.BLOCKED, e.ENQUEUED) for source in (None, *finished)),
        # A staged job is replaced by one of another write.
        *(t("enqueue", s.SCHEDULED, target, e.ENQUEUED) for target in pending),
        t("enqueue", s.WAITING, s.SCHEDULED, e.CHANGED),
        t("enqueue", s.SCHEDULED, s.WAITING, e.CHANGED),
        *(t("enqueue", source, s.CANCELLED, e.CANCELLED) for source in pending),
        t("enqueue", s.SCHEDULED, s.BLOCKED, e.CHANGED),
        t("claim", s.SCHEDULED, s.WAITING, e.PROMOTED),
        t("claim", s.SCHEDULED, s.BLOCKED, e.PROMOTED),
        t("claim", s.WAITING, s.BLOCKED, e.BLOCKED),
        t("claim", s.WAITING, s.ACTIVE, e.CLAIMED),
        *(t("claim", s.WAITING, s.FAILED, event) for event in (e.EXPIRED, e.FAILED)),
        t("settle", s.ACTIVE, s.COMPLETED, e.COMPLETED),
        t("settle", s.ACTIVE, s.FAILED, e.FAILED),
        t("settle", s.ACTIVE, s.FAILED, e.EXPIRED),
        t("settle", s.ACTIVE, s.SCHEDULED, e.RETRYING),
        t("settle", s.ACTIVE, s.SCHEDULED, e.SNOOZED),
        *(
            t("settle", s.ACTIVE, target, event)
            for target in (s.WAITING, s.BLOCKED)
            for event in (e.RETRYING, e.SNOOZED, e.SUSPENDED, e.RELEASED, e.LIMITED)
        ),
        t("settle", s.ACTIVE, s.CANCELLED, e.CANCELLED),
        *(t("sweep", s.SCHEDULED, target, e.PROMOTED) for target in (s.WAITING, s.BLOCKED)),
        *(t("sweep", s.BLOCKED, target, e.UNBLOCKED) for target in (s.WAITING, s.BLOCKED)),
        *(t("sweep", s.ACTIVE, target, e.STALLED) for target in (s.WAITING, s.BLOCKED)),
        t("sweep", s.ACTIVE, s.FAILED, e.FAILED),
        t("sweep", s.ACTIVE, s.FAILED, e.EXPIRED),
        t("sweep", s.ACTIVE, s.CANCELLED, e.CANCELLED),
        *(t("sweep", source, s.FAILED, e.EXPIRED) for source in pending),
        *(t("sweep", source, None, None) for source in finished),
        *(t("cancel", source, s.CANCELLED, e.CANCELLED) for source in pending),
        t("cancel", s.ACTIVE, s.ACTIVE, e.CANCELLING),
        *(
            t("retry", source, target, e.RETRIED)
            for source in (s.FAILED, s.CANCELLED)
            for target in (s.WAITING, s.BLOCKED)
        ),
        *(t("attach", source, source, e.CHANGED) for source in (*pending, s.ACTIVE)),
        *(t("attach", source, s.BLOCKED, e.CHANGED) for source in (s.SCHEDULED, s.WAITING)),
        *(t("deliver", s.BLOCKED, target, e.UNBLOCKED) for target in (s.WAITING, s.SCHEDULED, s.BLOCKED)),
        *(t("deliver", source, s.FAILED, e.FAILED) for source in pending),
        *(t("promote", s.SCHEDULED, target, e.PROMOTED) for target in (s.WAITING, s.BLOCKED)),
        *(t("unstage", s.SCHEDULED, target, e.PROMOTED) for target in (s.WAITING, s.BLOCKED)),
        t("unstage", s.SCHEDULED, s.SCHEDULED, e.CHANGED),
        t("unstage", s.SCHEDULED, None, e.REMOVED),
        t("signal", s.BLOCKED, s.WAITING, e.SIGNALLED),
        *(t("signal", source, source, e.SIGNALLED) for source in (*pending, s.ACTIVE)),
        t("change", s.WAITING, s.SCHEDULED, e.CHANGED),
        *(t("change", s.SCHEDULED, target, e.CHANGED) for target in (s.WAITING, s.BLOCKED)),
        *(t("change", source, source, e.CHANGED) for source in State),
        *(t("remove", source, None, e.REMOVED) for source in (*pending, *finished)),
        *(t("remove_unchanged", source, None, e.REMOVED) for source in finished),
        *(t("drain", source, None, e.REMOVED) for source in (s.WAITING, s.SCHEDULED)),
        *(t("clean", source, None, e.REMOVED) for source in finished),
        *(t("obliterate", source, None, None) for source in State),
        t("fill", s.BLOCKED, s.WAITING, e.UNBLOCKED),
        *(t("quarantine", source, s.FAILED, e.FAILED) for source in State),
    ]
    return tuple(rows)


TRANSITIONS: tuple[Transition, ...] = _table()


def sources(verb: str) -> frozenset[State | None]:
    """Return the states that ``verb`` may start from; it changes nothing in all others."""
    return frozenset(row.source for row in TRANSITIONS if row.verb == verb)
