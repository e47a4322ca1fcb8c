"""What few jobs have beside the common: a group, a cost, headers, and what ties a job to others.

Engines keep it apart from a job's record, packed, and look at it only where it is there. It travels and is
stored as a MessagePack map under short names, which the Lua of the Valkey engine reads too.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

import msgspec

from penstock.core.dedup import Dedup
from penstock.core.lifecycle import State
from penstock.core.outcome import Failure
from penstock.core.retry import Backoff, Exponential
from penstock.errors import InvalidOption


class Dependent(NamedTuple):
    """A job that is to be told of another's end, in the life that began with ``flow``."""

    queue: str
    id: str
    flow: str


class Extras(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={
    "group": "g",
    "cost": "c",
    "headers": "h",
    "dedup": "d",
    "usage": "u",
    "scheduler": "s",
    "slot_ms": "t",
    "repeats": "r",
    "step": "st",
    "awaits": "sw",
    "awaits_until_ms": "su",
    "received": "sr",
    "timed_out": "so",
    "kept": "sk",
    "holds": "hd",
    "flow": "fl",
    "dependents": "dn",
    "has_later_dependents": "dl",
    "has_dependencies": "dp",
    "passes": "pr",
    "staged_delay_ms": "sd",
    "unknown_run": "ur",
}):  # fmt: skip
    """See the module. What is no **tie**: ``headers``, which are the user's and pass through untouched; ``usage``, what
    the job has reported (``core.usage``); ``scheduler`` and ``slot_ms``, where it comes from; ``step``, where it goes
    on. ``awaits`` (a signal, until ``awaits_until_ms``, 0: for ever), ``received``, ``timed_out`` and ``kept`` (how
    many signals came early) are of its suspensions; ``staged_delay_ms`` counts from the release of a staged job
    (see ``staged_at_ms``). ``unknown_run`` is the last run whose worker did not know the task. All else is a tie:
    ``dedup`` is the key whose record goes when the job ends; ``repeats``: its scheduler waits for that end; ``holds``
    are consumers that keep a finished job, and for how many milliseconds after its end.

    ``flow`` names the flow a job came with. ``dependents`` are told of its end, with those in a list beside the
    extras if it ``has_later_dependents``. ``passes`` is for whoever runs the job: how results of its dependencies
    become arguments.

    The short names are a storage format: add, never reuse. No field may be an empty list or map once it is
    set: in Lua the two are the same. ``headers`` are packed first: they differ from job to job, and the Lua skips them
    to decode the rest only once (lua/shortcut.lua).
    """

    headers: dict[str, str] | None = None
    group: str = ""
    cost: int = 1
    dedup: str = ""
    usage: dict[str, int] | None = None
    scheduler: str = ""
    slot_ms: int = 0
    repeats: bool = False
    step: str = ""
    awaits: str = ""
    awaits_until_ms: int = 0
    received: str = ""
    timed_out: bool = False
    kept: int = 0
    holds: dict[str, int] | None = None
    flow: str = ""
    dependents: list[Dependent] | None = None
    has_later_dependents: bool = False
    has_dependencies: bool = False
    passes: str = ""
    staged_delay_ms: int = 0
    unknown_run: int = 0

    @property
    def binds(self) -> bool:
        """Whether the job's transitions concern others, or others it: then no engine may take a shortcut."""
        return self.group != "" or self.cost != 1 or self.binds_beyond_group

    @property
    def binds_beyond_group(self) -> bool:
        """Whether there is another tie than that to its group."""
        return (
            self.flow != ""
            or self.dedup != ""
            or self.holds is not None
            or self.repeats
            or self.dependents is not None
            or self.has_later_dependents
            or self.has_dependencies
            or self.passes != ""
        )

    def shed(self) -> Extras:
        """What of it a later life of the same id begins with: all that the user said, nothing that happened."""
        return Extras(group=self.group, cost=self.cost, headers=self.headers, holds=self.holds)

    @property
    def longest_hold_ms(self) -> int:
        """For how long after its end a job is held by its consumers; 0 if by none."""
        return max(self.holds.values()) if self.holds else 0


EMPTY_EXTRAS: Final = Extras()
_NOTHING: Final = 3
"""Bytes of an empty map, in any of the ways to write it: one with an entry has more."""

pack_extras: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Extras).decode


def unpack_extras(packed: bytes) -> Extras | None:
    """The annex of these bytes; ``None`` if there is nothing in it."""
    return None if len(packed) <= _NOTHING else _decode(packed)


# A job, in the shapes it has on its way: what is put in, what is leased, what is read back.
#
# All are plain values. Sizes and names are checked before they get here (``core.names``, ``queue``).


HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

EnqueueStatus = Literal["queued", "duplicate", "completed", "updated", "rerun"]
Policy = Literal["fail", "ignore", "wait"]
"""What the failure of a dependency does to its dependent."""


class Dependency(NamedTuple):
    """A job that another waits for."""

    queue: str
    id: str
    policy: Policy = "fail"


class Options(msgspec.Struct, frozen=True, array_like=True):
    """How a job is treated. All jobs of a task share one value, so engines cache its encoding.

    The order of the fields is a storage format: append, never reorder.
    """

    task: str = ""
    version: str = ""
    attempts: int = 3
    max_stalls: int = 3
    result_ttl_ms: int = HOUR_MS
    failure_ttl_ms: int = 30 * DAY_MS
    timeout_ms: int = 0
    backoff: Backoff = Exponential()


class Conflict(msgspec.Struct, frozen=True):
    """What an enqueue does when its id is known (rules 7 and 8).

    - ``default``: open -> duplicate; completed and kept -> its result; failed or cancelled -> queued afresh.
    - ``absent``: any kept record is a duplicate.
    - ``redispatch``: a pending job is updated as the fields say; an active one gets a rerun slot; a finished
      one is queued afresh.
    """

    mode: Literal["default", "absent", "redispatch"] = "default"
    payload: Literal["replace", "keep"] = "replace"
    run_at: Literal["always", "never", "if_earlier", "if_later"] = "always"
    options: Literal["replace", "keep"] = "replace"
    reset_counts: bool = False


_HELD_BACK: Final = (State.SCHEDULED, State.WAITING, State.BLOCKED)
DEFAULT_CONFLICT = Conflict()
DEFAULT_OPTIONS = Options()


class NewJob(msgspec.Struct, frozen=True):
    """One job to enqueue.

    ``delay_ms`` counts from the store's now; ``run_at_ms`` (epoch) is an instant the user named; at most one
    of the two is given. ``ttl_ms`` counts from the enqueue. ``unchecked`` promises that the id is new.
    ``extras`` is what few jobs have. ``dedup`` applies if the id would be queued afresh. The job waits
    for those in ``after``; then its extras have a ``flow`` and say ``has_dependencies``. ``staged``: it is kept back
    until its write, which ``write_id`` names, is whole (see ``staged_at_ms``); delay and ttl count from there.
    ``notify`` is the name of a listener (see ``Storage.listen``) to tell of the job's end; one that finds a
    duplicate waits for that one's end.
    """

    id: str
    payload: bytes = b""
    options: Options = DEFAULT_OPTIONS
    delay_ms: int = 0
    run_at_ms: int | None = None
    priority: int = 0
    lifo: bool = False
    ttl_ms: int = 0
    conflict: Conflict = DEFAULT_CONFLICT
    unchecked: bool = False
    run_id: str = ""
    write_id: str = ""
    notify: str = ""
    extras: Extras | None = None
    after: tuple[Dependency, ...] = ()
    dedup: Dedup | None = None
    staged: bool = False

    @property
    def stored_extras(self) -> Extras | None:
        """What an engine keeps as the annex: a record of a dedup key that is to go with the job ties it; the delay of
        a staged job waits there for its release."""
        if self.staged and self.delay_ms:
            return msgspec.structs.replace(self.extras or EMPTY_EXTRAS, staged_delay_ms=self.delay_ms)
        dedup = self.dedup
        if dedup is None or dedup.mode == "throttle":
            return self.extras
        return msgspec.structs.replace(self.extras or EMPTY_EXTRAS, dedup=dedup.key)


class Enqueued(msgspec.Struct, frozen=True):
    """The answer to one ``NewJob``.

    ``queued``: it is in. ``duplicate``: the id is known, in ``state``; nothing changed. ``completed``: it ran
    before, ``result`` is what came out. ``updated``: the pending job was changed. ``rerun``: the id is active
    and will run again with this dispatch.

    ``id`` differs from the one that was given if the job is a duplicate by its dedup key: it is that of the
    earlier job. ``state`` is ``None`` if a throttle has outlived that job's record.
    """

    id: str
    status: EnqueueStatus
    state: State | None
    incarnation: int
    result: bytes | None = None


class Lease(msgspec.Struct, frozen=True):
    """A job taken under a lease. ``token`` proves the holding; it alone decides whose settle counts.

    ``run`` counts from 1. ``cancelling`` is true if the job is to stop as soon as it can. ``signal`` is the data of
    the signal that ended its last suspension (``extras.received`` names it).
    """

    id: str
    token: int
    incarnation: int
    run: int
    failures: int
    stalls: int
    payload: bytes
    options: Options
    priority: int
    enqueued_at_ms: int
    claimed_at_ms: int
    expires_at_ms: int = 0
    cancelling: bool = False
    run_id: str = ""
    extras: Extras | None = None
    signal: bytes | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the store has it now. Times are the store's, epoch milliseconds; 0 means never.

    ``damaged`` is set if the stored record could not be read: the original values as MessagePack, a map from the
    name of each part to its bytes. The job has then failed with the error class ``Damaged``.
    """

    id: str
    queue: str
    state: State
    incarnation: int
    options: Options
    payload: bytes
    priority: int = 0
    lifo: bool = False
    run_id: str = ""
    write_id: str = ""
    blocked_by: str = ""
    enqueued_at_ms: int = 0
    run_at_ms: int = 0
    claimed_at_ms: int = 0
    finished_at_ms: int = 0
    expires_at_ms: int = 0
    kept_until_ms: int = 0
    runs: int = 0
    failures: int = 0
    stalls: int = 0
    token: int = 0
    worker: str = ""
    lease_until_ms: int = 0
    cancelling: bool = False
    has_rerun: bool = False
    result: bytes | None = None
    failure: Failure | None = None
    progress: bytes | None = None
    extras: Extras | None = None
    damaged: bytes | None = None

    @property
    def is_staged(self) -> bool:
        """Whether it is kept back until its write is whole."""
        return self.state is State.SCHEDULED and self.run_at_ms >= STAGED_FROM_MS

    @property
    def is_handed_back(self) -> bool:
        """Return whether the worker of its last run did not know the task, and no worker has taken it since."""
        if self.extras is None or not self.extras.unknown_run or self.state not in _HELD_BACK:
            return False
        return self.extras.unknown_run == self.runs


# Staged jobs: put in by a write that is yet to be whole, and released or removed with it.
#
# A staged job is scheduled for an instant that is beyond all others and belongs to its write alone. So it
# needs no state and no index of its own, and nothing that time brings ever reaches it. Instants stay
# below 2**48, which is what records have room for, and below the year 10000, which is what ``datetime``
# has.


STAGED_FROM_MS: Final = 2**47
"""The year 6429: the first instant that no user may name."""

_WRITES: Final = 2**46


@lru_cache(64)
def staged_at_ms(write_id: str) -> int:
    """The instant of a write. Two writes may share one, so whoever walks it looks at ``write_id`` too."""
    digest = blake2b(write_id.encode(), digest_size=8).digest()
    return STAGED_FROM_MS + int.from_bytes(digest, "big") % _WRITES


def check_staged(job: NewJob) -> None:
    """Refuse what does not go together with staging.

    Raises:
        InvalidOption: no ``write_id``; an instant, a dedup key, a flow or a redispatch.
    """
    extras = job.extras
    is_tied = job.after or (extras is not None and (extras.flow or extras.dependents or extras.repeats))
    if not job.write_id:
        raise _refused(job, "it has no write_id, so nothing could release it")
    if job.run_at_ms is not None:
        raise _refused(job, "it has a run_at; give it a delay, which counts from the release")
    if job.dedup is not None:
        raise _refused(job, "it has a dedup key, and nobody knows whether it will ever stand for it")
    if is_tied:
        raise _refused(job, "it belongs to a flow or a scheduler, which would wait for it")
    if job.conflict.mode == "redispatch":
        raise _refused(job, "on_conflict is redispatch, which would change a job before the write is whole")


def _refused(job: NewJob, cause: str) -> InvalidOption:
    return InvalidOption(
        f"Job {job.id!r} cannot be staged: {cause}. Enqueue it without staging, or leave that out."
    )
