"""Groups and limits in the model: docs/verbs.md, *Limits*, read aloud. Members are counted by looking at all jobs."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.lifecycle import TERMINAL, EventType, State
from penstock.core.limits import Bucket, GroupState, Limit, Obstacle
from penstock.storage.values import GroupPage
from tests.model.record import Record, in_line

__all__ = ["Group", "Grouping"]

S, E = State, EventType


@dataclass
class Group:
    """What is kept of a group beside its members. ``level`` is in milliseconds' worth of tokens."""

    paused: bool = False
    parked_until: int = 0
    starts: list[int] = field(default_factory=list)
    level: int | None = None
    level_at: int = 0
    per_ms: int = 0
    look: int = 0
    over: int = 0


class Grouping:
    """One queue's groups. The empty key is the queue itself."""

    now: int
    paused: bool
    records: dict[str, Record]

    def __init__(self) -> None:
        self.limits: dict[str, Limit] = {}
        self.groups: dict[str, Group] = {}
        self._touched: list[str] = []
        self._new: set[str] = set()

    # Given by the steps

    def _draw(self) -> int:
        raise NotImplementedError

    def _append(
        self, event: EventType, record: Record | None = None, *, token: int = 0, state: str | None = None
    ) -> None:
        raise NotImplementedError

    # Verbs

    def limit(self, key: str, limit: Limit | None) -> bool:
        if key != "*":
            self._refresh(key)
        if limit is None:
            self.limits.pop(key, None)
        else:
            self.limits[key] = limit
        self._append(E.CONFIGURED)
        if key == "*":
            for one in sorted((one for one in self.groups if one), key=str.encode):
                self._touch(one)
        else:
            self._refresh(key)
            self._touch(key)
        self._settle_groups()
        return True

    def pause_group(self, key: str, paused: bool) -> None:
        group = self._group(key)
        was_parked = not paused and group.parked_until > self.now
        if was_parked:
            group.parked_until = 0
        if group.paused != paused or was_parked:
            group.paused = paused
            self._append(E.PAUSED if paused else E.RESUMED)
            self._touch(key)
        self._settle_groups()

    def pause_for(self, key: str, duration_ms: int) -> None:
        group = self._group(key)
        if group.parked_until < self.now + duration_ms:
            group.parked_until = self.now + duration_ms
            self._append(E.PAUSED)
            self._touch(key)
        self._settle_groups()

    def list_groups(self) -> GroupPage:
        keys = sorted((key for key in self.groups if key), key=str.encode)
        return GroupPage([self._state(key) for key in keys])

    def read_groups(self, *keys: str) -> GroupPage:
        return GroupPage([self._state(key) if key else self._queue_state() for key in keys])

    def _queue_state(self) -> GroupState:
        states = [record.state for record in self.records.values()]
        queue, (room, wait_ms) = self._group(""), self._allowance(1)
        why: Obstacle = ""
        if self.paused:
            why, wait_ms = "paused", None
        elif queue.parked_until > self.now:
            why = "asked"
        elif not room:
            why = "concurrency" if wait_ms is None else "rate"
        counts = states.count(S.WAITING), states.count(S.ACTIVE), 0, states.count(S.BLOCKED)
        return GroupState("", *counts, self.paused, why, wait_ms)

    def _state(self, key: str) -> GroupState:
        w, a, h, b, _ = self._counts(key)
        group = self._group(key)
        why: Obstacle = "paused" if group.paused else ""
        at = 0
        if b:
            why, at = self._why(key, self._line(key)[0])
        elif not why and group.parked_until > self.now:
            why, at = "asked", group.parked_until
        return GroupState(key, w, a, h, b, group.paused, why, max(0, at - self.now) if at else None)

    # What a group is

    def _limit_of(self, key: str) -> Limit:
        return self.limits.get(key) or (self.limits.get("*", Limit()) if key else Limit())

    def _group(self, key: str) -> Group:
        """As it is now. Whether it is kept is decided when it is settled."""
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group()
            self._new.add(key)
        self._refresh(key)
        return group

    def _refresh(self, key: str) -> None:
        group, limit = self.groups.get(key), self._limit_of(key)
        if group is None:
            return
        per_ms = limit.rate.per_ms if limit.rate else 0
        group.starts = [at for at in group.starts if at + per_ms > self.now] if limit.rate else []
        bucket = limit.bucket
        if bucket is None:
            return
        full = bucket.capacity * bucket.per_ms
        level = full if group.level is None else group.level
        if group.level is not None and group.per_ms != bucket.per_ms:
            level = level // group.per_ms * bucket.per_ms
        group.level = min(full, level + (self.now - group.level_at) * bucket.refill)
        group.level_at, group.per_ms = self.now, bucket.per_ms

    def _group_role(self, record: Record) -> str:
        if not record.group or record.state in TERMINAL:
            return ""
        if record.state is S.BLOCKED and record.blocked_by == "group":
            return "k" if record.slot_hold == 2 else "b"
        if record.slot_hold == 2:
            return "h"
        return {S.WAITING: "w", S.ACTIVE: "a"}.get(record.state, "")

    def _counts(self, key: str, without: Record | None = None) -> tuple[int, int, int, int, int]:
        members = [r for r in self.records.values() if r.group == key and r is not without]
        roles = [self._group_role(record) for record in members]
        cost = sum(r.cost for r in members if self._group_role(r) == "w")
        both = roles.count("k")
        return roles.count("w"), roles.count("a"), roles.count("h") + both, roles.count("b") + both, cost

    def _line(self, key: str) -> list[Record]:
        """The blocked members in their order."""
        blocked = [r for r in self.records.values() if r.group == key and self._group_role(r) in ("b", "k")]
        return sorted(blocked, key=lambda r: (0, r.number) if r.slot_hold else (1, *in_line(r)))

    def _why(self, key: str, record: Record, without: Record | None = None) -> tuple[Obstacle, int]:
        group, limit = self._group(key), self._limit_of(key)
        w, a, h, _, cost = self._counts(key, without)
        if group.paused:
            return "paused", 0
        if group.parked_until > self.now:
            return "asked", group.parked_until
        if limit.concurrency and w + a + (0 if record.slot_hold == 2 else h) >= limit.concurrency:
            return "concurrency", 0
        if limit.rate and len(group.starts) + w >= limit.rate.count:
            return "rate", group.starts[0] + limit.rate.per_ms if group.starts else 0
        if limit.bucket:
            assert group.level is not None
            needed = cost + min(record.cost, limit.bucket.capacity)
            missing = needed * limit.bucket.per_ms - group.level
            if missing > 0:
                possible = needed <= limit.bucket.capacity
                return "bucket", self.now - (-missing // limit.bucket.refill) if possible else 0
        return "", 0

    # What happens to members

    def _touch(self, key: str) -> None:
        self._group(key)
        if key not in self._touched:
            self._touched.append(key)

    def _block(self, record: Record, slot_hold: int) -> None:
        record.state, record.blocked_by, record.slot_hold = S.BLOCKED, "group", slot_hold
        self._touch(record.group)

    def _held_back(self, record: Record, *, keeps_number: bool, role: str) -> bool:
        """It is to enter waiting; ``role`` is what it comes from."""
        if not record.group:
            return False
        key = record.group
        group, limit = self._group(key), self._limit_of(key)
        strict = limit.concurrency == 1
        w, a, _, b, _ = self._counts(key, without=record)
        if role == "h" or (role == "a" and (keeps_number or strict)):
            full = role == "h" and limit.concurrency and w + a >= limit.concurrency
            if full or group.paused or group.parked_until > self.now:
                self._block(record, 2 if role == "h" or strict else 1)
                return True
        else:
            record.slot_hold = 0
            if b or self._why(key, record, without=record)[0]:
                self._block(record, 0)
                return True
        record.slot_hold = 0
        self._touch(key)
        return False

    def _schedule(self, record: Record, run_at: int) -> None:
        role = self._group_role(record)
        record.state, record.run_at = S.SCHEDULED, run_at
        self._set_aside(record, role)

    def _wait_elsewhere(self, record: Record, role: str) -> None:
        """It waits for jobs it depends on: as for a time, and not in its group's line."""
        if role in ("b", "k"):
            record.slot_hold = 2 if role == "k" else 0
            self._touch(record.group)
        else:
            self._set_aside(record, role)

    def _set_aside(self, record: Record, role: str) -> None:
        """It waits for a time or a signal: with it, in a strict group, the others."""
        if role in ("a", "w"):
            record.slot_hold = 2 if role == "a" and self._limit_of(record.group).concurrency == 1 else 0
            self._touch(record.group)

    def _started(self, record: Record) -> bool:
        """A waiting one is to be leased. False: it went back to its group."""
        if not record.group:
            return True
        group, limit = self._group(record.group), self._limit_of(record.group)
        a, bucket = self._counts(record.group)[1], limit.bucket
        if (
            group.paused
            or group.parked_until > self.now
            or (limit.concurrency and a >= limit.concurrency)
            or (limit.rate and len(group.starts) >= limit.rate.count)
            or (bucket and (group.level or 0) < _price(record, bucket))
        ):
            self._block(record, 1)
            self._append(E.BLOCKED, record)
            return False
        if limit.rate:
            group.starts.append(self.now)
        if bucket:
            assert group.level is not None
            group.level -= _price(record, bucket)
        self._touch(record.group)
        return True

    def _left(self, record: Record, role: str) -> None:
        record.slot_hold = 0
        if role:
            self._touch(record.group)

    def _park(self, record: Record, until: int, *, queue: bool) -> None:
        key = "" if queue else record.group
        group = self._group(key)
        group.parked_until = max(group.parked_until, until)
        self._touch(key)

    # Filling

    def _settle_groups(self) -> None:
        touched, self._touched = self._touched, []
        for key in touched:
            if key:
                self._group(key).look = self._fill(key)
        self._touched = []
        for key in touched:
            self._keep_group(key)
        for key in self._new.difference(touched, [""]):
            self.groups.pop(key, None)  # only looked at
        self._new = set()

    def _fill(self, key: str) -> int:
        while line := self._line(key):
            first = line[0]
            why, at = self._why(key, first)
            if why:
                return at
            if not first.slot_hold:
                first.number = self._draw()
            first.state, first.blocked_by, first.slot_hold, first.ready_at = S.WAITING, "", 0, self.now
            self._append(E.UNBLOCKED, first)
        return 0

    def _keep_group(self, key: str) -> None:
        """A group that is over is dropped."""
        group, limit = self._group(key), self._limit_of(key)
        group.over = 0
        if not key or group.paused or any(self._counts(key)[:4]):
            return
        at = max(self.now, group.parked_until)
        if limit.rate and group.starts:
            at = max(at, group.starts[-1] + limit.rate.per_ms)
        if limit.bucket:
            assert group.level is not None
            missing = limit.bucket.capacity * limit.bucket.per_ms - group.level
            at = max(at, self.now - (-missing // limit.bucket.refill))
        if at <= self.now:
            del self.groups[key]
        else:
            group.over = at

    def _look_again(self) -> None:
        due = [
            (group.look, key.encode(), key)
            for key, group in self.groups.items()
            if 0 < group.look <= self.now
        ]
        for _, _, key in sorted(due):
            self._touch(key)
        if due:
            self._settle_groups()

    def _sweep_groups(self) -> None:
        self._look_again()
        over = [
            (group.over, key.encode(), key)
            for key, group in self.groups.items()
            if 0 < group.over <= self.now
        ]
        for _, _, key in sorted(over):
            self._touch(key)
        self._settle_groups()

    # The queue's own limits

    def _allowance(self, asked: int) -> tuple[int, int | None]:
        queue, limit = self._group(""), self._limit_of("")
        if queue.parked_until > self.now:
            return 0, queue.parked_until - self.now
        if limit.concurrency:
            active = sum(record.state is S.ACTIVE for record in self.records.values())
            asked = min(asked, limit.concurrency - active)
            if asked <= 0:
                return 0, None
        if limit.rate:
            asked = min(asked, limit.rate.count - len(queue.starts))
            if asked <= 0:
                return 0, queue.starts[0] + limit.rate.per_ms - self.now if queue.starts else None
        return asked, None

    def _forget_groups(self) -> None:
        """What obliterate leaves: what was paused stays paused, what was parked stays parked."""
        for key, group in list(self.groups.items()):
            is_parked = group.parked_until > self.now
            self.groups[key] = Group(paused=group.paused, parked_until=group.parked_until)
            if key and is_parked and not group.paused:
                self.groups[key].over = group.parked_until
            if key and not is_parked and not group.paused:
                del self.groups[key]


def _price(record: Record, bucket: Bucket) -> int:
    return min(record.cost, bucket.capacity) * bucket.per_ms
