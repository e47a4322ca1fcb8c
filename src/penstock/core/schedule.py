"""Schedules: cron expressions, intervals, and delays after completion. Pure: the caller supplies the time.

A slot is a time in epoch milliseconds. ``cronsim`` reads cron expressions. This module decides what happens when
the clocks change, for five and six fields alike, as Debian's cron does:

- An expression with a fixed second, minute and hour follows local time. A skipped time comes right after the clock
  has jumped; a repeated time counts once. So it runs once on every day.
- An expression with ``*`` in any of the three follows elapsed time: no slot in the skipped hour, twice as many in the
  repeated hour.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final, Literal, TypedDict
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError

from penstock.core.job import NewJob
from penstock.core.text import shown
from penstock.core.units import Duration
from penstock.errors import InvalidOption

Missed = Literal["skip", "catch_up"]

_MINUTE: Final = timedelta(minutes=1)
_NICKNAMES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
"""The nicknames that crontab accepts instead of five fields."""


class Cron(msgspec.Struct, frozen=True, tag="cron"):
    """A cron expression of five fields, or six with the seconds first; ``tz`` is an IANA name."""

    expression: str
    tz: str = "UTC"

    @classmethod
    def of(cls, expression: str, tz: str = "UTC") -> Cron:
        """Return the validated schedule. Raise ``InvalidOption`` for an invalid expression or zone, or one that never
        occurs."""
        if not isinstance(expression, str):
            raise InvalidOption(f"cron must be a text such as '30 3 * * mon-fri', got {shown(expression)}.")
        if not isinstance(tz, str):
            raise InvalidOption(f"tz must be an IANA name such as 'Europe/Berlin', got {shown(tz)}.")
        fields = " ".join(expression.split())
        cron = cls(_NICKNAMES.get(fields.lower(), fields), str.__str__(tz))
        _zone(tz)
        try:
            CronSim(cron.expression, datetime(2024, 1, 1))
        except CronSimError as error:
            why = "there is no such name" if fields.startswith("@") else str(error).lower()
            raise InvalidOption(
                f"cron={shown(expression)} is not valid: {why}. Give minute, hour, day of the month, "
                "month and day of the week, such as '30 3 * * mon-fri', six fields with the second first, or "
                f"one of {', '.join(_NICKNAMES)}."
            ) from None
        if cron.next_after(0) is None:
            raise InvalidOption(
                f"cron={shown(expression)} never occurs: no date matches it. Check the day and the month."
            )
        return cron

    def next_after(self, after_ms: int) -> int | None:
        """Return the first slot after ``after_ms`` within 50 years."""
        zone = _zone(self.tz)
        start = datetime.fromtimestamp(after_ms // 1000, zone)
        times = CronSim(self.expression, start.replace(tzinfo=None) if self._follows_local_time() else start)
        for time in times:
            slot_ms = _instant_ms(time, zone)
            # A slot can be earlier if the clock was set back, or if two times fell into the skipped hour.
            if slot_ms > after_ms:
                return slot_ms
        return None

    def _follows_local_time(self) -> bool:
        *_, second, minute, hour = ("0", *self.expression.split()[:-3])
        return not any(field.startswith("*") for field in (second, minute, hour))


class Every(msgspec.Struct, frozen=True, tag="every"):
    """Every ``every_ms``, counted from ``anchor_ms``: 0 is the epoch, so ``1h`` is on the hour (UTC)."""

    every_ms: int
    anchor_ms: int = 0

    def next_after(self, after_ms: int) -> int | None:
        """Return the first slot after ``after_ms``. No slot is before the anchor."""
        if after_ms < self.anchor_ms:
            return self.anchor_ms
        slots = (after_ms - self.anchor_ms) // self.every_ms + 1
        return self.anchor_ms + slots * self.every_ms


class AfterCompletion(msgspec.Struct, frozen=True, tag="after"):
    """``delay_ms`` after the previous job has ended, whatever its outcome. The store counts the delay."""

    delay_ms: int


Timing = Cron | Every | AfterCompletion


class Schedule(msgspec.Struct, frozen=True):
    """The slots of ``timing`` from ``start_ms`` to ``end_ms``, inclusive, at most ``limit`` of them (0: unbounded).

    ``missed`` decides about slots that passed while no worker ran.
    """

    timing: Timing
    start_ms: int = 0
    end_ms: int = 0
    limit: int = 0
    missed: Missed = "skip"

    @property
    def repeat_ms(self) -> int | None:
        """Return the delay of ``AfterCompletion``; ``None`` for other timings."""
        return self.timing.delay_ms if isinstance(self.timing, AfterCompletion) else None

    def first(self, now_ms: int) -> int | None:
        """Return the first slot of a new scheduler. It is never in the past."""
        if isinstance(self.timing, AfterCompletion):
            return self._bounded(max(now_ms, self.start_ms))
        return self.next_after(now_ms)

    def next_after(self, after_ms: int) -> int | None:
        """Return the first slot after ``after_ms``; ``None`` if there is none, or if the end of a job determines
        it."""
        if isinstance(self.timing, AfterCompletion):
            return None
        return self._bounded(self.timing.next_after(max(after_ms, self.start_ms - 1)))

    def newest_due(self, slot_ms: int, now_ms: int) -> int:
        """Return the last slot up to now. ``slot_ms`` is one of them. Uses bisection, because there may be many."""
        low, high = slot_ms, now_ms  # A slot, and a time after which no slot is due.
        while (following := self.next_after(low)) is not None and following <= now_ms:
            low = following
            middle = low + (high - low) // 2
            slot = self.next_after(middle)
            if slot is not None and slot <= now_ms:
                low = slot
            else:
                high = middle
        return low

    def _bounded(self, slot_ms: int | None) -> int | None:
        return None if slot_ms is None or (self.end_ms and slot_ms > self.end_ms) else slot_ms


class When(TypedDict, total=False):
    """The times of a scheduler's jobs. Give exactly one of ``cron``, ``every`` and ``after_completion``.

    - ``cron``: an expression of five fields, or six with seconds first, or a word such as ``@daily``, in the time zone
      ``tz`` (default: UTC).
    - ``every``: an interval from ``start``, or from the epoch: ``"1h"`` is on the hour, UTC.
    - ``after_completion``: a delay after the previous job finishes in any state. The first job is enqueued immediately.
    - ``start``, ``end``: the first and the last time, with a zone. ``limit``: the maximum number of slots.
    - ``missed``: if no worker ran, ``"skip"`` fires only the newest missed slot, ``"catch_up"`` all, in order.
    """

    cron: str
    tz: str
    every: Duration
    after_completion: Duration
    start: datetime | None
    end: datetime | None
    limit: int | None
    missed: Missed


class ScheduleSpec(msgspec.Struct, frozen=True):
    """A scheduler's spec as the store keeps it, unread: the schedule, and the job of each slot without an id."""

    schedule: Schedule
    job: NewJob


pack_spec: Final = msgspec.msgpack.Encoder().encode
unpack_spec: Final = msgspec.msgpack.Decoder(ScheduleSpec).decode


@lru_cache(256)
def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        raise InvalidOption(
            f"tz={shown(name)} is not a known time zone. Give an IANA name such as 'Europe/Berlin'; if it is one, this "
            "machine has no time zone data: install tzdata."
        ) from None


def _instant_ms(time: datetime, zone: tzinfo) -> int:
    """Return the epoch milliseconds of ``time``. A naive time is local: see the module."""
    if time.tzinfo is None:
        local = time.replace(tzinfo=zone)
        while _is_skipped(local):
            time = time.replace(second=0) + _MINUTE
            local = time.replace(tzinfo=zone)
        time = local
    return round(time.timestamp() * 1000)


def _is_skipped(local: datetime) -> bool:
    return local.astimezone(UTC).astimezone(local.tzinfo).replace(fold=local.fold) != local
