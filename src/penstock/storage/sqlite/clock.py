"""Queue time: how a queue's ``now`` follows the clocks of the machine. docs/verbs.md has the rules under *Time*."""

from __future__ import annotations

import hashlib
import os
import time
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from penstock.storage import bounds


class Reading(msgspec.Struct, frozen=True, gc=False):
    """The wall clock, the time since the machine started, and a number that identifies that start (0: unknown)."""

    wall_ms: int
    boot_ms: int
    boot: int


def wall_ms() -> int:
    """Return the wall clock."""
    return time.time_ns() // 1_000_000


if hasattr(time, "CLOCK_BOOTTIME"):

    def _boot_ms() -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

else:  # pragma: no cover

    def _boot_ms() -> int:
        return 0


@cache
def _boot() -> int:
    """Return a number for this boot of the machine as seen by this process: a container may have its own boot
    clock."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
        space = os.readlink("/proc/self/ns/time") if os.path.exists("/proc/self/ns/time") else ""
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256(f"{started} {space}".encode()).digest()[:6])


def read_clocks() -> Reading:
    """Read the clocks of this machine. Tests replace it."""
    return Reading(wall_ms(), _boot_ms(), _boot())


class Marks(msgspec.Struct, array_like=True, frozen=True):
    """The history of a queue's clock. All zero for most queues.

    ``gap_from``, ``gap_to``: the queue time before and after the last gap; equal once a sweep has renewed the
    leases. ``lag_ms``, ``edge``, ``doubt_until``: see ``Moment.lag``. ``recheck_until``: until then slots are
    computed again. ``follow``: jobs that are due at this wall time or later have yet to follow a correction (0:
    none).
    """

    gap_from: int = 0
    gap_to: int = 0
    lag_ms: int = 0
    edge: int = 0
    doubt_until: int = 0
    recheck_until: int = 0
    follow: int = 0


_NOTHING: Final = Marks()
_pack: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Marks).decode


def _unpack(packed: str) -> Marks:
    """Return the marks; none if they are damaged, so that the clock counts as regular."""
    try:
        return _decode(packed) if packed else _NOTHING
    except (ValueError, TypeError):
        return _NOTHING


def can_read_marks(packed: str) -> bool:
    """Return whether the history of a clock can be read."""
    return not packed or _unpack(packed) is not _NOTHING


class Moment(msgspec.Struct, frozen=True, gc=False):
    """A queue's now, the clock readings behind it (the wall clock with its shift), and the history of its clock."""

    now_ms: int
    wall_ms: int
    boot_ms: int
    boot: int
    packed_marks: str

    @property
    def marks(self) -> Marks:
        return _unpack(self.packed_marks)

    def when(self, instant_ms: int) -> int:
        """Return the queue time at which the wall clock will show ``instant_ms``. Until then, the two approach each
        other."""
        ahead = self.now_ms - self.wall_ms
        if abs(ahead) < bounds.CLOCK_APART_MS:
            return instant_ms
        left_ms = instant_ms - self.wall_ms
        if left_ms <= 0:
            return min(instant_ms, self.now_ms)
        shrunk = left_ms // bounds.CLOCK_SLOWLY
        return instant_ms + (max(ahead - shrunk, 0) if ahead > 0 else min(ahead + shrunk, 0))

    def renewed(self) -> Moment:
        """Return the moment after a sweep has renewed the leases."""
        marks = self.marks
        packed = _packed(msgspec.structs.replace(marks, gap_from=marks.gap_to))
        return msgspec.structs.replace(self, packed_marks=packed)

    def followed(self, next_at: int) -> Moment:
        """Return the moment after jobs that are due before ``next_at`` (0: all) have followed the clock."""
        packed = _packed(msgspec.structs.replace(self.marks, follow=next_at))
        return msgspec.structs.replace(self, packed_marks=packed)

    @property
    def lag(self) -> tuple[int, int]:
        """Return by how much deletion lags behind now, and the queue time after the jump that caused it.

        A long jump that is not proven, or has proved wrong, delays the deletions that were due in between.
        """
        marks = self.marks
        return (marks.lag_ms, marks.edge) if self.now_ms < marks.doubt_until else (0, 0)

    def is_over(self, kept_until_ms: int) -> bool:
        """Return whether a finished record has expired and waits only for the next sweep. 0: it is open."""
        return 0 < kept_until_ms <= self.now_ms and self.is_past(kept_until_ms)

    def is_past(self, at_ms: int) -> bool:
        """Return whether data to be kept until ``at_ms`` may be deleted."""
        if at_ms > self.now_ms or not self.packed_marks:
            return at_ms <= self.now_ms
        lag_ms, edge = self.lag
        return not lag_ms or at_ms <= self.now_ms - lag_ms or at_ms >= edge


def moment_after(
    last_ms: int, seen: Reading, packed_marks: str, *, shift_ms: int, reading: Reading
) -> Moment:
    """Return the moment of ``reading`` for a queue whose last now was ``last_ms``, at the reading ``seen``.

    ``seen.wall_ms`` includes the shift of that time.
    """
    wall = reading.wall_ms + shift_ms
    if not last_ms:
        return Moment(wall, wall, reading.boot_ms, reading.boot, packed_marks)
    is_proven = seen.boot == reading.boot != 0 and reading.boot_ms >= seen.boot_ms
    since = seen.boot_ms if is_proven else seen.wall_ms
    elapsed = reading.boot_ms - since if is_proven else max(wall - since, 0)
    now = last_ms + elapsed
    ahead = now - wall
    most = (since + elapsed) // bounds.CLOCK_SLOWLY - since // bounds.CLOCK_SLOWLY
    if ahead > 0 and not is_proven and wall >= last_ms - bounds.CLOCK_NEAR_MS:
        now = max(wall, last_ms)  # The clock has caught up.
    else:
        now = wall + _converged(ahead, most)
    was_ahead = _converged(last_ms - seen.wall_ms, most)
    is_corrected = abs(now - wall - was_ahead) >= bounds.CLOCK_APART_MS
    set_back = seen.wall_ms - wall
    if elapsed >= bounds.CLOCK_GAP_MS or set_back >= bounds.CLOCK_SET_BACK_MS or is_corrected:
        marks = _unpack(packed_marks)
        if is_corrected:
            marks = msgspec.structs.replace(marks, follow=1)
        if set_back >= bounds.CLOCK_SET_BACK_MS:
            marks = _after_set_back(marks, set_back, last_ms)
        if elapsed >= bounds.CLOCK_GAP_MS:
            marks = _after_gap(marks, last_ms, now, is_proven=is_proven)
        packed_marks = _packed(marks)
    return Moment(now, wall, reading.boot_ms, reading.boot, packed_marks)


def _converged(ahead_ms: int, most_ms: int) -> int:
    return ahead_ms - max(-most_ms, min(most_ms, ahead_ms))


def _after_set_back(marks: Marks, by_ms: int, last_ms: int) -> Marks:
    """Conclude that a jump in doubt was wrong if the clock takes half of it back."""
    doubt_until = marks.doubt_until
    if marks.lag_ms and last_ms < marks.edge + bounds.CLOCK_DOUBT_MS and by_ms >= marks.lag_ms / 2:
        doubt_until = marks.edge + bounds.CLOCK_LAG_KEPT_MS
    return msgspec.structs.replace(
        marks, doubt_until=doubt_until, recheck_until=last_ms + bounds.CLOCK_RECHECK_MS
    )


def _after_gap(marks: Marks, from_ms: int, to_ms: int, *, is_proven: bool) -> Marks:
    """Record a gap, in which calls stopped or the clock jumped. Only the boot clock tells which."""
    if from_ms - marks.gap_to >= bounds.CLOCK_TERM_MS:
        marks = msgspec.structs.replace(marks, gap_from=from_ms, gap_to=to_ms)
    if to_ms - from_ms < bounds.CLOCK_DOUBT_MS or is_proven:
        return marks
    lag_ms = marks.lag_ms if to_ms < marks.doubt_until else 0
    doubt_until = max(marks.doubt_until, to_ms + bounds.CLOCK_DOUBT_MS)
    return msgspec.structs.replace(
        marks, lag_ms=lag_ms + to_ms - from_ms, edge=to_ms, doubt_until=doubt_until
    )


def _packed(marks: Marks) -> str:
    return "" if marks == _NOTHING else _pack(marks).decode()
