"""Verbs that operate on jobs and queues, set limits, and keep schedulers."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.job import NewJob
from penstock.core.lifecycle import (
    CancelAnswer,
    ChangeAnswer,
    HoldAnswer,
    ReleaseAnswer,
    SchedulerAnswer,
    SignalAnswer,
    State,
    UnchangedAnswer,
)
from penstock.core.limits import Bucket, GroupState, Limit, LimitsOfQueue, Rate
from penstock.core.staging import staged_at_ms
from penstock.errors import StorageDamaged
from penstock.storage.contract import VerbsOnIds
from penstock.storage.metrics import KeptBudget, flow_scope, read_usage
from penstock.storage.valkey.calls import Refused
from penstock.storage.valkey.commands import Arg
from penstock.storage.valkey.jobs import ANSWERS, encode_jobs, letters_of, parse_header, stored_options
from penstock.storage.valkey.worker_verbs import WorkerVerbs, refusal
from penstock.storage.values import (
    Budget,
    Bulk,
    Change,
    Checked,
    Fired,
    GroupPage,
    NewScheduler,
    QueueSettings,
    Scheduler,
    Schedulers,
    Unchanged,
    Usage,
    jobs_active,
)

_SCHEDULER: Final = struct.Struct(">HIHIHIHIHIHIBH")

_encode_json = msgspec.json.Encoder().encode
_decode_settings = msgspec.json.Decoder(QueueSettings).decode
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack_limit: Final = msgspec.msgpack.Decoder(tuple[int, int, int, int, int, int]).decode


class OperatorVerbs(WorkerVerbs, VerbsOnIds):
    """The part of the engine that operates on jobs and queues. Bulk verbs call once per step."""

    async def cancel(self, queue: str, ids: Sequence[str], *, rerun_only: bool = False) -> list[CancelAnswer]:
        return await self._each(queue, "cancel_rerun" if rerun_only else "cancel", ids, ANSWERS["cancel"])

    async def remove_unchanged(
        self, queue: str, jobs: Sequence[Unchanged], *, consumer: str = ""
    ) -> list[UnchangedAnswer]:
        args = (consumer, *(part for job in jobs for part in job))
        letters = await self._calls.call(queue, "remove_unchanged", *args)
        return self._decoded_letters(queue, letters, ANSWERS["remove_unchanged"])

    async def unstage(
        self, queue: str, write_id: str, *, discard: bool = False, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        args = (write_id, staged_at_ms(write_id), int(discard))
        return await self._step(queue, "unstage", cursor, limit, *args)

    async def signal(self, queue: str, id: str, name: str, data: bytes) -> SignalAnswer:
        """Send a signal once: the server recognises a repeated call."""
        letter: bytes = await self._calls.call_once(queue, "signal", (id, name, data))
        answer: SignalAnswer = ANSWERS["signal"][letter.decode()]
        return answer

    async def hold(self, queue: str, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
        letters = await self._calls.call(queue, "hold", consumer, ttl_ms, *ids)
        return self._decoded_letters(queue, letters, ANSWERS["hold"])

    async def release(self, queue: str, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
        letters = await self._calls.call(queue, "release", consumer, *ids)
        return self._decoded_letters(queue, letters, ANSWERS["release"])

    async def on_ids(self, queue: str, verb: str, ids: Sequence[str], answers: Any) -> list[Any]:
        return await self._each(queue, verb, ids, letters_of(answers))

    async def _each(self, queue: str, verb: str, ids: Sequence[Arg], answers: Mapping[str, Any]) -> list[Any]:
        return self._decoded_letters(queue, await self._calls.call(queue, verb, *ids, ids=ids), answers)

    def _decoded_letters(self, queue: str, letters: Any, answers: Mapping[str, Any]) -> list[Any]:
        if isinstance(letters, list):  # the outbox has messages
            [letters] = letters
            self._outbox.send_soon(queue)
        return [answers[letter] for letter in letters.decode()]

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
        args: list[Arg] = [id, letters, change.payload or b"", change.priority or 0, change.delay_ms or 0]
        header = reference = new_header = b""
        while True:
            reply: bytes = await self._calls.call(queue, "change", *args, header, reference, new_header)
            if not reply.startswith(b"h"):
                answer: ChangeAnswer = ANSWERS["change"][reply.decode()]
                return answer
            header = reply[1:]
            options = msgspec.structs.replace(parse_header(header), **new_ttls)
            stored = stored_options(options)
            reference, new_header = stored.reference or stored.header, stored.header

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
        """Run one step. A cursor is the bound (seq, now), the index, and the place in it (score, member in hex)."""
        seq, now, part, score, member = (cursor or "::::").split(":")
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
        """Obliterate; if damaged data prevents it, put that aside and try again."""
        try:
            try:
                reply = await self._calls.call_as_it_is(queue, "obliterate", int(force))
            except StorageDamaged:
                await self.check(queue, repair=True)
                reply = await self._calls.call_as_it_is(queue, "obliterate", int(force))
        except Refused as error:
            raise jobs_active(queue, active=int(error.text)) from None
        if isinstance(reply, list):
            [reply] = reply
            self._outbox.send_soon(queue)
        removed: int = reply
        return removed

    async def configure(self, queue: str, settings: QueueSettings) -> None:
        await self._calls.call(queue, "configure", _encode_json(settings))

    async def settings(self, queue: str) -> QueueSettings:
        key = self._calls.keys.part(queue, "meta")
        stored = await self._calls.plain(key, "HGET", key, "settings")
        return _decode_settings(stored) if stored else QueueSettings()

    async def usage(self, queue: str) -> list[Usage]:
        texts = [text.decode() for text in await self._calls.call(queue, "usage")]
        return read_usage(zip(texts[::3], texts[1::3], map(int, texts[2::3]), strict=True))

    async def reset_usage(self, queue: str) -> None:
        await self._calls.call(queue, "reset_usage")

    async def set_budget(self, queue: str, budget: Budget) -> None:
        args = (flow_scope(budget.flow), budget.name, budget.micros, budget.per_ms)
        await self._calls.call(queue, "set_budget", *args)

    async def remove_budget(self, queue: str, name: str, *, flow: str = "") -> bool:
        return bool(await self._calls.call(queue, "remove_budget", flow_scope(flow), name))

    async def budgets(self, queue: str) -> list[Budget]:
        now_ms, *rest = await self._calls.call(queue, "budgets")
        rows = (rest[at : at + 7] for at in range(0, len(rest), 7))
        return [KeptBudget(row[0].decode(), row[1].decode(), *row[2:]).shown(now_ms) for row in rows]

    async def check(self, queue: str, *, repair: bool = False) -> Checked:
        return await self._calls.repair.check(queue, repair=repair)

    # Limits

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
        groups = [_decode_group(*rows[at : at + 8]) for at in range(0, len(rows), 8)]
        return GroupPage(groups, groups[-1].key if more else "")

    # Schedulers. A repeated ``fire`` finds that its slot has passed.

    async def put_scheduler(self, queue: str, scheduler: NewScheduler) -> SchedulerAnswer:
        await self._register(queue)
        new = scheduler
        repeat_ms = -1 if new.repeat_ms is None else new.repeat_ms
        args = (new.name, new.next_ms, int(new.keep_next), new.limit, new.end_ms, repeat_ms, new.spec)
        reply: bytes = await self._calls.call(queue, "put_scheduler", *args)
        answer: SchedulerAnswer = ANSWERS["put_scheduler"][reply.decode()]
        return answer

    async def schedulers(self, queue: str, names: Sequence[str] | None = None) -> Schedulers:
        only = () if names is None else ("1", *names)
        now_ms, rows = await self._calls.call(queue, "schedulers", *only)
        records = sorted(zip(rows[::2], rows[1::2], strict=True))
        return Schedulers(int(now_ms), [_decode_scheduler(name.decode(), record) for name, record in records])

    async def pause_scheduler(self, queue: str, name: str) -> bool:
        return bool(await self._calls.call(queue, "pause_scheduler", name))

    async def resume_scheduler(self, queue: str, name: str, *, next_ms: int | None = None) -> bool:
        new_ms = "" if next_ms is None else next_ms
        return bool(await self._calls.call(queue, "resume_scheduler", name, new_ms))

    async def move_slot(self, queue: str, name: str, *, slot_ms: int, next_ms: int) -> bool:
        return bool(await self._calls.call(queue, "move_slot", name, slot_ms, next_ms))

    async def remove_scheduler(self, queue: str, name: str) -> bool:
        return bool(await self._calls.call(queue, "remove_scheduler", name))

    async def fire(self, queue: str, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        await self._check_rights(queue)
        try:
            reply: list[Any] = await self._calls.call(
                queue, "fire", name, slot_ms, next_ms, *encode_jobs([job])
            )
        except Refused as error:
            raise refusal(queue, error) from None
        if len(reply) > 2:
            self._outbox.send_soon(queue)
        return Fired(True, self._answers(queue, [job], reply)[0]) if reply else Fired(False)


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
    concurrency, count, per_ms, capacity, refill, bucket_per_ms = _unpack_limit(packed)
    return Limit(
        concurrency or None,
        Rate(count, per_ms) if count else None,
        Bucket(capacity, refill, bucket_per_ms) if capacity else None,
    )


def _decode_scheduler(name: str, record: bytes) -> Scheduler:
    """Return a scheduler from its record (lua/schedulers.lua)."""
    *pairs, paused, length = _SCHEDULER.unpack_from(record)
    numbers = [high << 32 | low for high, low in zip(pairs[::2], pairs[1::2], strict=True)]
    next_ms, awaits, fired, limit, end_ms, repeat = numbers
    spec_at = _SCHEDULER.size + length
    last_id, spec = record[_SCHEDULER.size : spec_at].decode(), record[spec_at:]
    repeat_ms = repeat - 1 if repeat else None
    return Scheduler(name, spec, next_ms, paused == 1, fired, limit, end_ms, repeat_ms, last_id, awaits > 0)
