"""The verbs on schedulers."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.core.job import NewJob
from penstock.storage.valkey.calls import Refused
from penstock.storage.valkey.codec import encode_jobs
from penstock.storage.valkey.running import Running, refusal
from penstock.storage.values import Fired, NewScheduler, Scheduler, SchedulerAnswer, Schedulers

__all__ = ["Scheduling"]

_ANSWERS: Final[Mapping[bytes, SchedulerAnswer]] = {b"c": "created", b"u": "updated", b"s": "unchanged"}
_HEAD: Final = struct.Struct(">HIHIHIHIHIHIBH")


class Scheduling(Running):
    """Each verb is one call of its function. A ``fire`` that is repeated finds that its slot has gone by."""

    async def put_scheduler(self, queue: str, scheduler: NewScheduler) -> SchedulerAnswer:
        """As ``Storage.put_scheduler``."""
        if queue not in self._registered:
            await self._register(queue)
        new = scheduler
        repeat_ms = -1 if new.repeat_ms is None else new.repeat_ms
        reply: bytes = await self._calls.call(
            queue, "put_scheduler", new.name, new.next_ms, int(new.keep_next), new.limit, new.end_ms, repeat_ms,
            new.spec,
        )  # fmt: skip
        return _ANSWERS[reply]

    async def schedulers(self, queue: str, names: Sequence[str] | None = None) -> Schedulers:
        """As ``Storage.schedulers``."""
        asked = () if names is None else ("1", *names)
        now_ms, rows = await self._calls.call(queue, "schedulers", *asked)
        found = (_decode(name.decode(), record) for name, record in zip(rows[::2], rows[1::2], strict=True))
        return Schedulers(int(now_ms), sorted(found, key=lambda one: one.name))

    async def pause_scheduler(self, queue: str, name: str) -> bool:
        """As ``Storage.pause_scheduler``."""
        return bool(await self._calls.call(queue, "pause_scheduler", name))

    async def resume_scheduler(self, queue: str, name: str, *, next_ms: int | None = None) -> bool:
        """As ``Storage.resume_scheduler``."""
        given = "" if next_ms is None else next_ms
        return bool(await self._calls.call(queue, "resume_scheduler", name, given))

    async def move_slot(self, queue: str, name: str, *, slot_ms: int, next_ms: int) -> bool:
        """As ``Storage.move_slot``."""
        return bool(await self._calls.call(queue, "move_slot", name, slot_ms, next_ms))

    async def remove_scheduler(self, queue: str, name: str) -> bool:
        """As ``Storage.remove_scheduler``."""
        return bool(await self._calls.call(queue, "remove_scheduler", name))

    async def fire(self, queue: str, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        """As ``Storage.fire``."""
        await self._meet(queue)
        try:
            reply: list[Any] = await self._calls.call(
                queue, "fire", name, slot_ms, next_ms, *encode_jobs([job])
            )
        except Refused as error:
            raise refusal(queue, error) from None
        if len(reply) > 2:
            self._courier.send_soon(queue)
        return Fired(True, self._answers(queue, [job], reply)[0]) if reply else Fired(False)


def _decode(name: str, record: bytes) -> Scheduler:
    """A record of lua/schedulers.lua."""
    *pairs, paused, length = _HEAD.unpack_from(record)
    numbers = [high << 32 | low for high, low in zip(pairs[::2], pairs[1::2], strict=True)]
    next_ms, awaits, fired, limit, end_ms, repeat = numbers
    spec_at = _HEAD.size + length
    return Scheduler(
        name=name,
        spec=record[spec_at:],
        next_ms=next_ms,
        paused=paused == 1,
        fired=fired,
        limit=limit,
        end_ms=end_ms,
        repeat_ms=repeat - 1 if repeat else None,
        last_id=record[_HEAD.size : spec_at].decode(),
        awaiting=awaits > 0,
    )
