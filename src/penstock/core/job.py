"""The forms of a job: ``NewJob``, ``Lease`` and ``Job``, with ``Extras`` for the fields that few jobs have.

``JOB_FIELDS`` lists the fields that users see. All are plain values: ``core.names`` and the client have checked sizes
and names.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.core.lifecycle import TERMINAL, State
from penstock.core.names import check_dedup_key
from penstock.core.outcome import Failure
from penstock.core.retry import Backoff, Exponential
from penstock.core.step import Step
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption


class Dependent(NamedTuple):
    """A job that is notified when another ends. ``flow`` tells which incarnation of it waits."""

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
    "stage": "st",
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
    "has_steps": "sp",
}):  # fmt: skip
    """The fields that few jobs have: a group, a cost, headers, and links to other jobs.

    Engines store them apart from a job's record, as a MessagePack map under short names that the Lua of the Valkey
    engine reads too, and unpack them only if they exist.

    Plain fields: ``headers`` are the user's. ``usage`` is what the job has reported (``core.limits``).
    ``scheduler`` and ``slot_ms`` are its origin, ``stage`` the stage at which it continues. Suspensions use
    ``awaits`` (a signal, until ``awaits_until_ms``; 0: no timeout), ``received``, ``timed_out`` and ``kept`` (the
    number of signals that came early). ``staged_delay_ms`` counts from the release of a staged job (see
    ``staged_at_ms``). ``unknown_run`` is the last run whose worker did not know the task. ``has_steps``: steps of
    the job are recorded beside it.

    Links: ``dedup`` is the key that the job's end frees. ``repeats``: its scheduler waits for its end. ``holds``
    are the consumers that keep the finished job, with the milliseconds after its end. ``flow`` is the flow that the
    job came with. ``dependents`` are notified of its end, and, if it ``has_later_dependents``, those in a list
    beside the extras. ``passes`` tells the worker how results of dependencies become arguments.

    The short names are a storage format: add names, never reuse them. A field that is set must not be an empty list
    or map, because Lua cannot tell the two apart. ``headers`` are packed first: they differ from job to job, and
    the Lua skips them to decode the rest only once (lua/shortcut.lua).
    """

    headers: dict[str, str] | None = None
    group: str = ""
    cost: int = 1
    dedup: str = ""
    usage: dict[str, int] | None = None
    scheduler: str = ""
    slot_ms: int = 0
    repeats: bool = False
    stage: str = ""
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
    has_steps: bool = False

    @property
    def has_links(self) -> bool:
        """Return whether the job is linked to others, so that engines must not take a fast path."""
        return self.group != "" or self.cost != 1 or self.has_links_beyond_group

    @property
    def has_links_beyond_group(self) -> bool:
        """Return whether the job has links other than its group."""
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

    def for_new_incarnation(self) -> Extras:
        """Return the extras with which a new incarnation of the id starts: the user's fields only."""
        return Extras(group=self.group, cost=self.cost, headers=self.headers, holds=self.holds)

    @property
    def longest_hold_ms(self) -> int:
        """Return how long consumers hold the job after its end; 0 without holds."""
        return max(self.holds.values()) if self.holds else 0


EMPTY_EXTRAS: Final = Extras()
_EMPTY_BYTES: Final = 3
"""The largest size of an empty map. A map with an entry is larger."""

pack_extras: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Extras).decode


def unpack_extras(packed: bytes) -> Extras | None:
    """Return the unpacked extras; ``None`` if they are empty."""
    return None if len(packed) <= _EMPTY_BYTES else _decode(packed)


STAGED_FROM_MS: Final = 2**47
"""The year 6429: the first time that no user can set. Staged jobs are scheduled for later times (``core.staging``)."""
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

EnqueueStatus = Literal["queued", "duplicate", "completed", "updated", "rerun"]
Policy = Literal["fail", "ignore", "wait"]
"""The effect that the failure of a dependency has on its dependent."""


class Dependency(NamedTuple):
    """A job that another waits for."""

    queue: str
    id: str
    policy: Policy = "fail"


class Options(msgspec.Struct, frozen=True, array_like=True):
    """The execution options of a job. All jobs of a task share one value, so engines cache its encoding.

    The order of the fields and their defaults are a storage format: append fields, and change neither.
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
    """The rule for an enqueue whose id exists.

    - ``default``: open -> duplicate; completed and kept -> its result; failed or cancelled -> queued afresh.
    - ``absent``: any kept record is a duplicate.
    - ``redispatch``: a pending job is updated as the fields say; an active one gets a rerun slot; a finished one is
      queued afresh.
    """

    mode: Literal["default", "absent", "redispatch"] = "default"
    payload: Literal["replace", "keep"] = "replace"
    run_at: Literal["always", "never", "if_earlier", "if_later"] = "always"
    options: Literal["replace", "keep"] = "replace"
    reset_counts: bool = False


class Dedup(msgspec.Struct, frozen=True):
    """A key in a queue, and the rule (``mode``) for jobs that share it: at most one of them runs, whatever their ids.

    ``Dedup.simple``, ``Dedup.throttle`` and ``Dedup.debounce`` make one and check their arguments. ``ttl_ms``
    counts from the enqueue that took the key; 0 means no limit. For ``debounce`` the store ignores it: it is the
    delay of a job that has no delay of its own. docs/verbs.md describes the modes.

    ``states`` are the states of the earlier job in which it makes a new one a duplicate; empty: those of the mode. With
    ``debounce``, a job that has not started is replaced in any case. If ``states`` has an end (completed, failed or
    cancelled), the key needs a ttl, because it outlives its job.
    """

    key: str
    mode: Literal["simple", "throttle", "debounce"] = "simple"
    ttl_ms: int = 0
    states: tuple[State, ...] = ()

    @property
    def outlives_job(self) -> bool:
        """Return whether the key is freed by its ttl only, not by the end of its job."""
        return self.mode == "throttle" or not TERMINAL.isdisjoint(self.states)

    @classmethod
    def simple(cls, key: str, ttl: Duration | None = None) -> Dedup:
        """Treat a job as a duplicate while an earlier one is open, for up to ``ttl``."""
        return cls(check_dedup_key(key), "simple", 0 if ttl is None else milliseconds(ttl, what="ttl"))

    @classmethod
    def throttle(cls, key: str, ttl: Duration) -> Dedup:
        """Accept one job per ``ttl``, counted from its enqueue, whatever its outcome."""
        plain, ttl_ms = check_dedup_key(key), milliseconds(ttl, what="ttl")
        if ttl_ms < 1:
            raise InvalidOption(
                f"ttl must be at least 1 ms, got {shown(ttl)}. Use Dedup.simple for no window."
            )
        return cls(plain, "throttle", ttl_ms)

    @classmethod
    def debounce(cls, key: str, delay: Duration | None = None) -> Dedup:
        """Replace an earlier job that has not started, so that only the newest of a burst runs.

        ``delay`` is how long each job waits for a newer one; the default is the job's own delay.
        """
        return cls(check_dedup_key(key), "debounce", 0 if delay is None else milliseconds(delay))


_HELD_BACK: Final = (State.SCHEDULED, State.WAITING, State.BLOCKED)
DEFAULT_CONFLICT = Conflict()
DEFAULT_OPTIONS = Options()


class NewJob(msgspec.Struct, frozen=True):
    """A job to enqueue.

    ``delay_ms`` counts from the store's now; ``run_at_ms`` (epoch) is the user's timestamp; at most one of them is
    set. ``ttl_ms`` counts from the enqueue. ``unchecked`` promises that the id is new. ``dedup`` applies if the id
    would be queued afresh. The job waits for the jobs in ``after``; its extras then have a ``flow`` and
    ``has_dependencies``. ``staged`` keeps the job back until its write (``write_id``) is complete (see
    ``staged_at_ms``); delay and ttl count from then. ``notify`` is the listener (see ``Storage.listen``) to notify
    of the job's end, or of the end of the job that this one duplicates.
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
        """Return the extras that an engine stores: with the dedup key that the job's end frees, and the delay of a
        staged job."""
        if self.staged and self.delay_ms:
            return msgspec.structs.replace(self.extras or EMPTY_EXTRAS, staged_delay_ms=self.delay_ms)
        dedup = self.dedup
        if dedup is None or dedup.outlives_job:
            return self.extras
        return msgspec.structs.replace(self.extras or EMPTY_EXTRAS, dedup=dedup.key)


class Enqueued(msgspec.Struct, frozen=True):
    """The answer to one ``NewJob``.

    ``queued``: the job was added. ``duplicate``: the id exists, in ``state``; nothing changed. ``completed``: it
    ran before and ``result`` is its result. ``updated``: the pending job was changed. ``rerun``: the id is active
    and will run again with this dispatch.

    ``id`` is that of the earlier job if the new one is a duplicate by its dedup key. ``state`` is ``None`` if a
    throttle has outlived that job's record.
    """

    id: str
    status: EnqueueStatus
    state: State | None
    incarnation: int
    result: bytes | None = None


class Lease(msgspec.Struct, frozen=True):
    """A leased job. Only the holder of ``token`` can settle it.

    ``run`` counts from 1. ``cancelling``: the run should stop as soon as it can. ``signal`` is the data of the
    signal that ended the last suspension (``extras.received`` is its name). ``steps`` are the recorded steps in their
    order; ``None`` if there are none, or too many to be sent with the lease (``extras.has_steps``).
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
    steps: tuple[Step, ...] | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the store has it now. Times are the store's, in epoch milliseconds; 0 means never.

    ``damaged`` is set if the stored record could not be read: the original bytes by the name of each part, as
    MessagePack. The job has then failed with the error class ``Damaged``.
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
        """Return whether the job is kept back until its write is complete."""
        return self.state is State.SCHEDULED and self.run_at_ms >= STAGED_FROM_MS

    @property
    def is_handed_back(self) -> bool:
        """Return whether the worker of the last run did not know the task, and no worker has taken the job since."""
        if self.extras is None or not self.extras.unknown_run or self.state not in _HELD_BACK:
            return False
        return self.extras.unknown_run == self.runs


FieldKind: TypeAlias = Literal[
    "text", "name", "number", "count", "flag", "time", "amounts", "texts", "value", "json", "failure"
]


class JobField(NamedTuple):
    """A field of a job as users see it: in ``JobInfo``, in JSON, and as a column of Spark's tables.

    ``path`` is its place in a ``Job``. A ``name`` is a text that may be empty for none, a ``count`` a small number, a
    ``time`` is in milliseconds (0: never), ``amounts`` are in millionths. ``in_tables``: Spark has a column for it.
    """

    name: str
    kind: FieldKind
    path: str = ""
    in_tables: bool = True

    @property
    def read(self) -> Callable[[Job], Any]:
        """Return the function that reads the field."""
        owner, _, rest = (self.path or self.name).partition(".")
        if owner != "extras":
            return attrgetter(self.path or self.name)
        read = attrgetter(rest)
        return lambda job: read(job.extras or EMPTY_EXTRAS)


JOB_FIELDS: Final = (
    JobField("queue", "text"),
    JobField("id", "text"),
    JobField("incarnation", "number"),
    JobField("state", "text"),
    JobField("task", "text", "options.task"),
    JobField("version", "text", "options.version"),
    JobField("run_id", "name"),
    JobField("write_id", "name"),
    JobField("group", "name", "extras.group"),
    JobField("payload", "value"),
    JobField("priority", "number"),
    JobField("cost", "number", "extras.cost"),
    JobField("headers", "texts", "extras.headers"),
    JobField("enqueued_at", "time", "enqueued_at_ms"),
    JobField("run_at", "time", "run_at_ms"),
    JobField("claimed_at", "time", "claimed_at_ms"),
    JobField("finished_at", "time", "finished_at_ms"),
    JobField("expires_at", "time", "expires_at_ms"),
    JobField("kept_until", "time", "kept_until_ms"),
    JobField("runs", "count"),
    JobField("failures", "count"),
    JobField("stalls", "count"),
    JobField("worker", "name"),
    JobField("cancelling", "flag"),
    JobField("blocked_by", "name"),
    JobField("progress", "json"),
    JobField("result", "value"),
    JobField("failure", "failure"),
    JobField("usage", "amounts", "extras.usage"),
    JobField("attempts", "count", "options.attempts", in_tables=False),
    JobField("flow", "name", "extras.flow", in_tables=False),
    JobField("scheduler", "name", "extras.scheduler", in_tables=False),
    JobField("has_rerun", "flag", in_tables=False),
)
"""The list of fields. ``JobInfo`` has a property for each; JSON and the tables derive from the list."""
