"""A job, in the shapes it has on its way: what is put in, what is leased, what is read back.

All are plain values. Sizes and names are checked before they get here (``core.names``, ``queue``).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from penstock.core.annex import EMPTY_ANNEX, Annex
from penstock.core.dedup import Dedup
from penstock.core.lifecycle import State
from penstock.core.outcome import Failure
from penstock.core.retry import Backoff, Exponential
from penstock.core.staging import STAGED_FROM_MS

__all__ = [
    "DAY_MS",
    "Conflict",
    "Dependency",
    "EnqueueStatus",
    "Enqueued",
    "Job",
    "Lease",
    "NewJob",
    "Options",
    "Policy",
]

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
    ``annex`` is what few jobs have (``core.annex``). ``dedup`` applies if the id would be queued afresh. The job waits
    for those in ``after``; then its annex has a ``flow`` and says ``has_dependencies``. ``staged``: it is kept back
    until its write, which ``write_id`` names, is whole (``core.staging``); delay and ttl count from there.
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
    annex: Annex | None = None
    after: tuple[Dependency, ...] = ()
    dedup: Dedup | None = None
    staged: bool = False

    @property
    def stored_annex(self) -> Annex | None:
        """What an engine keeps as the annex: a record of a dedup key that is to go with the job ties it; the delay of
        a staged job waits there for its release."""
        if self.staged and self.delay_ms:
            return msgspec.structs.replace(self.annex or EMPTY_ANNEX, staged_delay_ms=self.delay_ms)
        dedup = self.dedup
        if dedup is None or dedup.mode == "throttle":
            return self.annex
        return msgspec.structs.replace(self.annex or EMPTY_ANNEX, dedup=dedup.key)


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
    the signal that ended its last suspension (``annex.received`` names it).
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
    annex: Annex | None = None
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
    annex: Annex | None = None
    damaged: bytes | None = None

    @property
    def is_staged(self) -> bool:
        """Whether it is kept back until its write is whole."""
        return self.state is State.SCHEDULED and self.run_at_ms >= STAGED_FROM_MS

    @property
    def is_handed_back(self) -> bool:
        """Return whether the worker of its last run did not know the task, and no worker has taken it since."""
        if self.annex is None or not self.annex.unknown_run or self.state not in _HELD_BACK:
            return False
        return self.annex.unknown_run == self.runs
