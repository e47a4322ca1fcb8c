"""Links between jobs: the part of docs/verbs.md on flows, within one queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.job import Dependency
from penstock.core.lifecycle import TERMINAL, EventType, State
from penstock.core.outcome import Failure
from tests.model.record import Entry, Record

__all__ = ["BY_DEPENDENCY", "NOTHING_TO_WAIT_FOR", "Links"]

S, E = State, EventType
BY_DEPENDENCY = Failure("DependencyFailed", "")
NOTHING_TO_WAIT_FOR = Failure("NothingToWaitFor", "")
NOT_FOUND = Failure("DependencyNotFound", "")


class End(NamedTuple):
    id: str
    state: str
    result: bytes | None = None
    failure: Failure | None = None


class Links:
    """Mixed into the steps."""

    records: dict[str, Record]
    now: int

    def __init__(self) -> None:
        super().__init__()
        self._ends: deque[tuple[str, str, End]] = deque()
        self._works_off = False
        self._giving = ""

    # What a job waits for

    def are_there(self, after: Sequence[Dependency], known: set[str]) -> bool:
        return all(one.id in known or self._kept(one.id) for one in after)

    def depend(
        self,
        id: str,
        flow: str,
        entries: dict[str, Entry],
        after: Sequence[Dependency],
        own: Sequence[str] = (),
    ) -> None:
        """Adds to the entries of a job that may not be there yet."""
        new: list[Dependency] = []
        for one in after:
            if one.id not in entries:
                entries[one.id] = Entry(one.policy)
                new.append(one)
        self.look_at(id, flow, entries, [one.id for one in new if one.id not in own])

    def look_at(self, id: str, flow: str, entries: dict[str, Entry], ids: Sequence[str]) -> None:
        self._giving = id
        for one in ids:
            record = self._kept(one)
            if record is None:
                self._count(entries, End(one, "removed", failure=NOT_FOUND))
                continue
            if record.state is not S.COMPLETED:
                record.dependents.append((id, flow))
            if record.state in TERMINAL:
                self._count(entries, self._end(record))
        self._giving = ""

    def _count(self, entries: dict[str, Entry], end: End) -> bool:
        """Whether the end fails whom the entries are of."""
        entry = entries[end.id]
        entry.state, entry.result, entry.failure = end.state, end.result, end.failure
        return entry.counts and entry.state != "completed" and entry.policy != "ignore"

    def conclude(self, record: Record) -> None:
        """After its event: fails a job that a dependency has failed, unless it is active."""
        if self.is_failed(record) and record.state not in (*TERMINAL, S.ACTIVE):
            record.failure = BY_DEPENDENCY
            self._finish(record, S.FAILED, E.FAILED)

    def is_failed(self, record: Record) -> bool:
        return any(
            entry.counts and entry.state != "completed" and entry.policy != "ignore"
            for entry in record.entries.values()
        )

    def to_look_at_again(self, record: Record) -> list[str]:
        return [
            id
            for id, entry in record.entries.items()
            if entry.counts and entry.state != "completed" and entry.policy != "ignore"
        ]

    def look_again(self, record: Record) -> None:
        again = self.to_look_at_again(record)
        record.awaited = 0
        for id in again:
            record.entries[id] = Entry(record.entries[id].policy)
        self.look_at(record.id, record.flow, record.entries, again)

    # What a job has to tell

    def tell_dependents(self, record: Record, state: str = "") -> None:
        end = End(record.id, state) if state else self._end(record)
        for id, flow in record.dependents:
            self._ends.append((id, flow, end))
        if self._works_off:
            return
        self._works_off = True
        while self._ends:
            self._done(*self._ends.popleft())
        self._works_off = False

    def link(self, record: Record, dependents: Sequence[tuple[str, str]]) -> None:
        if record.state is not S.COMPLETED:
            record.dependents += [one for one in dependents if one not in record.dependents]
        if record.state in TERMINAL:
            for id, flow in dependents:
                self._ends.append((id, flow, self._end(record)))
            self.tell_dependents(Record(**{**vars(record), "dependents": []}))

    def _done(self, id: str, flow: str, end: End) -> None:
        record = self.records.get(id)
        if (
            record is None
            or record.flow != flow
            or end.id not in record.entries
            or record.entries[end.id].counts
        ):
            return
        if self._count(record.entries, end):
            self.conclude(record)
        elif record.state is S.BLOCKED and record.blocked_by == "children" and not record.awaits:
            self._unblock(record)

    def _unblock(self, record: Record) -> None:
        record.blocked_by = ""
        if record.run_at > self.now:
            record.state = S.SCHEDULED
        else:
            self._enter_waiting(record)
        self._append(E.UNBLOCKED, record)

    def _end(self, record: Record) -> End:
        failure = record.failure if record.state is S.FAILED else None
        shown = failure and Failure(failure.type, failure.message)
        return End(
            record.id, record.state.value, record.result if record.state is S.COMPLETED else None, shown
        )

    # Of the steps

    def _kept(self, id: str) -> Record | None:
        raise NotImplementedError

    def _enter_waiting(self, record: Record) -> None:
        raise NotImplementedError

    def _append(
        self, event: EventType, record: Record | None = None, *, token: int = 0, state: str | None = None
    ) -> None:
        raise NotImplementedError

    def _finish(self, record: Record, state: State, event: EventType, *, token: int = 0) -> State:
        raise NotImplementedError
