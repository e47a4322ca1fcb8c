"""Encoding of arguments and decoding of replies: bodies, outcomes, leases, news. Whole jobs: ``jobs.py``."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, assert_never

import msgspec

from penstock.core.job import (
    DEFAULT_CONFLICT,
    Dependency,
    Lease,
    NewJob,
    Options,
    check_staged,
    pack_extras,
    staged_at_ms,
    unpack_extras,
)
from penstock.core.outcome import Await, Cancel, Complete, Fail, Limited, Outcome, Release, Snooze, Suspend
from penstock.storage.valkey.jobs import (
    decode_failure,
    decode_options,
    read_static,
    signed,
    state_of,
    stored_options,
)
from penstock.storage.valkey.replies import Arg
from penstock.storage.values import Finished

_LIFO, _PRIORITY, _TTL, _RUN_ID, _WRITE_ID, _EXTRAS, _BINDS = 1, 2, 4, 8, 16, 64, 128
_NEWS_HEAD: Final = 18

_pack = msgspec.msgpack.Encoder().encode
_unpack_static = struct.Struct(">HIHIB6s").unpack_from
_DETAILS: Final = struct.Struct(">HIHIIIIHIHIB")
_EXTRAS_AT: Final = _DETAILS.size + 4
_HAS_SIGNAL: Final = 2
_unpack_news = struct.Struct(">BcHIHII").unpack_from


def encode_jobs(
    jobs: Sequence[NewJob], *, to_come: Sequence[Collection[tuple[str, str]]] | None = None
) -> list[Arg]:
    """Return the specials, the headers, then the id and body of each job (lua/enqueue.lua).

    ``to_come``: for each job, the dependencies that will report their ends by themselves.
    """
    args: list[Arg] = []
    append = args.append
    specials: dict[int, list[Any] | str | int] = {}
    first_with: dict[tuple[Any, ...], int] = {}
    headers: dict[bytes, bytes] = {}
    options: Options | None = None
    head = b""
    for job in jobs:
        append(job.id)
        if job.options is not options:
            options = job.options
            stored = stored_options(options)
            head = stored.head(0)
            if stored.reference:
                headers[stored.reference] = stored.header
        if job.priority or job.ttl_ms or job.lifo or job.run_id or job.write_id or job.extras or job.dedup:
            append(_body(job))
            has_links = job.after or job.dedup  # jobs that come after others have extras
        else:
            append(head + job.payload)
            has_links = None
        if (
            has_links
            or job.delay_ms
            or job.run_at_ms is not None
            or job.unchecked
            or job.conflict is not DEFAULT_CONFLICT
            or job.staged
        ):
            place = len(args) >> 1
            special = _special(job, to_come[place - 1] if to_come else ())
            first = (
                place if to_come is not None or has_links else first_with.setdefault(tuple(special), place)
            )
            specials[place] = special if first == place else first
        elif job.notify:
            specials[len(args) >> 1] = job.notify
    flat = [part for pair in headers.items() for part in pair]
    return [_pack(specials) if specials else b"", len(headers), *flat, *args]


def encode_put(job: NewJob) -> bytes:
    """Return a job as an outbox message carries it (lua/outbox.lua)."""
    stored = stored_options(job.options)
    options = (
        (_text(stored.reference), _text(stored.header)) if stored.reference else (_pack(False), _pack(False))
    )
    parts = (_text(job.id.encode()), _text(_body(job)), _pack(_special(job, ())), *options)
    return b"\x95" + b"".join(parts)


def _text(data: bytes) -> bytes:
    """Return bytes as MessagePack text, the only kind of bytes that the servers' Lua knows."""
    return b"\xdb" + len(data).to_bytes(4, "big") + data


def encode_after(after: Sequence[Dependency], to_come: Collection[tuple[str, str]]) -> list[Any]:
    """Return dependencies as ``Flows.depend`` takes them (lua/flows.lua)."""
    return [(queue, id, policy[0], (queue, id) in to_come) for queue, id, policy in after]


def _special(job: NewJob, to_come: Collection[tuple[str, str]]) -> list[Any]:
    conflict, dedup, run_at_ms = job.conflict, job.dedup, job.run_at_ms
    if job.staged:
        check_staged(job)
        run_at_ms = staged_at_ms(job.write_id)
    special = [
        job.delay_ms,
        -1 if run_at_ms is None else run_at_ms,
        job.unchecked,
        job.notify,
        conflict.mode,
        conflict.payload == "keep",
        conflict.run_at,
        conflict.options == "keep",
        conflict.reset_counts,
        *((dedup.key, dedup.mode, dedup.ttl_ms) if dedup else ()),
    ]
    if not job.after:
        return special
    return [*special, *(() if dedup else (False, "", 0)), encode_after(job.after, to_come)]


def _body(job: NewJob) -> bytes:
    extras = job.stored_extras
    flags = (
        _LIFO * job.lifo
        | _PRIORITY * (job.priority != 0)
        | _TTL * (job.ttl_ms > 0)
        | _RUN_ID * (job.run_id != "")
        | _WRITE_ID * (job.write_id != "")
        | _EXTRAS * (extras is not None)
        | _BINDS * (extras is not None and extras.binds)
    )
    parts = [stored_options(job.options).head(flags)]
    if job.priority:
        parts.append(job.priority.to_bytes(6, "big", signed=True))
    if job.ttl_ms:
        parts.append(job.ttl_ms.to_bytes(6, "big"))
    for name in (job.run_id, job.write_id):
        if name:
            encoded = name.encode()
            parts += (len(encoded).to_bytes(2, "big"), encoded)
    if extras is not None:
        packed = pack_extras(extras)
        parts += (len(packed).to_bytes(4, "big"), packed)
    return b"".join((*parts, job.payload))


def encode_outcome(token: int, outcome: Outcome) -> bytes:
    """Return token and outcome as settle takes them."""
    head = token.to_bytes(6, "big")
    match outcome:
        case Complete(result, ttl_ms):
            kind, ttl = (b"C", b"") if ttl_ms is None else (b"K", ttl_ms.to_bytes(6, "big"))
            return b"%b%b%b%b" % (head, kind, ttl, result)
        case Fail(failure, retry_in_ms, final, ttl_ms):
            kind, ttl = (b"F", b"") if ttl_ms is None else (b"G", ttl_ms.to_bytes(6, "big"))
            rest = retry_in_ms.to_bytes(6, "big")
            return b"%b%b%c%b%b%b" % (head, kind, final, rest, ttl, _pack(failure))
        case Snooze(delay_ms, step, unknown):
            return b"%bS%b%b%b" % (head, delay_ms.to_bytes(6, "big"), b"?" * unknown, _step(step))
        case Suspend(signal, timeout_ms, step):
            name = signal.encode()
            return b"%bP%b%c%b%b" % (head, timeout_ms.to_bytes(6, "big"), len(name), name, _step(step))
        case Release():
            return head + b"R"
        case Limited(delay_ms, scope):
            return b"%bL%b%b" % (head, delay_ms.to_bytes(6, "big"), b"q" if scope == "queue" else b"g")
        case Await():
            return head + b"W"
        case Cancel():
            return head + b"X"
        case _:
            assert_never(outcome)


def _step(step: str | None) -> bytes:
    return b"" if step is None else b"=" + step.encode()


def decode_leases(reply: list[Any]) -> list[Lease]:
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


def decode_readable_leases(reply: list[Any]) -> tuple[list[Lease], list[str], str]:
    """Return the leases of a claim's reply that can be decoded, the ids of the others, and why the last one cannot."""
    now_ms, token, ids, statics, details = reply[2:7]
    details_of = dict(zip(details[::2], details[1::2], strict=True))
    leases: list[Lease] = []
    damaged: list[str] = []
    why = ""
    for place, (id, static) in enumerate(zip(ids, statics, strict=True), 1):
        try:
            lease = _decode_lease(id.decode(), static, token=token + place - 1, now_ms=now_ms)
            leases.append(_with_details(lease, details_of[place]) if place in details_of else lease)
        except (ValueError, LookupError, TypeError, struct.error) as error:
            damaged.append(id)
            why = f"{type(error).__name__} {error}"
    return leases, damaged, why


def _decode_lease(id: str, static: bytes, *, token: int, now_ms: int) -> Lease:
    fields = read_static(static)
    return Lease(
        id, token, fields.incarnation, 1, 0, 0, fields.payload, fields.options, fields.priority,
        fields.enqueued_at_ms, now_ms, fields.expires_at_ms, False, fields.run_id, fields.extras,
    )  # fmt: skip


def _with_details(lease: Lease, packed: bytes) -> Lease:
    t1, t2, c1, c2, runs, failures, stalls, e1, e2, p1, p2, flags = _DETAILS.unpack_from(packed)
    extras, signal = lease.extras, None
    if len(packed) > _DETAILS.size:
        end = _EXTRAS_AT + int.from_bytes(packed[_DETAILS.size : _EXTRAS_AT], "big")
        extras = unpack_extras(packed[_EXTRAS_AT:end])
        signal = packed[end:] if flags & _HAS_SIGNAL else None
    return Lease(
        lease.id, t1 << 32 | t2, lease.incarnation, runs, failures, stalls, lease.payload, lease.options,
        signed(p1, p2), lease.enqueued_at_ms, c1 << 32 | c2, e1 << 32 | e2, flags & 1 == 1, lease.run_id, extras,
        signal,
    )  # fmt: skip


class News(NamedTuple):
    """The end of a job. ``fetch``: the result is too long to send along; the store has it."""

    finished: Finished
    fetch: bool


def decode_news(news: bytes) -> News:
    """Return what a listener receives (lua/waiters.lua)."""
    letter, fetch, i1, i2, id_length, result_length, failure_length = _unpack_news(news)
    result_at = _NEWS_HEAD + id_length
    failure_at = result_at + max(0, result_length - 1)
    finished = Finished(
        news[_NEWS_HEAD:result_at].decode(),
        i1 << 32 | i2,
        state_of(letter),
        news[result_at:failure_at] if result_length else None,
        decode_failure(news[failure_at:]) if failure_length else None,
    )
    return News(finished, fetch == b"1")
