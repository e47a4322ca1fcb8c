"""Encode and decode jobs: their options, their two stored records (lua/record.lua), and new jobs as enqueue takes them.

All jobs of a task share their options. So a queue stores each set of options once, as a header, under a hash of it,
and records carry the hash as a reference. A reference never changes its meaning, so both directions are cached.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, get_args

import msgspec
from msgspec.structs import astuple

from penstock.core import lifecycle
from penstock.core.job import (
    DEFAULT_CONFLICT,
    DEFAULT_OPTIONS,
    Dedup,
    Dependency,
    EnqueueStatus,
    Extras,
    Job,
    NewJob,
    Options,
    pack_extras,
    unpack_extras,
)
from penstock.core.lifecycle import BlockedBy, State
from penstock.core.outcome import Failure, damaged_failure
from penstock.core.staging import check_staged, staged_at_ms
from penstock.storage.valkey.commands import Arg
from penstock.storage.values import Extended

# A process that keeps making new options must not fill its queues with headers: beyond this number, each record
# carries its header.
_MOST_REFERENCES: Final = 1000

_pack = msgspec.msgpack.Encoder().encode
parse_header: Final = msgspec.msgpack.Decoder(Options).decode
"""Returns the options of a header."""
decode_failure: Final = msgspec.msgpack.Decoder(Failure).decode
"""Returns a failure from its stored form."""


UNREADABLE: Final = (ValueError, LookupError, TypeError, struct.error)
"""The errors of decoding a damaged record."""


class UnknownOptions(LookupError):
    """This process does not know a reference. Call ``learn`` with the headers of the queue."""


class StoredOptions(NamedTuple):
    """A header, and the reference that records carry; empty if they carry the header itself."""

    header: bytes
    reference: bytes

    def head(self, flags: int) -> bytes:
        """Return the beginning of a record's body (lua/record.lua)."""
        if self.reference:
            return bytes((flags,)) + self.reference
        return bytes((flags | _INLINE,)) + len(self.header).to_bytes(2, "big") + self.header


_stored: dict[Options, StoredOptions] = {}
_known: dict[bytes, Options] = {}


def stored_options(options: Options) -> StoredOptions:
    """Return the stored form of options."""
    stored = _stored.get(options)
    if stored is None:
        header = _pack(_shortened(options))
        if len(_stored) >= _MOST_REFERENCES:
            return StoredOptions(header, b"")
        reference = b"\0" + hashlib.sha256(header).digest()[:5]
        stored = _stored[options] = StoredOptions(header, reference)
        _known[reference] = options
    return stored


def decode_options(header: bytes) -> Options:
    """Return the options of a header or reference. Raises UnknownOptions for an unknown reference."""
    options = _known.get(header)
    if options is None:
        if header[:1] == b"\0":
            raise UnknownOptions
        options = parse_header(header)
    return options


def learn(reference: bytes, header: bytes) -> None:
    """Remember the header that a queue stores under a reference."""
    _known[reference] = parse_header(header)


def _shortened(options: Options) -> list[Any]:
    """Return the options as a list, without trailing defaults."""
    values, defaults = list(astuple(options)), astuple(DEFAULT_OPTIONS)
    while values and values[-1] == defaults[len(values) - 1]:
        values.pop()
    return values


# The two records of a job

STATES: Final = dict(zip("swbacfx", State, strict=True))
"""The states by the letters of records and answers."""
BLOCKED_BY: Final = dict(zip("ghi", get_args(BlockedBy), strict=True))
"""The reasons for blocking a job, by the letters of its state record."""
_WHY_BLOCKED: Final = {
    ord(letter): BLOCKED_BY[letters[0]] for letters in ("gjk", "hm", "il") for letter in letters
}
STATE_OF: Final = {
    **{ord(letter): state for letter, state in STATES.items()},
    **dict.fromkeys(_WHY_BLOCKED, State.BLOCKED),
    ord("C"): State.COMPLETED,
    ord("t"): State.SCHEDULED,
}


def letters_of(answers: Any, **others: str) -> dict[str, Any]:
    """Return the answers of a verb by their letters: the first of each, and ``-`` for ``not_found``.

    ``others`` names the answers that have another letter.
    """
    first = (answer for answer in get_args(answers) if answer not in others.values())
    return {"-" if answer == "not_found" else answer[0]: answer for answer in first} | others


ANSWERS: Final = {
    "attach": letters_of(lifecycle.AttachAnswer),
    "cancel": letters_of(lifecycle.CancelAnswer, x="cancelled", d="rerun_cancelled"),
    "change": letters_of(lifecycle.ChangeAnswer),
    "copy_steps": letters_of(lifecycle.CopyStepsAnswer),
    "extend": letters_of(Extended, x="expired"),
    "hold": letters_of(lifecycle.HoldAnswer),
    "put_scheduler": letters_of(lifecycle.SchedulerAnswer, s="unchanged"),
    "record_steps": letters_of(lifecycle.StepAnswer),
    "release": letters_of(lifecycle.ReleaseAnswer),
    "remove_unchanged": letters_of(lifecycle.UnchangedAnswer),
    "reset_step": letters_of(lifecycle.ResetAnswer),
    "signal": letters_of(lifecycle.SignalAnswer),
}
"""The answers of verbs by the letters of their replies. ``on_ids`` needs none: its verbs have no other letters."""
ENQUEUED: Final[dict[int, EnqueueStatus]] = {
    **{ord(letter): status for letter, status in letters_of(EnqueueStatus).items()},
    ord("e"): "duplicate",
}
"""The answers of enqueue. ``e`` is a duplicate by its dedup key."""

_LIFO, _PRIORITY, _TTL, _RUN_ID, _WRITE_ID, _INLINE, _EXTRAS, _HAS_LINKS = 1, 2, 4, 8, 16, 32, 64, 128
_CANCELLING, _RERUN = 2, 4
_STATE_HEAD: Final = 80

_unpack_static = struct.Struct(">HIHIB").unpack_from
_unpack_state = struct.Struct(">BcHIHIHIHIHIIHIHIHIHIIIBHIBHH").unpack_from


def signed(high: int, low: int) -> int:
    """Return a signed number of six bytes, read as two and four."""
    value = high << 32 | low
    return value - (1 << 48) if value >> 47 else value


class Static(NamedTuple):
    """The fields of a job that do not change with its state."""

    incarnation: int
    enqueued_at_ms: int
    options: Options
    lifo: bool
    priority: int
    ttl_ms: int
    run_id: str
    write_id: str
    extras: Extras | None
    payload: bytes

    @property
    def expires_at_ms(self) -> int:
        """Return when the ttl runs out, counted from the enqueue; 0: never."""
        return self.enqueued_at_ms + self.ttl_ms if self.ttl_ms else 0


def read_static(static: bytes) -> Static:
    """Return the fields of a static record."""
    a, b, c, d, flags = _unpack_static(static)
    start, at = (15, 15 + int.from_bytes(static[13:15], "big")) if flags & _INLINE else (13, 19)
    options = decode_options(static[start:at])
    priority = ttl_ms = 0
    names = ["", ""]
    if flags & _PRIORITY:
        priority, at = int.from_bytes(static[at : at + 6], "big", signed=True), at + 6
    if flags & _TTL:
        ttl_ms, at = int.from_bytes(static[at : at + 6], "big"), at + 6
    for index, flag in enumerate((_RUN_ID, _WRITE_ID)):
        if flags & flag:
            end = at + 2 + int.from_bytes(static[at : at + 2], "big")
            names[index], at = static[at + 2 : end].decode(), end
    extras = None
    if flags & _EXTRAS:
        end = at + 4 + int.from_bytes(static[at : at + 4], "big")
        extras, at = unpack_extras(static[at + 4 : end]), end
    lifo = flags & _LIFO == _LIFO
    head = (a << 32 | b, c << 32 | d, options, lifo, priority, ttl_ms, names[0], names[1], extras)
    return Static(*head, static[at:])


def decode_job(queue: str, id: str, row: list[bytes]) -> Job:
    """Return a job from its two records and the values beside them (lua/get.lua). Raises UnknownOptions."""
    static, state, lease_until, result, failure, progress, extras, *damaged = row
    fields = read_static(static)
    common: dict[str, Any] = {
        "id": id, "queue": queue, "incarnation": fields.incarnation, "options": fields.options,
        "payload": fields.payload, "run_id": fields.run_id, "write_id": fields.write_id,
        "enqueued_at_ms": fields.enqueued_at_ms, "extras": unpack_extras(extras) if extras else fields.extras,
        "damaged": damaged[0] if damaged else None,
    }  # fmt: skip
    if not state:
        return Job(
            state=State.WAITING, priority=fields.priority, lifo=fields.lifo, run_at_ms=fields.enqueued_at_ms,
            expires_at_ms=fields.expires_at_ms, **common,
        )  # fmt: skip
    return Job(
        lease_until_ms=int(float(lease_until)) if lease_until else 0,
        failure=decode_failure(failure) if failure else None,
        progress=progress or None,
        **common,
        **_read_state(state, result),
        kept_until_ms=_kept_until(state, fields.options, common["extras"]),
    )


def damaged_job(queue: str, id: str, row: list[bytes], error: Exception) -> Job:
    """Return a job that cannot be read as users see it, until it is put aside."""
    state = STATE_OF.get(row[1][0], State.FAILED) if row[1] else State.WAITING
    failure = damaged_failure(f"{type(error).__name__}: {error}")
    return Job(
        id=id, queue=queue, state=state, incarnation=0, options=DEFAULT_OPTIONS, payload=b"", failure=failure
    )


def _kept_until(state: bytes, options: Options, extras: Extras | None) -> int:
    finished_at_ms = int.from_bytes(state[2:8], "big")
    held_ms = extras.longest_hold_ms if extras else 0
    match STATE_OF[state[0]]:
        case State.COMPLETED | State.CANCELLED:
            return finished_at_ms + max(options.result_ttl_ms, held_ms)
        case State.FAILED:
            return finished_at_ms + max(options.failure_ttl_ms, held_ms)
        case _:
            return 0


def _read_state(record: bytes, result: bytes) -> dict[str, Any]:
    (
        letter, _, f1, f2, t1, t2, _, _, q1, q2, c1, c2, runs, _, _, r1, r2, _, _, x1, x2, failures, stalls,
        flags, p1, p2, worker_length, header_length, run_id_length,
    ) = _unpack_state(record)  # fmt: skip
    state = STATE_OF[letter]
    rest_at = _STATE_HEAD + worker_length + header_length + run_id_length
    inline = record[rest_at:] if letter == ord("c") else result if letter == ord("C") else None
    worker = record[_STATE_HEAD : _STATE_HEAD + worker_length].decode() if state is State.ACTIVE else ""
    return {
        "state": state, "finished_at_ms": f1 << 32 | f2, "token": t1 << 32 | t2, "claimed_at_ms": c1 << 32 | c2,
        "runs": runs, "run_at_ms": (r1 << 32 | r2) or (q1 << 32 | q2), "expires_at_ms": x1 << 32 | x2,
        "failures": failures, "stalls": stalls, "priority": signed(p1, p2), "lifo": flags & _LIFO == _LIFO,
        "cancelling": flags & _CANCELLING == _CANCELLING, "has_rerun": flags & _RERUN == _RERUN,
        "worker": worker, "result": inline, "blocked_by": _WHY_BLOCKED.get(letter, ""),
    }  # fmt: skip


# New jobs, as enqueue takes them


def encode_jobs(
    jobs: Sequence[NewJob], *, to_come: Sequence[Collection[tuple[str, str]]] | None = None
) -> list[Arg]:
    """Return the specials, the headers, then the id and body of each job (lua/enqueue.lua).

    ``to_come``: for each job, the dependencies that notify it of their ends by themselves.
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
        is_special = job.delay_ms or job.run_at_ms is not None or job.unchecked or job.staged
        if has_links or is_special or job.conflict is not DEFAULT_CONFLICT:
            place = len(args) >> 1
            special = _special(job, to_come[place - 1] if to_come else ())
            is_shared = to_come is None and not has_links
            first = first_with.setdefault(tuple(special), place) if is_shared else place
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
    """Return bytes as a MessagePack string: Lua in the servers cannot read other types of bytes."""
    return b"\xdb" + len(data).to_bytes(4, "big") + data


def encode_after(after: Sequence[Dependency], to_come: Collection[tuple[str, str]]) -> list[Any]:
    """Return dependencies as ``Flows.depend`` takes them (lua/flows.lua)."""
    return [(queue, id, policy[0], (queue, id) in to_come) for queue, id, policy in after]


def _mode(dedup: Dedup) -> str:
    """Return the mode with the letters of its states, as ``Dedup.meet`` takes it (lua/dedup.lua)."""
    if not dedup.states:
        return dedup.mode
    return f"{dedup.mode}:{''.join('x' if state is State.CANCELLED else state[0] for state in dedup.states)}"


def _special(job: NewJob, to_come: Collection[tuple[str, str]]) -> list[Any]:
    conflict, dedup, run_at_ms = job.conflict, job.dedup, job.run_at_ms
    if job.staged:
        check_staged(job)
        run_at_ms = staged_at_ms(job.write_id)
    special = [
        job.delay_ms, -1 if run_at_ms is None else run_at_ms, job.unchecked, job.notify,
        conflict.mode, conflict.payload == "keep", conflict.run_at, conflict.options == "keep", conflict.reset_counts,
        *((dedup.key, _mode(dedup), dedup.ttl_ms) if dedup else ()),
    ]  # fmt: skip
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
        | _HAS_LINKS * (extras is not None and extras.has_links)
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
