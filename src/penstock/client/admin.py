"""Operations on a queue and its jobs, which ``Queue`` inherits. docs/verbs.md defines each of them.

Operations on jobs take any number of ids and return the answers by id. Bulk operations proceed in bounded steps, so
that other clients are served in between.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from msgspec.structs import replace

from penstock.client.events import After, EventTypes, Filter, check_after, queue_events
from penstock.client.info import JobInfo, WorkerInfo
from penstock.client.job_verbs import QueueJobVerbs
from penstock.client.limits import (
    BudgetInfo,
    QueueLimits,
    UsageReport,
    budget_info,
    budget_of,
    check_flow,
    usage_report,
)
from penstock.client.options import refuse_unknown
from penstock.client.parsers import listed, whole_number
from penstock.client.search import Searching, as_state, at_most, to_the_end
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.limits import check_usage_name
from penstock.core.names import check_consumer, check_id, check_queue, check_task
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.core.event import Event
    from penstock.core.job import Job
    from penstock.storage.metrics import Minute
    from penstock.storage.values import Checked, Consumer, Counts, JobPage, QueueSettings


_CHUNK: Final = 1000
_MAX_NUMBER: Final = 2**53


class Settings(TypedDict, total=False):
    """The retention settings of a queue; ``None`` for no limit. See ``storage.values.QueueSettings``."""

    keep_completed: int | None
    keep_failed: int | None
    events_count: int | None
    events_age: Duration | None
    events_bytes: int | None
    events_hard_cap: int
    dead_letter: str | None
    dead_letter_task: str


class QueueAdmin(QueueJobVerbs, Searching, QueueLimits):
    """The operations of a queue. Every method raises ``StorageError`` if the store does not answer."""

    # Inspect

    async def get(self, id: str) -> JobInfo:
        """Return the job as it is now. Raise ``JobNotFound`` if the store does not have it."""
        return await self.job(id).get()

    async def get_or_none(self, id: str) -> JobInfo | None:
        """Return the job as it is now, or ``None`` if the id is unknown or the job is no longer kept."""
        return await self.job(id).get_or_none()

    async def get_many(self, ids: Sequence[str]) -> list[JobInfo | None]:
        """Return the jobs as they are now, in the order of the ids; ``None`` for an unknown id."""
        ids = [check_id(id) for id in listed("ids", ids, of="ids")]
        storage, infos = await self._storage(), list[JobInfo | None]()
        for start in range(0, len(ids), _CHUNK):
            jobs = await storage.get(self.name, ids[start : start + _CHUNK])
            infos += [None if job is None else JobInfo(self._source, job) for job in jobs]
        return infos

    async def list_jobs(
        self, state: State | str, *, limit: int | None = None, reverse: bool = False
    ) -> AsyncGenerator[JobInfo, None]:
        """Yield the jobs of a state, in the order in which they will run, come due or be deleted."""
        checked, storage = as_state(state), await self._storage()

        async def read(cursor: str, most: int) -> JobPage:
            most = min(most, 100)
            return await storage.list_jobs(self.name, checked, cursor=cursor, limit=most, reverse=reverse)

        async for job in _jobs(read, at_most(limit)):
            yield JobInfo(self._source, job)

    async def counts(self) -> Counts:
        """Return the number of jobs by state, whether the queue is paused, and how long the next job has waited."""
        return await (await self._storage()).counts(self.name)

    async def metrics(self, last: Duration = "24h") -> list[Minute]:
        """Return what happened in each of the last minutes, at most 24 hours. Empty minutes are left out."""
        last_ms = milliseconds(last, what="last")
        return await (await self._storage()).metrics(self.name, last_ms=last_ms)

    async def waiting(self) -> int:
        """Return the number of jobs that can be claimed now."""
        return (await self.counts()).waiting

    async def active(self) -> int:
        """Return the number of leased jobs, including those of dead workers until they are rescued."""
        return (await self.counts()).active

    async def open(self) -> int:
        """Return the number of unfinished jobs; 0 means drained."""
        return (await self.counts()).open

    async def workers(self) -> list[WorkerInfo]:
        """Return the workers of this queue, as of their last heartbeats."""
        return [WorkerInfo(record) for record in await (await self._storage()).workers(self.name)]

    async def logs(self, id: str, *, start: int = 0, limit: int = 1000) -> list[str]:
        """Return the log lines of a job from number ``start``, as ``JobHandle.logs`` does."""
        return await self.job(id).logs(start=start, limit=limit)

    async def usage(self) -> UsageReport:
        """Return the usage that jobs reported (``context.use(tokens=...)``): in total, and by task, group and flow."""
        return usage_report(await (await self._storage()).usage(self.name))

    async def reset_usage(self) -> None:
        """Reset all usage to zero, including what is spent of budgets."""
        await (await self._storage()).reset_usage(self.name)

    async def budgets(self) -> list[BudgetInfo]:
        """Return the budgets of this queue and its flows, with what is spent of them."""
        return [budget_info(budget) for budget in await (await self._storage()).budgets(self.name)]

    async def set_budget(
        self, name: str, amount: float, *, per: Duration | None = None, flow: str = ""
    ) -> None:
        """Stop starting jobs once ``amount`` of ``name`` is used.

        They start again when the budget is raised or, with ``per``, in the next period. Active jobs go on, so
        the budget may be exceeded by what they use. A budget that is set again with the same ``per`` keeps its
        period and what was spent in it; another ``per`` begins now, at zero.
        """
        await (await self._storage()).set_budget(self.name, budget_of(name, amount, per=per, flow=flow))

    async def remove_budget(self, name: str, *, flow: str = "") -> bool:
        """Remove a budget, and return whether it existed."""
        name, flow = check_usage_name(name), check_flow(flow)
        return await (await self._storage()).remove_budget(self.name, name, flow=flow)

    async def held(self, consumer: str, *, limit: int | None = None) -> AsyncGenerator[JobInfo, None]:
        """Yield the finished jobs that are held for a consumer, in the order they finished.

        You may release jobs while you iterate.
        """
        storage, consumer = await self._storage(), check_consumer(consumer)

        async def read(cursor: str, most: int) -> JobPage:
            return await storage.held(self.name, consumer, cursor=cursor, limit=min(most, _CHUNK))

        async for job in _jobs(read, at_most(limit)):
            yield JobInfo(self._source, job)

    # Operate on the queue

    async def drain(self, *, scheduled: bool = False) -> int:
        """Remove all jobs that wait for a worker or for their group, and with ``scheduled`` the scheduled jobs.

        Return their number. Jobs that wait for other jobs or for a signal stay.
        """
        storage = await self._storage()
        return await to_the_end(
            lambda cursor, most: storage.drain(self.name, scheduled=scheduled, limit=most, cursor=cursor)
        )

    async def clean(self, state: State | str, *, older_than: Duration = 0, limit: int | None = None) -> int:
        """Remove up to ``limit`` jobs of a final state that finished at least ``older_than`` ago; return their number.

        Held jobs stay.
        """
        storage, checked = await self._storage(), as_state(state)
        older_than_ms = milliseconds(older_than, what="older_than")
        if checked not in TERMINAL:
            raise InvalidOption(
                f"state={shown(state)} is not a final state. Give {', '.join(sorted(TERMINAL))}."
            )
        return await to_the_end(
            lambda cursor, most: storage.clean(
                self.name, checked, older_than_ms=older_than_ms, limit=most, cursor=cursor
            ),
            limit=limit,
        )

    async def obliterate(self, *, force: bool = False) -> int:
        """Remove all jobs. Raise ``StorageError`` if jobs are active, unless ``force`` is set."""
        return await (await self._storage()).obliterate(self.name, force=force)

    async def settings(self) -> QueueSettings:
        """Return the retention settings."""
        return await (await self._storage()).settings(self.name)

    async def configure(self, **changes: Unpack[Settings]) -> QueueSettings:
        """Change these settings, and return all of them. Of two concurrent calls, the later one wins."""
        refuse_unknown(changes, Settings.__annotations__, where="a queue")
        fields: dict[str, Any] = dict(changes)
        if "events_age" in fields:
            age = fields.pop("events_age")
            fields["events_age_ms"] = None if age is None else milliseconds(age, what="events_age")
        fields |= _dead_letter(self.name, fields)
        for name, value in fields.items():
            if name.startswith("dead_letter"):
                continue
            if value is not None or name == "events_hard_cap":
                whole_number(name, value, least=0, most=_MAX_NUMBER)
        storage = await self._storage()
        settings = replace(await storage.settings(self.name), **fields)
        await storage.configure(self.name, settings)
        return settings

    async def check(self, *, repair: bool = False) -> Checked:
        """Compare every record with every index. With ``repair``, fix the differences. Slow."""
        return await (await self._storage()).check(self.name, repair=repair)

    # The event log

    def events(
        self, *, after: After = 0, follow: bool = True, types: EventTypes = None, id: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events after a sequence number, then new ones, without end.

        ``after=None`` begins after the newest event, ``"earliest"`` at the oldest that is kept. ``types`` and ``id``
        select events. ``follow=False`` stops at the newest. Raises ``EventsLost`` if some are no longer kept.
        """
        return queue_events(
            self._source.app, self.name, after=check_after(after), follow=follow, wanted=Filter.of(types, id)
        )

    async def hold_events(self, consumer: str, *, offset: int, ttl: Duration = "7d") -> None:
        """Keep the events after ``offset`` for a named reader until it moves on, at most for ``ttl``."""
        consumer, offset = check_consumer(consumer), whole_number("offset", offset, least=0, most=_MAX_NUMBER)
        await (await self._storage()).hold_events(
            self.name, consumer, offset=offset, ttl_ms=milliseconds(ttl, what="ttl")
        )

    async def release_events(self, consumer: str) -> None:
        """Keep no more events for a reader."""
        await (await self._storage()).release_events(self.name, check_consumer(consumer))

    async def consumers(self) -> list[Consumer]:
        """Return the readers that events are kept for."""
        return await (await self._storage()).consumers(self.name)


async def _jobs(read: Callable[[str, int], Awaitable[JobPage]], limit: int) -> AsyncGenerator[Job, None]:
    """Yield up to ``limit`` jobs. ``read`` returns the page at a cursor, with at most that many jobs."""
    cursor = ""
    while limit > 0:
        page = await read(cursor, limit)
        for job in page.jobs:
            yield job
        cursor, limit = page.cursor, limit - len(page.jobs)
        if not cursor:
            return


def _dead_letter(queue: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked fields about dead letters."""
    checked: dict[str, Any] = {}
    if fields.get("dead_letter") is not None:
        checked["dead_letter"] = check_queue(fields["dead_letter"])
    if "dead_letter_task" in fields:
        task = fields["dead_letter_task"]
        checked["dead_letter_task"] = "" if isinstance(task, str) and not task else check_task(task)
        checked["dead_letter_options"] = ""  # They belong to the old task.
    if checked.get("dead_letter") == queue:
        raise InvalidOption(
            f"dead_letter must be another queue, got {shown(queue)} itself: a failed dead letter would add another, "
            "without end."
        )
    return checked
