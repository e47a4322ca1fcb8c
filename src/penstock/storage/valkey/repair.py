"""The check of a queue, and recovery: the library puts damaged data aside, and the call that met it is repeated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from penstock.core.event import count_events
from penstock.core.outcome import damaged_failure
from penstock.core.text import get_logger
from penstock.errors import StorageDamaged, StorageRefused
from penstock.storage.valkey.commands import Arg
from penstock.storage.valkey.library import Keys
from penstock.storage.values import Checked

AT_MOST: Final = 10
"""The number of records of a queue that may be put aside automatically within a minute."""
_CHECKED: Final = (
    "jobs", "state", "waiting", "scheduled", "blocked", "active", "completed", "failed", "cancelled",
    "expiring", "instants", "results", "failures", "progress", "rerun", "waiters", "annex", "dedup",
    "dedup_times", "schedulers", "slots", "suspended", "received", "held_completed", "held_failed",
    "held_cancelled", "groups", "parents", "linked", "stepped",
)  # fmt: skip
"""The parts that the function ``check`` compares; those of consumers and error classes come on top."""
_ENTRIES: Final = 500
_GLOB: Final = re.compile(rb"[\\*?\[\]^]")
_NAMED: Final = {
    b"log": b"list", b"signals": b"list", b"dependents": b"list", b"starts": b"list", b"news": b"list",
    b"deps": b"hash", b"usage": b"hash", b"steps": b"hash", b"step_results": b"hash",
    b"group": b"zset", b"held": b"zset", b"error": b"zset",
}  # fmt: skip
"""The types of keys named after a job, a group, a consumer, an error class or a listener."""

logger = get_logger("penstock.storage")

Run = Callable[..., Awaitable[Any]]
"""Runs a function of the library on a queue, or a command of the server on a key."""

_lost: Final = msgspec.msgpack.Decoder(list[tuple[int, int]])


class Repair:
    """Finds damaged values of one namespace and puts them aside. ``run`` and ``plain`` must not call back here."""

    def __init__(self, keys: Keys, *, run: Run, plain: Run) -> None:
        self._keys = keys
        self._run = run
        self._plain = plain

    async def mend(self, queue: str, ids: Sequence[Arg] = ()) -> int | None:
        """Put a few damaged records aside, those of ``ids`` first. Return how many; ``None`` if nothing was wrong.

        Raises ``StorageDamaged`` if there are too many.
        """
        values = await self.mend_values(queue, repair=True)
        done = 0
        if ids:
            done, *_ = await self._step(queue, 0, "ids", ids=ids)
        left = 0
        for part in ("", "jobs", "state"):
            if not done and not left:
                done, left = await self._walk(queue, AT_MOST, part)
        if left and not done:
            raise _too_many(queue)
        wrong = await self._recount(queue)
        if not done:
            values |= await self.mend_values(queue, repair=True, counters=True)
        if not (done or values or wrong):
            with suppress(StorageRefused):  # The user may lack the right to SCAN.
                wrong = await self._drop_named_keys(queue)
        return done if done or values or wrong else None

    async def condemn(self, queue: str, ids: Sequence[str], why: str) -> None:
        """Put jobs aside that the client cannot read although the server can."""
        await self._step(queue, 0, "ids", why=why, ids=ids)
        await self._recount(queue)

    async def check(self, queue: str, *, repair: bool) -> Checked:
        """Check the queue in steps of some hundred entries. Each step is atomic; jobs may move in between."""
        if await self._run(queue, "restore_meta", int(repair)) and not repair:
            return Checked(0, {"damaged_counters": 1}, repair)
        problems = Counter(await self.mend_values(queue, repair=repair))
        if "wrong_type" in problems and not repair:
            return Checked(0, dict(problems), repair)
        if repair:
            damaged = sum([(await self._walk(queue, 0, part))[0] for part in ("jobs", "state")])
        else:
            damaged = await self._count(queue)
        if repair or not damaged:
            problems |= Counter(await self.mend_values(queue, repair=repair, counters=True))
        problems["damaged_jobs"] += damaged
        if repair or "damaged_log_start" not in problems:
            problems.update(await self._check_log(queue, repair=repair))
        key = self._keys.part(queue, "jobs")
        records: int = await self._plain(key, "HLEN", key)
        named = [*await self._names(queue, "holders", "held:"), *await self._names(queue, "errors", "error:")]
        for part in (*_CHECKED, *named):
            try:
                await self._check_part(queue, part, problems, repair=repair)
            except StorageDamaged:
                if repair or not damaged:
                    raise
        return Checked(records, dict(+problems), repair)

    async def _check_part(self, queue: str, part: str, problems: Counter[str], *, repair: bool) -> None:
        cursor = b""
        while cursor != b"0":
            cursor, _, *pairs = await self._run(queue, "check", part, cursor or b"0", int(repair))
            for kind, times in zip(pairs[::2], pairs[1::2], strict=True):
                problems[kind.decode()] += times

    async def _names(self, queue: str, names: str, prefix: str) -> list[str]:
        """Return the names of indexes that exist once per name in a hash."""
        key = self._keys.part(queue, names)
        return [f"{prefix}{name.decode()}" for name in await self._plain(key, "HKEYS", key)]

    async def _count(self, queue: str) -> int:
        """Return how many records are damaged."""
        total, cursor = 0, b""
        while cursor != b"0":
            cursor, count = await self._run(queue, "count_damaged", "jobs", cursor or b"0")
            total += count
        return total

    async def mend_values(self, queue: str, *, repair: bool, counters: bool = False) -> dict[str, int]:
        """Count values beside the records that cannot be read; with ``repair``, drop them. ``counters``: compare the
        counters with the records too, none of which may be damaged."""
        reply = await self._run(queue, "mend", int(repair), int(counters))
        counts = {kind.decode(): count for kind, count in zip(reply[::2], reply[1::2], strict=True)}
        for kind, count in counts.items() if repair else ():
            logger.warning("queue %s: repaired %s: %d", queue, kind, count)
        return counts

    async def _walk(self, queue: str, most: int, part: str) -> tuple[int, int]:
        """Walk a part until something was put aside; without a bound, to the end."""
        total, cursor = 0, b"0"
        while True:
            done, left, cursor = await self._step(queue, most, part, cursor)
            total += done
            if cursor == b"0" or (most and (done or left)):
                return total, left

    async def _step(
        self,
        queue: str,
        most: int,
        part: str,
        cursor: bytes = b"0",
        *,
        why: str = "",
        ids: Sequence[Arg] = (),
    ) -> tuple[int, int, bytes]:
        cursor, done, left, unnotified = await self._run(queue, "quarantine", most, part, cursor, why, *ids)
        if done:
            logger.warning(
                "queue %s: %d records cannot be read; their jobs were put aside as failed (Damaged)",
                queue,
                done,
            )
        for id in unnotified:
            await self._tell_other_queues(queue, id)
        return done, left, cursor

    async def _tell_other_queues(self, queue: str, id: bytes) -> None:
        """End the dependencies that jobs of other queues have on a job whose dependents are unknown."""
        failure = msgspec.msgpack.encode(damaged_failure("its dependents are not known"))
        registry = self._keys.registry
        for name in await self._plain(registry, "SMEMBERS", registry):
            if name.decode() != queue:
                await self._run(name.decode(), "end_dependency", queue, id, failure)

    async def _drop_named_keys(self, queue: str) -> int:
        """Delete keys named after jobs, groups and the like that have the wrong type. Return how many there were."""
        prefix = self._keys.of(queue)
        pattern, cursor, dropped = _GLOB.sub(rb"\\\g<0>", prefix) + b":*", b"0", 0
        while True:
            cursor, keys = await self._plain(prefix, "SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            for key in keys:
                kind = _NAMED.get(key[len(prefix) + 1 :].partition(b":")[0])
                if b":" not in key[len(prefix) + 1 :] or kind in (None, await self._plain(key, "TYPE", key)):
                    continue
                logger.warning("queue %s: deleted %r, which is not a %s", queue, key, kind.decode())
                dropped += await self._plain(key, "UNLINK", key)
            if cursor == b"0":
                return dropped

    async def _recount(self, queue: str) -> int:
        """Make the counts of groups agree with their members. Return how many did not."""
        try:
            _, _, *problems = await self._run(queue, "check", "groups", b"0", 1)
        except StorageDamaged:
            return 0  # A member is damaged too; its turn comes later.
        return problems[1] if problems else 0

    # The event log

    async def _check_log(self, queue: str, *, repair: bool) -> dict[str, int]:
        """Count damaged entries and missing events; with ``repair``, note both as lost."""
        key, meta = self._keys.part(queue, "events"), self._keys.part(queue, "meta")
        trimmed, packed = await self._plain(meta, "HMGET", meta, "trimmed", "lost")
        first = int(trimmed or 0)
        lost = [span for span in _read_lost(packed) if span[1] > first]
        counts: Counter[str] = Counter()
        reached, start, noted = first, "-", list(lost)
        while entries := await self._plain(key, "XRANGE", key, start, "+", "COUNT", _ENTRIES):
            for number, fields in entries:
                last = int(number.partition(b"-")[0])
                count = count_events(fields[1])
                if not count:
                    counts["damaged_events"] += 1
                    if repair:
                        await self._plain(key, "XDEL", key, number)
                    count = last - reached
                    noted.append((reached + 1, last))
                missing = _not_in((reached + 1, last - count), lost)
                counts["missing_events"] += missing
                if missing:
                    noted.append((reached + 1, last - count))
                reached = last
            start = f"({entries[-1][0].decode()}"
        reached, missing = await self._tail(queue, reached, lost, noted)
        counts["missing_events"] += missing
        if repair and noted != lost:
            await self._plain(meta, "HSET", meta, "lost", msgspec.msgpack.encode(noted))
        return dict(+counts)

    async def _tail(
        self, queue: str, reached: int, lost: list[tuple[int, int]], noted: list[tuple[int, int]]
    ) -> tuple[int, int]:
        """Note events that are missing at the end of the log. Return its last number, and how many are missing."""
        last, *_ = await self._run(queue, "read_events", reached, 1)
        missing = _not_in((reached + 1, last), lost)
        if missing:
            noted.append((reached + 1, last))
        return last, missing


def _read_lost(packed: bytes | None) -> list[tuple[int, int]]:
    try:
        return [] if packed is None else _lost.decode(packed)
    except msgspec.DecodeError:
        return []


def _not_in(span: tuple[int, int], lost: list[tuple[int, int]]) -> int:
    """Return how many numbers of a span are not already noted as lost."""
    first, last = span
    known = sum(max(0, min(last, b) - max(first, a) + 1) for a, b in lost)
    return max(0, last - first + 1 - known)


def _too_many(queue: str) -> StorageDamaged:
    return StorageDamaged(
        f"queue {queue!r}: {AT_MOST} records that cannot be read were put aside within a minute, and there are more. "
        "The rest stay in place, because damage to many records has a common cause. Find the cause, then run "
        "`penstock doctor --repair`, which puts all of them aside"
    )
