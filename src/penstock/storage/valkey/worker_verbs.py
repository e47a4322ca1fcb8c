"""Verbs for producers, workers and sweepers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, assert_never

import msgspec

from penstock.core.flow import UNKNOWN_DEPENDENCY
from penstock.core.job import Enqueued, Lease, NewJob, Options, unpack_extras
from penstock.core.lifecycle import State
from penstock.core.outcome import Await, Cancel, Complete, Fail, Limited, Outcome, Release, Snooze, Suspend
from penstock.errors import CostTooHigh, JobNotFound
from penstock.storage.valkey.calls import Calls, Refused
from penstock.storage.valkey.commands import Arg
from penstock.storage.valkey.jobs import (
    ANSWERS,
    ENQUEUED,
    STATE_OF,
    STATES,
    UNREADABLE,
    UnknownOptions,
    decode_options,
    encode_jobs,
    read_static,
    signed,
)
from penstock.storage.valkey.outbox import OutboxSender
from penstock.storage.valkey.steps import read_sent_steps
from penstock.storage.values import (
    Claimed,
    DueScheduler,
    Extended,
    Held,
    Report,
    Settled,
    SettledBatch,
    Settlement,
    Swept,
    Take,
    Ticket,
)

_SETTLED: Final = {
    **{ord(letter): Settled(True, state) for letter, state in STATES.items()},
    **{ord(letter.upper()): Settled(False, state) for letter, state in STATES.items()},
    ord("-"): Settled(False, None),
}

_HAS_SIGNAL: Final = 2
_HAS_STEPS: Final = 4
_DETAILS: Final = struct.Struct(">HIHIIIIHIHIB")
_EXTRAS_AT: Final = _DETAILS.size + 4
_unpack_static = struct.Struct(">HIHIB6s").unpack_from
_pack = msgspec.msgpack.Encoder().encode
_encode_json: Final = msgspec.json.Encoder().encode


class WorkerVerbs:
    """The part of the engine that runs jobs: enqueue, claim, settle, extend, sweep, report."""

    _calls: Calls
    _outbox: OutboxSender

    def __init__(self) -> None:
        self._allowed: set[str] = set()
        self._registered: set[str] = set()
        self._attended: set[str] = set()
        self._seen_seq: dict[str, int] = {}
        self._has_claimed = False

    async def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        if queue not in self._registered:
            await self._register(queue)
        seen = self._seen_seq.get(queue, 0)
        try:
            reply = await self._calls.call_once(queue, "enqueue", encode_jobs(jobs), ticket=ticket)
        except Refused as error:
            raise refusal(queue, error) from None
        if len(reply) > 2:
            self._outbox.send_soon(queue)
        if reply[0] <= seen and ticket is None:
            await self._went_back(queue, seen)
        return self._answers(queue, jobs, reply)

    async def _register(self, queue: str) -> None:
        """Add the queue to the registry before its first job, so that ``queues`` finds it."""
        if queue not in self._registered:
            await self._check_rights(queue)
            await self._calls.plain(self._calls.keys.registry, "SADD", self._calls.keys.registry, queue)
            self._registered.add(queue)

    async def _check_rights(self, queue: str) -> None:
        """Check the user's rights before the first write: a missing permission would leave a partial write."""
        if queue not in self._allowed:
            await self._calls.check_rights(queue)
            self._allowed.add(queue)

    def _answers(self, queue: str, jobs: Sequence[NewJob], reply: list[Any]) -> list[Enqueued]:
        incarnation, exceptions = reply[:2]
        answers: list[Enqueued] = []
        at = 0
        waiting = State.WAITING
        for place in range(0, len(exceptions), 4):
            number, letters, own_incarnation, result = exceptions[place : place + 4]
            for job in jobs[at : number - 1]:
                answers.append(Enqueued(job.id, "queued", waiting, incarnation))
                incarnation += 1
            status, state = ENQUEUED[letters[0]], STATE_OF.get(letters[1])
            id = jobs[number - 1].id
            if type(result) is list:
                id, result = result[0].decode(), result[1]
            cached = result if state is State.COMPLETED else None
            answers.append(Enqueued(id, status, state, own_incarnation, cached))
            incarnation = max(incarnation, own_incarnation + 1)
            at = number
        for job in jobs[at:] if at else jobs:
            answers.append(Enqueued(job.id, "queued", waiting, incarnation))
            incarnation += 1
        self._seen_seq[queue] = max(self._seen_seq.get(queue, 0), incarnation - 1)
        return answers

    async def claim(
        self, queue: str, take: Take, *, wait_ms: int = 0, ticket: Ticket | None = None
    ) -> Claimed:
        if queue not in self._allowed:
            await self._check_rights(queue)
        if not self._has_claimed:
            self._has_claimed = True
            self._calls.warn_of_servers()
        seen = self._seen_seq.get(queue, 0)
        args = (take.worker, take.count, take.lease_ms)
        if wait_ms > 0:
            wait = ("BLPOP", self._calls.keys.part(queue, "wake"), wait_ms / 1000)
            reply = await self._calls.call_behind(queue, wait, "claim", args, timeout_ms=wait_ms)
            # This client made other calls during the wait, so what it saw before proves nothing.
            seen = 0
        else:
            reply = await self._calls.call_once(queue, "claim", args, ticket=ticket)
        if len(reply) > 7:
            self._outbox.send_soon(queue)
        return await self._claimed(queue, reply, seen=0 if ticket else seen)

    async def settle(
        self,
        queue: str,
        settlements: Sequence[Settlement],
        *,
        take: Take | None = None,
        ticket: Ticket | None = None,
    ) -> SettledBatch:
        """Settle, then claim. With ``replicas``, the claim is a separate call, because it promises nothing: its leases
        must not get lost for lack of replicas."""
        if take is not None and self._calls.replicas:
            batch = await self.settle(queue, settlements, ticket=ticket)
            return SettledBatch(batch.answers, await self.claim(queue, take))
        seen = self._seen_seq.get(queue, 0)
        args: list[Arg] = [take.worker, take.count, take.lease_ms] if take else ["", 0, 0]
        for item in settlements:
            outcome = item.outcome
            args.append(item.id)
            if type(outcome) is Complete and outcome.ttl_ms is None:
                args.append(item.token.to_bytes(6, "big") + b"C" + outcome.result)
            else:
                args.append(item.token.to_bytes(6, "big") + _encode_outcome(outcome))
        letters, *rest = await self._calls.call_once(queue, "settle", args, ticket=ticket)
        answers = [_SETTLED[letter] for letter in letters]
        if len(rest) > 1:
            self._outbox.send_soon(queue)
        if take is None:
            return SettledBatch(answers)
        if not rest:
            return SettledBatch(answers, Claimed([], 0))
        return SettledBatch(answers, await self._claimed(queue, rest[0], seen=0 if ticket else seen))

    async def _claimed(self, queue: str, reply: list[Any], *, seen: int) -> Claimed:
        try:
            leases = _decode_leases(reply)
        except UNREADABLE as error:
            if isinstance(error, UnknownOptions):
                await self._calls.learn_options(queue)
            leases = await self._readable(queue, reply)
        if leases:
            if reply[3] <= seen:
                await self._went_back(queue, seen)
            self._seen_seq[queue] = max(self._seen_seq.get(queue, 0), leases[-1].token)
        why, wait_ms = reply[:2]
        return Claimed(leases, None if wait_ms < 0 else wait_ms, why == 1, why == 2, why == 3)

    async def _readable(self, queue: str, reply: list[Any]) -> list[Lease]:
        """Return the leases that can be decoded, and put the other jobs aside."""
        now_ms, token, ids, statics, details = reply[2:7]
        details_of = dict(zip(details[::2], details[1::2], strict=True))
        leases: list[Lease] = []
        damaged: list[str] = []
        why = ""
        for place, (id, static) in enumerate(zip(ids, statics, strict=True), 1):
            try:
                lease = _decode_lease(id.decode(), static, token=token + place - 1, now_ms=now_ms)
                leases.append(_with_details(lease, details_of[place]) if place in details_of else lease)
            except UNREADABLE as error:
                damaged.append(id)
                why = f"{type(error).__name__} {error}"
        if damaged:
            await self._calls.repair.condemn(queue, damaged, why)
        return leases

    async def _went_back(self, queue: str, seq: int) -> None:
        """Renew the epoch: a counter went back, so the store was restored, or failed over with a loss."""
        await self._calls.call(queue, "renew_epoch", seq, 0)
        # The registry may have lost the queue too.
        self._registered.discard(queue)
        self._attended.discard(queue)
        await self._register(queue)

    async def extend(
        self, queue: str, held: Sequence[Held], *, worker: str, lease_ms: int, info: bytes | None = None
    ) -> list[Extended]:
        if info is not None and queue not in self._attended:
            await self._calls.plain(self._calls.keys.attended, "SADD", self._calls.keys.attended, queue)
            self._attended.add(queue)
        args: list[Arg] = [worker, lease_ms, int(info is not None), info or b""]
        for id, token in held:
            args.append(id)
            args.append(token.to_bytes(6, "big"))
        letters: bytes = await self._calls.call(queue, "extend", *args)
        return [ANSWERS["extend"][letter] for letter in letters.decode()]

    async def sweep(self, queue: str, *, limit: int = 1000) -> Swept:
        reply, damaged = await self._calls.call_counted(queue, "sweep", limit)
        promoted, unblocked, rescued, expired, pruned, trimmed, more, *rest = reply
        wait_ms, slot_wait_ms, awaiting, now_ms, rows, is_full = rest
        due = tuple(
            DueScheduler(name.decode(), slot_ms, now_ms, spec)
            for name, slot_ms, spec in zip(rows[::3], rows[1::3], rows[2::3], strict=True)
        )
        return Swept(
            promoted=promoted, rescued=rescued, expired=expired, pruned=pruned, trimmed=trimmed,
            unblocked=unblocked, more=more == 1, wait_ms=None if wait_ms < 0 else wait_ms, due=due,
            slot_wait_ms=None if slot_wait_ms < 0 else slot_wait_ms, awaiting=awaiting == 1, damaged=damaged,
            delivered=await self._outbox.deliver(queue) if is_full else 0,
        )  # fmt: skip

    async def report(self, queue: str, reports: Sequence[Report]) -> list[bool]:
        args: list[Arg] = []
        for item in reports:
            has = {"p": item.progress is not None, "y": item.payload is not None, "u": bool(item.usage)}
            usage = _encode_json(dict(sorted(item.usage.items()))) if item.usage else b""
            args += (item.id, item.token.to_bytes(6, "big"), "".join(letter for letter in has if has[letter]))
            args += (item.progress or b"", item.payload or b"", usage)
            args += (item.log_skipped, len(item.log), *item.log)
        letters = await self._calls.call_once(queue, "report", args)
        return [letter == ord("y") for letter in letters]

    async def leases_of(self, queue: str, worker: str) -> list[Held]:
        rows = await self._calls.call(queue, "leases_of", worker)
        return [Held(id.decode(), token) for id, token in zip(rows[::2], rows[1::2], strict=True)]

    async def depart(self, queue: str, worker: str) -> None:
        for part in ("workers", "lives"):
            key = self._calls.keys.part(queue, part)
            await self._calls.plain(key, "HDEL", key, worker)


def refusal(queue: str, error: Refused) -> Exception:
    """Return the error to raise for a refused enqueue."""
    if error.code == "COST":
        return CostTooHigh(
            f"{error.text}. Nothing was enqueued. Lower the cost of the job, or enlarge the bucket of its group."
        )
    if error.code != "NOTFOUND":
        return error
    return JobNotFound.in_queue(queue, error.text, UNKNOWN_DEPENDENCY)


# Outcomes and leases


def _encode_outcome(outcome: Outcome) -> bytes:
    """Return an outcome as lua/settle.lua takes it after the token."""
    match outcome:
        case Complete(result, ttl_ms):
            return b"C" + result if ttl_ms is None else b"K" + ttl_ms.to_bytes(6, "big") + result
        case Fail(failure, retry_in_ms, final, ttl_ms):
            kind, ttl = (b"F", b"") if ttl_ms is None else (b"G", ttl_ms.to_bytes(6, "big"))
            return b"%b%c%b%b%b" % (kind, final, retry_in_ms.to_bytes(6, "big"), ttl, _pack(failure))
        case Snooze(delay_ms, stage, unknown):
            return b"S%b%b%b" % (delay_ms.to_bytes(6, "big"), b"?" * unknown, _stage(stage))
        case Suspend(signal, timeout_ms, stage):
            name = signal.encode()
            return b"P%b%c%b%b" % (timeout_ms.to_bytes(6, "big"), len(name), name, _stage(stage))
        case Release():
            return b"R"
        case Limited(delay_ms, scope):
            return b"L%b%b" % (delay_ms.to_bytes(6, "big"), b"q" if scope == "queue" else b"g")
        case Await():
            return b"W"
        case Cancel():
            return b"X"
        case _:
            assert_never(outcome)


def _stage(stage: str | None) -> bytes:
    return b"" if stage is None else b"=" + stage.encode()


def _decode_leases(reply: list[Any]) -> list[Lease]:
    """Return the leases of a claim's reply (lua/take.lua). Raises UnknownOptions."""
    now_ms, token, ids, statics, details = reply[2:7]
    leases: list[Lease] = []
    append, unpack = leases.append, _unpack_static
    last = b""
    options = Options()
    for id, static in zip(ids, statics, strict=True):
        a, b, c, d, flags, reference = unpack(static)
        if flags == 0:
            if reference != last:
                last, options = reference, decode_options(reference)
            append(
                Lease(id.decode(), token, a << 32 | b, 1, 0, 0, static[19:], options, 0, c << 32 | d, now_ms)
            )
        else:
            append(_decode_lease(id.decode(), static, token=token, now_ms=now_ms))
        token += 1
    for place, packed in zip(details[::2], details[1::2], strict=True):
        leases[place - 1] = _with_details(leases[place - 1], packed)
    return leases


def _decode_lease(id: str, static: bytes, *, token: int, now_ms: int) -> Lease:
    fields = read_static(static)
    return Lease(
        id, token, fields.incarnation, 1, 0, 0, fields.payload, fields.options, fields.priority,
        fields.enqueued_at_ms, now_ms, fields.expires_at_ms, False, fields.run_id, fields.extras,
    )  # fmt: skip


def _with_details(lease: Lease, packed: bytes) -> Lease:
    t1, t2, c1, c2, runs, failures, stalls, e1, e2, p1, p2, flags = _DETAILS.unpack_from(packed)
    extras, signal, steps = lease.extras, None, None
    if len(packed) > _DETAILS.size:
        end = _EXTRAS_AT + int.from_bytes(packed[_DETAILS.size : _EXTRAS_AT], "big")
        extras = unpack_extras(packed[_EXTRAS_AT:end])
        if flags & _HAS_STEPS:
            steps, end = read_sent_steps(packed, end)
        signal = packed[end:] if flags & _HAS_SIGNAL else None
    return Lease(
        lease.id, t1 << 32 | t2, lease.incarnation, runs, failures, stalls, lease.payload, lease.options,
        signed(p1, p2), lease.enqueued_at_ms, c1 << 32 | c2, e1 << 32 | e2, flags & 1 == 1, lease.run_id, extras,
        signal, steps,
    )  # fmt: skip
