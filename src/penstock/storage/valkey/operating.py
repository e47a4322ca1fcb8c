"""Verbs that operate on jobs and queues, and set limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.job import staged_at_ms
from penstock.core.lifecycle import State
from penstock.core.limits import Bucket, GroupState, Limit, LimitsOfQueue, Rate
from penstock.errors import StorageDamaged
from penstock.storage.contract import jobs_active
from penstock.storage.metrics import KeptBudget, flow_scope, read_usage
from penstock.storage.valkey.calls import Calls, Refused
from penstock.storage.valkey.jobs import parse_header, stored_options
from penstock.storage.valkey.outbox import OutboxSender
from penstock.storage.valkey.replies import Arg
from penstock.storage.values import (
    Budget,
    Bulk,
    CancelAnswer,
    Change,
    ChangeAnswer,
    Checked,
    GroupPage,
    HoldAnswer,
    PromoteAnswer,
    QueueSettings,
    ReleaseAnswer,
    RemoveAnswer,
    RetryAnswer,
    SignalAnswer,
    Unchanged,
    UnchangedAnswer,
    Usage,
)

_CANCELLED: Final[Mapping[int, CancelAnswer]] = {
    ord("x"): "cancelled",
    ord("r"): "requested",
    ord("c"): "completed",
    ord("f"): "failed",
    ord("a"): "already_cancelled",
    ord("-"): "not_found",
    ord("d"): "rerun_cancelled",
    ord("n"): "no_rerun",
}
_RETRIED: Final[Mapping[int, RetryAnswer]] = {
    ord("r"): "retried",
    ord("n"): "not_failed",
    ord("-"): "not_found",
}
_PROMOTED: Final[Mapping[int, PromoteAnswer]] = {
    ord("p"): "promoted",
    ord("n"): "not_scheduled",
    ord("-"): "not_found",
}
_REMOVED: Final[Mapping[int, RemoveAnswer]] = {ord("r"): "removed", ord("a"): "active", ord("-"): "not_found"}
_REMOVED_UNCHANGED: Final[Mapping[int, UnchangedAnswer]] = {
    ord("r"): "removed",
    ord("c"): "changed",
    ord("h"): "held",
    ord("-"): "not_found",
}
_SIGNALLED: Final[Mapping[bytes, SignalAnswer]] = {
    b"r": "resumed",
    b"k": "kept",
    b"f": "full",
    b"e": "ended",
    b"-": "not_found",
}
_HELD: Final[Mapping[int, HoldAnswer]] = {ord("h"): "held", ord("-"): "not_found"}
_RELEASED: Final[Mapping[int, ReleaseAnswer]] = {
    ord("r"): "released",
    ord("n"): "not_held",
    ord("-"): "not_found",
}
_CHANGED: Final[Mapping[bytes, ChangeAnswer]] = {b"c": "changed", b"w": "wrong_state", b"-": "not_found"}
_CHECKED: Final = (
    "jobs", "state", "waiting", "scheduled", "blocked", "active", "completed", "failed", "cancelled",
    "expiring", "instants", "results", "failures", "progress", "rerun", "waiters", "annex", "dedup",
    "dedup_times", "schedulers", "slots", "suspended", "received", "held_completed", "held_failed",
    "held_cancelled", "groups", "parents", "linked",
)  # fmt: skip
_FIRST_STEP: Final = ("", "", "", "", "")

_encode_json = msgspec.json.Encoder().encode
_decode_settings = msgspec.json.Decoder(QueueSettings).decode
_A = TypeVar("_A")


class Operating:
    """The part of the engine that operates on jobs and queues. Bulk verbs and ``check`` call once per step."""

    _calls: Calls
    _outbox: OutboxSender

    async def cancel(self, queue: str, ids: Sequence[str], *, rerun_only: bool = False) -> list[CancelAnswer]:
        return await self._each(queue, "cancel_rerun" if rerun_only else "cancel", ids, _CANCELLED)

    async def retry(self, queue: str, ids: Sequence[str]) -> list[RetryAnswer]:
        return await self._each(queue, "retry", ids, _RETRIED)

    async def promote(self, queue: str, ids: Sequence[str]) -> list[PromoteAnswer]:
        return await self._each(queue, "promote", ids, _PROMOTED)

    async def remove(self, queue: str, ids: Sequence[str]) -> list[RemoveAnswer]:
        return await self._each(queue, "remove", ids, _REMOVED)

    async def remove_unchanged(
        self, queue: str, jobs: Sequence[Unchanged], *, consumer: str = ""
    ) -> list[UnchangedAnswer]:
        args = (consumer, *(part for job in jobs for part in job))
        return await self._each(queue, "remove_unchanged", args, _REMOVED_UNCHANGED)

    async def unstage(
        self, queue: str, write_id: str, *, keep: bool, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        args = (write_id, staged_at_ms(write_id), int(keep))
        return await self._step(queue, "unstage", cursor, limit, *args)

    async def signal(self, queue: str, id: str, name: str, data: bytes) -> SignalAnswer:
        """Send a signal once: the server recognises a repeated call."""
        letter: bytes = await self._calls.call_once(queue, "signal", (id, name, data))
        return _SIGNALLED[letter]

    async def hold(self, queue: str, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
        return [_HELD[letter] for letter in await self._calls.call(queue, "hold", consumer, ttl_ms, *ids)]

    async def release(self, queue: str, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
        return [_RELEASED[letter] for letter in await self._calls.call(queue, "release", consumer, *ids)]

    async def _parts(self, queue: str, names: str, prefix: str) -> list[str]:
        """Return the names of indexes that exist once per name in a hash."""
        key = self._calls.keys.part(queue, names)
        return [f"{prefix}{name.decode()}" for name in await self._calls.plain(key, "HKEYS", key)]

    async def _each(self, queue: str, verb: str, args: Sequence[Arg], answers: Mapping[int, _A]) -> list[_A]:
        letters = await self._calls.call(
            queue, verb, *args, ids=args if answers is not _REMOVED_UNCHANGED else ()
        )
        if isinstance(letters, list):  # the outbox has messages
            [letters] = letters
            self._outbox.send_soon(queue)
        return [answers[letter] for letter in letters]

    async def dedup_of(self, queue: str, key: str) -> str | None:
        id: bytes = await self._calls.call(queue, "dedup_of", key)
        return id.decode() or None

    async def clear_dedup(self, queue: str, key: str) -> bool:
        return bool(await self._calls.call(queue, "clear_dedup", key))

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        """Change a job. A new ttl takes a second call, because options are encoded here."""
        new_ttls = {
            name: ms
            for name in ("result_ttl_ms", "failure_ttl_ms")
            if (ms := getattr(change, name)) is not None
        }
        parts = (change.payload, change.priority, change.delay_ms, new_ttls or None)
        letters = "".join(letter for letter, part in zip("pydr", parts, strict=True) if part is not None)
        header: bytes = b""
        new: tuple[bytes, bytes] = (b"", b"")
        while True:
            args: list[Arg] = [id, letters, change.payload or b"", change.priority or 0, change.delay_ms or 0]
            reply: bytes = await self._calls.call(queue, "change", *args, header, *new)
            if not reply.startswith(b"h"):
                return _CHANGED[reply]
            header = reply[1:]
            options = msgspec.structs.replace(parse_header(header), **new_ttls)
            stored = stored_options(options)
            new = (stored.reference or stored.header, stored.header)

    async def retry_all(self, queue: str, *, limit: int = 1000, cursor: str = "") -> Bulk:
        return await self._step(queue, "retry_all", cursor, limit)

    async def drain(
        self, queue: str, *, scheduled: bool = False, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._step(queue, "drain", cursor, limit, int(scheduled))

    async def clean(
        self, queue: str, state: State, *, older_than_ms: int = 0, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._step(queue, "clean", cursor or f"::{state.value}::", limit, older_than_ms)

    async def _step(self, queue: str, verb: str, cursor: str, limit: int, *args: Arg) -> Bulk:
        """Make one step. A cursor is the bound (seq, now), the index, and the place in it (score, member in hex)."""
        seq, now, part, score, member = cursor.split(":") if cursor else _FIRST_STEP
        place = (score, bytes.fromhex(member))
        reply = await self._calls.call(queue, verb, limit, seq, now, part, *place, *args)
        is_full, done, *rest, last = reply
        if is_full:
            self._outbox.send_soon(queue)
        texts = [text.decode() for text in rest]
        return Bulk(done, ":".join([*texts, last.hex()]) if texts[2] else "")

    async def pause(self, queue: str, *, group: str = "", duration_ms: int = 0) -> None:
        await self._calls.call(queue, "pause", group, duration_ms)

    async def resume(self, queue: str, *, group: str = "") -> None:
        await self._calls.call(queue, "resume", group)

    async def obliterate(self, queue: str, *, force: bool = False) -> int:
        try:
            reply: int | list[int] = await self._obliterate(queue, force=force)
        except Refused as error:
            raise jobs_active(queue, active=int(error.text)) from None
        if isinstance(reply, int):
            return reply
        self._outbox.send_soon(queue)
        return reply[0]

    async def _obliterate(self, queue: str, *, force: bool) -> Any:
        """Obliterate; if damaged data prevents it, put that aside and try again."""
        try:
            return await self._calls.call_as_it_is(queue, "obliterate", int(force))
        except StorageDamaged:
            await self.check(queue, repair=True)
            return await self._calls.call_as_it_is(queue, "obliterate", int(force))

    async def configure(self, queue: str, settings: QueueSettings) -> None:
        await self._calls.call(queue, "configure", _encode_json(settings))

    async def settings(self, queue: str) -> QueueSettings:
        key = self._calls.keys.part(queue, "meta")
        stored = await self._calls.plain(key, "HGET", key, "settings")
        return _decode_settings(stored) if stored else QueueSettings()

    async def usage(self, queue: str) -> list[Usage]:
        texts = [text.decode() for text in await self._calls.call(queue, "usage")]
        rows = zip(texts[::3], texts[1::3], map(int, texts[2::3]), strict=True)
        return read_usage(rows)

    async def reset_usage(self, queue: str) -> None:
        await self._calls.call(queue, "reset_usage")

    async def set_budget(self, queue: str, budget: Budget) -> None:
        args = (flow_scope(budget.flow), budget.name, budget.micros, budget.per_ms)
        await self._calls.call(queue, "set_budget", *args)

    async def remove_budget(self, queue: str, name: str, *, flow: str = "") -> bool:
        removed: int = await self._calls.call(queue, "remove_budget", flow_scope(flow), name)
        return removed == 1

    async def budgets(self, queue: str) -> list[Budget]:
        now_ms, *rest = await self._calls.call(queue, "budgets")
        rows = (rest[at : at + 7] for at in range(0, len(rest), 7))
        return [KeptBudget(row[0].decode(), row[1].decode(), *row[2:]).shown(now_ms) for row in rows]

    async def check(self, queue: str, *, repair: bool = False) -> Checked:
        """Check the queue in steps of some hundred entries. Each step is atomic; jobs may move in between."""
        calls, repairs = self._calls, self._calls.repair
        if await calls.call_as_it_is(queue, "restore_meta", int(repair)) and not repair:
            return Checked(0, {"damaged_counters": 1}, repair)
        problems = Counter(await repairs.mend_values(queue, repair=repair))
        if "wrong_type" in problems and not repair:
            return Checked(0, dict(problems), repair)
        damaged = await (repairs.mend_all(queue) if repair else repairs.count(queue))
        problems.update({"damaged_jobs": damaged} if damaged else {})
        if repair or not damaged:
            problems |= Counter(await repairs.mend_values(queue, repair=repair, counters=True))
        problems.update(await repairs.check_log(queue, repair=repair))
        named = (*await self._parts(queue, "holders", "held:"), *await self._parts(queue, "errors", "error:"))
        records = 0
        for part in (*_CHECKED, *named):
            try:
                records += await self._check_part(queue, part, problems, repair=repair)
            except StorageDamaged:
                if repair or not damaged:
                    raise
        return Checked(
            records or await calls.plain(key := calls.keys.part(queue, "jobs"), "HLEN", key),
            dict(problems),
            repair,
        )

    async def _check_part(self, queue: str, part: str, problems: Counter[str], *, repair: bool) -> int:
        """Check a part in steps. Return how many records it has, if it is the part with records."""
        records, cursor = 0, b""
        while cursor != b"0":
            reply = await self._calls.call_as_it_is(queue, "check", part, cursor or b"0", int(repair))
            cursor, count, *pairs = reply
            records += count if part == "jobs" else 0
            for kind, times in zip(pairs[::2], pairs[1::2], strict=True):
                problems[kind.decode()] += times
        return records


# Limits

_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(tuple[int, int, int, int, int, int]).decode
_COLUMNS: Final = 8


class Limiting:
    """The part of the engine that sets limits, and shows what they hold up."""

    _calls: Calls

    async def limit(
        self, queue: str, group: str, limit: Limit | None, *, expected: Limit | UnsetType | None = UNSET
    ) -> bool:
        as_json = msgspec.json.encode({"limit": limit})
        condition = () if expected is UNSET else (_encode_limit(expected),)
        return bool(await self._calls.call(queue, "limit", group, _encode_limit(limit), as_json, *condition))

    async def limits(self, queue: str) -> LimitsOfQueue:
        key = self._calls.keys.part(queue, "limits")
        rows = await self._calls.plain(key, "HGETALL", key)
        limits = {
            group.decode(): _decode_limit(packed) for group, packed in zip(rows[::2], rows[1::2], strict=True)
        }
        return dict(sorted(limits.items()))

    async def groups(
        self, queue: str, *, cursor: str = "", limit: int = 100, keys: Sequence[str] = ()
    ) -> GroupPage:
        """Return a page of groups. A cursor is the last key of the page before."""
        more, *rows = await self._calls.call(queue, "groups", limit, cursor, *keys)
        groups = [_decode_group(*rows[at : at + _COLUMNS]) for at in range(0, len(rows), _COLUMNS)]
        return GroupPage(groups, groups[-1].key if more else "")


def _decode_group(key: bytes, *rest: Any) -> GroupState:
    waiting, active, held, blocked, paused, why, wait_ms = rest
    reason = why.decode()
    return GroupState(
        key.decode(), waiting, active, held, blocked, paused == 1, reason, None if wait_ms < 0 else wait_ms
    )


def _encode_limit(limit: Limit | None) -> bytes:
    """Return a limit as lua/groups.lua reads it: six numbers, 0 for no bound; no bytes for ``None``."""
    if limit is None:
        return b""
    rate = limit.rate or Rate(0, 0)
    bucket = limit.bucket or Bucket(0, 0, 0)
    return _pack(
        (limit.concurrency or 0, rate.count, rate.per_ms, bucket.capacity, bucket.refill, bucket.per_ms)
    )


def _decode_limit(packed: bytes) -> Limit:
    concurrency, count, per_ms, capacity, refill, bucket_per_ms = _unpack(packed)
    return Limit(
        concurrency or None,
        Rate(count, per_ms) if count else None,
        Bucket(capacity, refill, bucket_per_ms) if capacity else None,
    )
