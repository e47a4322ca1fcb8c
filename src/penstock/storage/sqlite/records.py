"""The row of a job as the verbs see it, and the small values packed inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, get_args

import msgspec

from penstock.core.job import (
    DEFAULT_OPTIONS,
    EMPTY_EXTRAS,
    STAGED_FROM_MS,
    Extras,
    Job,
    Lease,
    Options,
    pack_extras,
    unpack_extras,
)
from penstock.core.lifecycle import BlockedBy, State
from penstock.core.outcome import DAMAGED, Failure, damaged_failure
from penstock.core.step import Step
from penstock.storage.sqlite import NEW_COLUMNS, RECORD_COLUMNS, SAVED_COLUMNS

# Plain strings: the sqlite3 module binds them faster than members of an enum.
SCHEDULED: Final = State.SCHEDULED.value
WAITING: Final = State.WAITING.value
BLOCKED: Final = State.BLOCKED.value
ACTIVE: Final = State.ACTIVE.value
COMPLETED: Final = State.COMPLETED.value
FAILED: Final = State.FAILED.value
CANCELLED: Final = State.CANCELLED.value
STATES: Final = {state.value: state for state in State}
FINISHED: Final = (COMPLETED, FAILED, CANCELLED)
GROUP, CHILDREN, SIGNAL = get_args(BlockedBy)
REMOVED: Final = ""
"""The state of a record to delete."""

pack_options: Final = msgspec.msgpack.Encoder().encode
unpack_options: Final = lru_cache(4096)(msgspec.msgpack.Decoder(Options).decode)
pack_failure: Final = msgspec.msgpack.Encoder().encode
_failures: Final = msgspec.msgpack.Decoder(Failure)


UNREADABLE: Final = (ValueError, TypeError, RecursionError)
"""The errors of decoding a damaged value."""


class Unreadable(Exception):
    """Stored values contradict each other. ``repair`` finds the cause."""


class Slot(msgspec.Struct, array_like=True):
    """A dispatch that waits for the end of an active job's run.

    ``run_at`` is a time of the queue, ``wall_at`` the wall time that it stands for (0: none), ``run_at_mode`` the
    rule for replacing a pending job's time. ``listeners`` wait for the rerun, not for the current run.
    """

    payload: bytes | None
    options: Options | None
    priority: int
    lifo: bool
    ttl_ms: int
    run_at: int
    run_at_mode: str
    reset_counts: bool
    run_id: str
    write_id: str
    listeners: list[str]
    wall_at: int = 0


_slots: Final = msgspec.msgpack.Decoder(Slot)
_packer: Final = msgspec.msgpack.Encoder()


class Record(msgspec.Struct, gc=False):
    """One job. The fields up to ``was`` are in the order of ``RECORD_COLUMNS``.

    Verbs change it in memory, and ``Unit.save`` writes it. ``key`` is 0 if the job has no row yet. The state
    ``REMOVED`` deletes the row. ``was`` is the state as read. ``payload`` is set only to be written.

    ``group_role`` is how its group counts it: ``w`` waiting, ``a`` active, ``b`` blocked, ``h`` holding a slot,
    ``k`` blocked and holding a slot, or empty. ``line`` is its place among the blocked members. ``slot_hold`` says
    what a blocked or scheduled member keeps: 1 a place at the front of its group's line, 2 its slot. ``wall_at`` is
    the wall time that ``run_at`` stands for, if this call has set it.
    """

    key: int
    id: str
    incarnation: int
    state: str
    priority: int
    place: int
    options_key: int
    packed_options: bytes
    ttl_ms: int
    run_id: str
    write_id: str
    blocked_by: str = ""
    runs: int = 0
    failures: int = 0
    stalls: int = 0
    ready_at: int = 0
    run_at: int = 0
    enqueued_at: int = 0
    expires_at: int = 0
    claimed_at: int = 0
    finished_at: int = 0
    kept_until: int = 0
    token: int = 0
    settled_as: str = ""
    worker: str = ""
    lease_until: int = 0
    cancelling: int = 0
    failure: bytes | None = None
    result: bytes | None = None
    progress: bytes | None = None
    rerun: bytes | None = None
    packed_extras: bytes | None = None
    has_links: int = 0
    held_until: int = 0
    slot_hold: int = 0
    was: str = ""
    payload: bytes | None = None
    group_role: str = ""
    line: tuple[int, int, int] = (0, 0, 0)
    unpacked_extras: Extras | None = None
    wall_at: int = 0

    @property
    def options(self) -> Options:
        return unpack_options(self.packed_options)

    @property
    def lifo(self) -> bool:
        return self.place < 0

    @property
    def slot(self) -> Slot | None:
        return None if self.rerun is None else _slots.decode(self.rerun)

    @slot.setter
    def slot(self, slot: Slot | None) -> None:
        self.rerun = None if slot is None else _packer.encode(slot)

    @property
    def extras(self) -> Extras:
        """Return the extras; empty ones if the job has none."""
        extras = self.unpacked_extras
        if extras is None:
            extras = self.unpacked_extras = as_extras(self.packed_extras) or EMPTY_EXTRAS
        return extras

    @extras.setter
    def extras(self, extras: Extras | None) -> None:
        has_any = extras is not None and extras != EMPTY_EXTRAS
        self.packed_extras = pack_extras(extras) if has_any else None
        self.unpacked_extras = None
        self.has_links = int(extras is not None and extras.has_links)

    def renumber(self, number: int, *, lifo: bool) -> None:
        """Set the number in line, negative for LIFO jobs."""
        self.place = -number if lifo else number

    @property
    def wake_at(self) -> int:
        """Return when the suspension times out; 0 without a suspension or timeout."""
        is_suspended = self.state == BLOCKED and self.blocked_by == SIGNAL
        return self.extras.awaits_until_ms if is_suspended else 0

    @property
    def error_type(self) -> str:
        """Return the error class of a failed job, which is indexed; empty in other states."""
        failure = unpack_failure(self.failure) if self.state == FAILED else None
        return "" if failure is None else failure.type

    def note_group_role(self) -> None:
        """Set the group role of a record that was just read."""
        in_line = self.state == BLOCKED and self.blocked_by == GROUP
        if self.slot_hold == 2:
            self.group_role = "k" if in_line else "h"
        elif self.extras.group:
            self.group_role = "b" if in_line else {WAITING: "w", ACTIVE: "a"}.get(self.state, "")
        if in_line:
            self.line = (0, 0, abs(self.place)) if self.slot_hold else (1, self.priority, self.place)

    def is_past_ttl(self, now_ms: int) -> bool:
        return 0 < self.expires_at <= now_ms

    def keep(self) -> None:
        """Set the expiry of the finished record, from its options and holds."""
        options = self.options
        ttl_ms = options.failure_ttl_ms if self.state == FAILED else options.result_ttl_ms
        self.kept_until = self.finished_at + max(ttl_ms, self.extras.longest_hold_ms if self.has_links else 0)

    @property
    def is_timed(self) -> bool:
        """Return whether ``run_at`` is still to come, or applies once the job's dependencies have ended."""
        return self.state == SCHEDULED or (self.state == BLOCKED and self.blocked_by == CHILDREN)

    @property
    def is_staged(self) -> bool:
        """Return whether the job is kept back until its write is complete."""
        return self.state == SCHEDULED and self.run_at >= STAGED_FROM_MS


_FIELD_OF: Final = dict(zip(RECORD_COLUMNS[:-1], Record.__struct_fields__, strict=False))


def _getter(columns: Iterable[str]) -> Callable[[Record], tuple[Any, ...]]:
    return attrgetter(*(_FIELD_OF.get(name, name) for name in columns))


saved_values: Final = _getter(SAVED_COLUMNS)
"""Returns the values of ``SAVED_COLUMNS``."""
new_values: Final = _getter(NEW_COLUMNS)
"""Returns the values of ``NEW_COLUMNS``."""


def unpack_failure(packed: bytes | None) -> Failure | None:
    """Return the failure in a record, if any."""
    return None if packed is None else _failures.decode(packed)


def shown_failure(record: Record, state: str) -> Failure | None:
    """Return the failure to show for an end in this state: the error, or the job that replaced it."""
    failure = unpack_failure(record.failure) if state in (FAILED, CANCELLED) else None
    return failure if failure and (state == FAILED or failure.type == "Replaced") else None


def as_extras(packed: bytes | None) -> Extras | None:
    """Return the extras in a record, if any."""
    return None if packed is None else unpack_extras(packed)


def as_lease(
    record: Record, payload: bytes, *, signal: bytes | None, steps: tuple[Step, ...] | None
) -> Lease:
    """Return the lease for the holder of this active record."""
    return Lease(
        record.id, record.token, record.incarnation, record.runs, record.failures, record.stalls, payload,
        record.options, record.priority, record.enqueued_at, record.claimed_at, record.expires_at,
        bool(record.cancelling), record.run_id, as_extras(record.packed_extras), signal, steps,
    )  # fmt: skip


def as_job(record: Record, payload: bytes, *, queue: str) -> Job:
    """Return the record as users see it. A record that cannot be read is shown as damaged."""
    try:
        return _as_job(record, payload, queue=queue)
    except (ValueError, LookupError, TypeError) as error:
        return _damaged_job(record, payload, queue=queue, error=error)


def _as_job(record: Record, payload: bytes, *, queue: str) -> Job:
    failure = unpack_failure(record.failure)
    is_damaged = failure is not None and failure.type == DAMAGED and record.state == FAILED
    return Job(
        id=record.id, queue=queue, state=STATES[record.state], incarnation=record.incarnation,
        options=record.options, payload=payload, priority=record.priority, lifo=record.lifo,
        run_id=record.run_id, write_id=record.write_id,
        blocked_by=record.blocked_by if record.state == BLOCKED else "",
        enqueued_at_ms=record.enqueued_at, run_at_ms=record.run_at, claimed_at_ms=record.claimed_at,
        finished_at_ms=record.finished_at, expires_at_ms=record.expires_at, kept_until_ms=record.kept_until,
        runs=record.runs, failures=record.failures, stalls=record.stalls, token=record.token,
        worker=record.worker, lease_until_ms=record.lease_until, cancelling=bool(record.cancelling),
        has_rerun=record.rerun is not None, result=None if is_damaged else record.result, failure=failure,
        progress=record.progress, extras=as_extras(record.packed_extras),
        damaged=record.result if is_damaged else None,
    )  # fmt: skip


def _damaged_job(record: Record, payload: bytes, *, queue: str, error: Exception) -> Job:
    return Job(
        id=record.id,
        queue=queue,
        state=STATES.get(record.state, State.FAILED),
        incarnation=record.incarnation,
        options=DEFAULT_OPTIONS,
        payload=payload,
        enqueued_at_ms=record.enqueued_at,
        failure=damaged_failure(f"{type(error).__name__}: {error}"),
    )
