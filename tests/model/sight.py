"""What an engine and the model must agree on, brought to one form.

Times become units since the machine's first moment: what is left over is how long the calls took. Messages of
failures the store itself makes are its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.event import Event
from penstock.core.flow import DependencyRecord
from penstock.core.job import EMPTY_EXTRAS, STAGED_FROM_MS, Extras, Job, Lease, NewJob
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.outcome import Failure
from penstock.core.step import Step
from penstock.storage.values import (
    Claimed,
    Finished,
    GroupPage,
    NewScheduler,
    Scheduler,
    Schedulers,
    SettledBatch,
    Swept,
)
from tests.model.record import Happened, Record
from tests.model.strategies import IDS, UNIT

__all__ = ["Sight"]

APART_MS = 100_000
"""How far the instants of two jobs are apart at least. A tie would be decided by the milliseconds that a call takes,
because those count when an instant of the wall clock becomes a queue time."""


class Sight:
    """How one side is seen; ``start_ms`` is its time at the start."""

    def __init__(self, start_ms: int) -> None:
        self.start_ms = start_ms

    def placed(self, job: NewJob) -> NewJob:
        """Return the job with its instant in this side's time. No two ids have the same."""
        if job.run_at_ms is None:
            return job
        apart_ms = APART_MS * (1 + IDS.index(job.id))
        return msgspec.structs.replace(job, run_at_ms=job.run_at_ms + self.start_ms - apart_ms)

    def instant(self, ms: int) -> int:
        """An instant in this side's time; 0 stays none."""
        return ms + self.start_ms if ms else 0

    def put(self, new: NewScheduler) -> NewScheduler:
        """The scheduler with its instants in this side's time."""
        instants = {"next_ms": self.instant(new.next_ms), "end_ms": self.instant(new.end_ms)}
        return msgspec.structs.replace(new, **instants)

    def answer(self, value: Any) -> Any:
        return _seen(value, self.start_ms)

    def news(self, news: list[Finished]) -> list[Finished]:
        """In the order of ids: the contract has none for news."""
        return sorted(self.answer(news), key=lambda item: (item.id, item.incarnation))

    def happened(self, event: Event, *, with_token: bool) -> Happened:
        return Happened(
            event.type, event.id, event.incarnation, event.state, event.token if with_token else 0
        )

    def job(self, job: Job) -> dict[str, Any]:
        seen = {name: getattr(job, name) for name in _PLAIN}
        times = {name: _unit(getattr(job, f"{name}_ms"), self.start_ms) for name in _TIMES}
        seen["extras"] = _extras(job.extras, self.start_ms)
        return _relevant({**seen, **times, "failure": _failure(job.failure), "slot": job.has_rerun})

    def edges(self, records: list[DependencyRecord]) -> list[tuple[Any, ...]]:
        return [(one.id, one.policy, one.state, one.result, _failure(one.failure)) for one in records]

    def entries(self, record: Record) -> list[tuple[Any, ...]]:
        return [
            (id, one.policy, one.state, one.result, _failure(one.failure))
            for id, one in record.entries.items()
        ]

    def record(self, record: Record) -> dict[str, Any]:
        seen = {name: getattr(record, name) for name in _PLAIN}
        times = {name: _unit(getattr(record, name), self.start_ms) for name in _TIMES}
        seen["extras"] = _extras(record.extras, self.start_ms)
        return _relevant({**seen, **times, "failure": record.failure, "slot": record.slot is not None})


_PLAIN = (
    *("id", "incarnation", "state", "payload", "options", "priority", "lifo", "run_id", "write_id"),
    *("runs", "failures", "stalls", "token", "worker", "cancelling", "result", "progress"),
    *("blocked_by", "extras"),
)
_TIMES = ("enqueued_at", "run_at", "claimed_at", "finished_at", "expires_at", "kept_until", "lease_until")


def _relevant(seen: dict[str, Any]) -> dict[str, Any]:
    """Without what the contract says nothing about in the job's state."""
    state: State = seen["state"]
    dropped = {"claimed_at", "lease_until", "worker"} if state is not State.ACTIVE else set()
    if state in TERMINAL:
        dropped |= {"cancelling", "run_at"}
    return {name: value for name, value in seen.items() if name not in dropped}


def _seen(value: Any, start_ms: int) -> Any:
    match value:
        case list():
            return [_seen(item, start_ms) for item in value]
        case Lease():
            times = ("enqueued_at_ms", "claimed_at_ms", "expires_at_ms")
            changed: dict[str, Any] = {name: _unit(getattr(value, name), start_ms) for name in times}
            changed["extras"] = _extras(value.extras, start_ms)
            changed["steps"] = value.steps and tuple(_seen(list(value.steps), start_ms))
            return msgspec.structs.replace(value, **changed)
        case Step():
            changed = {name: _unit(getattr(value, name), start_ms) for name in ("at_ms", "until_ms")}
            return msgspec.structs.replace(value, **changed)
        case Claimed():
            leases = _seen(value.leases, start_ms)
            return msgspec.structs.replace(value, leases=leases, wait_ms=_wait(value.wait_ms))
        case SettledBatch():
            return msgspec.structs.replace(value, claimed=_seen(value.claimed, start_ms))
        case Swept():
            due = tuple((one.name, _unit(one.slot_ms, start_ms), one.spec) for one in value.due)
            waits = {"wait_ms": _wait(value.wait_ms), "slot_wait_ms": _wait(value.slot_wait_ms)}
            return msgspec.structs.replace(value, due=due, **waits)
        case Schedulers():
            return _seen(value.schedulers, start_ms)
        case Scheduler():
            changed = {name: _unit(getattr(value, name), start_ms) for name in ("next_ms", "end_ms")}
            return msgspec.structs.replace(value, **changed)
        case GroupPage(groups):
            return GroupPage(
                [msgspec.structs.replace(group, wait_ms=_wait(group.wait_ms)) for group in groups]
            )
        case Finished():
            return msgspec.structs.replace(value, failure=_failure(value.failure))
        case _:
            return value


def _extras(extras: Extras | None, start_ms: int) -> Extras | None:
    if extras is None:
        return None
    holds = extras.holds and {name: ms // UNIT for name, ms in extras.holds.items()}
    until = _unit(extras.awaits_until_ms, start_ms) or 0
    # What ties a job to others is compared by what it does, and by what who waits knows.
    flows = {"flow": "", "dependents": None, "has_later_dependents": False, "has_dependencies": False}
    plain = msgspec.structs.replace(extras, awaits_until_ms=until, holds=holds, **flows)
    return None if plain == EMPTY_EXTRAS else plain


def _unit(time_ms: int, start_ms: int) -> int | None:
    if time_ms >= STAGED_FROM_MS:
        return time_ms  # of no side's time
    return (time_ms - start_ms) // UNIT if time_ms else None


def _wait(wait_ms: int | None) -> int | None:
    return None if wait_ms is None else -(-wait_ms // UNIT)


_OF_FLOWS = ("DependencyFailed", "DependencyNotFound", "NothingToWaitFor")


def _failure(failure: Failure | None) -> Failure | None:
    """Without texts that name jobs as flows do, and the step of a stall: the model does not know milliseconds."""
    if failure is not None and failure.type in _OF_FLOWS:
        return Failure(failure.type, "")
    if failure is not None and failure.type == "Stalled":
        return msgspec.structs.replace(failure, message=failure.message.partition(", in step ")[0])
    return failure
