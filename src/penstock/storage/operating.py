"""The part of the storage contract that people, and code acting for them, operate on jobs and queues with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from penstock.core.lifecycle import State
from penstock.core.limits import Limit, LimitsOfQueue
from penstock.errors import StorageError
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


class Operating(Protocol):
    """Part of ``Storage``, which says what holds for all verbs."""

    # Jobs

    async def cancel(self, queue: str, ids: Sequence[str], *, rerun_only: bool = False) -> list[CancelAnswer]:
        """Pending jobs end now; active ones are asked to stop (``requested``), and stay asked through rescue and
        retry. ``rerun_only`` leaves the jobs alone and drops the reruns that wait behind active ones
        (``rerun_cancelled``; ``no_rerun`` if none does)."""
        ...

    async def retry(self, queue: str, ids: Sequence[str]) -> list[RetryAnswer]:
        """Failed and cancelled jobs wait again, with counts and ttl from zero and the same incarnation."""
        ...

    async def retry_all(self, queue: str, *, limit: int = 1000, cursor: str = "") -> Bulk:
        """Retry up to ``limit`` failed jobs. Those that fail again meanwhile are not retried twice."""
        ...

    async def promote(self, queue: str, ids: Sequence[str]) -> list[PromoteAnswer]:
        """Scheduled jobs wait from now on."""
        ...

    async def dedup_of(self, queue: str, key: str) -> str | None:
        """The id of the job that stands for a dedup key; ``None``: a job under it would go in."""
        ...

    async def clear_dedup(self, queue: str, key: str) -> bool:
        """Forget the record of a dedup key; its job is left alone. False if there was none."""
        ...

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        """Change one job. ``result_ttl_ms`` and ``failure_ttl_ms`` work in every state and move a finished
        job's expiry; the payload of open jobs, the priority of those that are not active; ``delay_ms`` of waiting
        and scheduled ones. All of it, or nothing."""
        ...

    async def remove(self, queue: str, ids: Sequence[str]) -> list[RemoveAnswer]:
        """Delete records. Active jobs are left alone."""
        ...

    async def remove_unchanged(
        self, queue: str, jobs: Sequence[Unchanged], *, consumer: str = ""
    ) -> list[UnchangedAnswer]:
        """Delete records of jobs that are still what was read of them: the same life, ended at that time, and held
        by no consumer but this one."""
        ...

    async def unstage(
        self, queue: str, write_id: str, *, keep: bool, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        """Let go of up to ``limit`` staged jobs of a write: into the line, or to their delay (``keep``); or out."""
        ...

    async def signal(self, queue: str, id: str, name: str, data: bytes) -> SignalAnswer:
        """Resume the job if it is suspended until that signal (``resumed``); keep it for later if it is open
        otherwise (``kept``), unless 100 are kept already (``full``)."""
        ...

    # Holding finished jobs

    async def hold(self, queue: str, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
        """Keep these jobs for a consumer, once they have ended, until it releases them, or for ``ttl_ms`` after
        their end (from now, if they have ended). Neither age nor count nor ``clean`` takes them meanwhile."""
        ...

    async def release(self, queue: str, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
        """Take back the holds: ordinary retention applies."""
        ...

    # Queues

    async def pause(self, queue: str, *, group: str = "", duration_ms: int = 0) -> None:
        """Claims get nothing from now on, everywhere; with ``group``, nothing of that group; with a duration, for that
        long, as a job that settles as ``Limited`` has it."""
        ...

    async def resume(self, queue: str, *, group: str = "") -> None:
        """The end of a pause, for a time or not."""
        ...

    async def limit(
        self, queue: str, group: str, limit: Limit | None, *, expected: Limit | UnsetType | None = UNSET
    ) -> bool:
        """Set the limit of the queue itself (group ``""``), of every group without its own (``"*"``), or of one group;
        ``None`` removes it. Holds from the next claim on.

        With ``expected`` only if the limit is that one (``None``: there is none). Return whether it was set.
        """
        ...

    async def limits(self, queue: str) -> LimitsOfQueue:
        """The limits that were set."""
        ...

    async def groups(
        self, queue: str, *, cursor: str = "", limit: int = 100, keys: Sequence[str] = ()
    ) -> GroupPage:
        """The groups that have members, are paused, or have starts that still count, by key.

        With ``keys``, return exactly these groups in that order instead. The key ``""`` is the queue itself: its
        ``why`` says which pause or limit of the queue holds back a claim, whether or not jobs wait.
        """
        ...

    async def drain(
        self, queue: str, *, scheduled: bool = False, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        """Remove up to ``limit`` jobs that wait, for a worker or for room in their group (and scheduled ones)."""
        ...

    async def clean(
        self, queue: str, state: State, *, older_than_ms: int = 0, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        """Remove up to ``limit`` jobs of a terminal state that ended at least so long ago."""
        ...

    async def obliterate(self, queue: str, *, force: bool = False) -> int:
        """Remove all jobs of the queue. Refused with ``StorageError`` while some are active, unless forced.

        Counters, log, epoch, pause flag and settings stay: tokens and sequence numbers never come back.
        """
        ...

    async def configure(self, queue: str, settings: QueueSettings) -> None: ...

    async def settings(self, queue: str) -> QueueSettings: ...

    async def check(self, queue: str, *, repair: bool = False) -> Checked:
        """Compare every record with every index: records no index points to, index entries without a record."""
        ...

    # Usage

    async def usage(self, queue: str) -> list[Usage]:
        """What was used, by queue, task, group and flow, in that order, then by key and name. Sums that nothing was
        added to for 30 days are forgotten."""
        ...

    async def reset_usage(self, queue: str) -> None:
        """Begin all sums from zero, and with them what counts against budgets. Jobs keep what they themselves used."""
        ...

    async def set_budget(self, queue: str, budget: Budget) -> None:
        """Set what may be used of ``budget.name``. What was used before counts, unless there is a period: that
        begins now."""
        ...

    async def remove_budget(self, queue: str, name: str, *, flow: str = "") -> bool:
        """Whether there was one."""
        ...

    async def budgets(self, queue: str) -> list[Budget]:
        """The queue's first, then by flow and name."""
        ...


def jobs_active(queue: str, *, active: int) -> StorageError:
    """Why a queue is not obliterated; the words are every engine's."""
    return StorageError(
        f"queue {queue!r} was not obliterated: {active} of its jobs {'is' if active == 1 else 'are'} active. "
        "Stop its workers first, or use force=True: their leases are then lost."
    )
