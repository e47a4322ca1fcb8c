"""Leases that are ended from outside: for an operator who knows what no deadline has told yet."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, TypeVar, Unpack

from msgspec.structs import replace

from penstock.client.events import After, EventTypes, Filter, check_after, queue_events
from penstock.client.info import JobInfo, WorkerInfo
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
from penstock.client.optionvalues import listed, whole_number
from penstock.client.search import Searching, as_state, at_most, to_the_end
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.limits import check_usage_name
from penstock.core.names import (
    check_consumer,
    check_dedup_key,
    check_id,
    check_queue,
    check_signal,
    check_task,
)
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption, JobNotFound
from penstock.storage.values import Change, Held

if TYPE_CHECKING:
    from penstock.core.event import Event
    from penstock.core.job import Job
    from penstock.storage.contract import Storage
    from penstock.storage.metrics import Minute
    from penstock.storage.values import (
        CancelAnswer,
        ChangeAnswer,
        Checked,
        Consumer,
        Counts,
        HoldAnswer,
        PromoteAnswer,
        QueueSettings,
        ReleaseAnswer,
        RemoveAnswer,
        RetryAnswer,
        SignalAnswer,
    )


EndLeaseAnswer: TypeAlias = Literal["ended", "not_active", "not_found"]


async def end_leases(storage: Storage, queue: str, ids: Sequence[str]) -> list[EndLeaseAnswer]:
    """End the leases of active jobs as if their deadlines had passed, and rescue the jobs; an answer for each id.

    Two steps, the deadline and then a sweep: a holder that renews its lease in between is met in the next round.
    """
    found = [_held(job) for job in await storage.get(queue, ids)]
    await take_back(storage, queue, [lease for lease in found if isinstance(lease, Held)])
    return ["ended" if isinstance(one, Held) else one for one in found]


async def take_back(storage: Storage, queue: str, leases: Iterable[Held]) -> None:
    """Rescue the jobs of these leases now; those that were settled or renewed under another token are left alone."""
    left = set(leases)
    while left:
        held = sorted(left)
        await storage.extend(queue, held, worker="", lease_ms=0)
        while (await storage.sweep(queue)).more:
            pass
        jobs = await storage.get(queue, [lease.id for lease in held])
        left = {lease for lease, job in zip(held, jobs, strict=True) if _held(job) == lease}


def _held(job: Job | None) -> Held | EndLeaseAnswer:
    if job is None:
        return "not_found"
    return Held(job.id, job.token) if job.state is State.ACTIVE else "not_active"


# Looking at a queue and operating it. ``Queue`` has all of this; each method is a verb of docs/verbs.md.
#
# Verbs on jobs take any number of ids and give the answers by id. Bulk verbs go on until they are
# through, in bounded steps: other clients get their turn in between.


_AT_ONCE: Final = 1000
_FURTHEST: Final = 2**53
_UNSET: Final = object()

A = TypeVar("A")


class Settings(TypedDict, total=False):
    """What is kept of a queue; ``None`` is no bound. See ``storage.values.QueueSettings``."""

    keep_completed: int | None
    keep_failed: int | None
    events_count: int | None
    events_age: Duration | None
    events_bytes: int | None
    events_hard_cap: int
    dead_letter: str | None
    dead_letter_task: str


class QueueAdmin(Searching, QueueLimits):
    """See the module. Every method raises ``StorageError`` if the store does not answer."""

    @property
    def name(self) -> str:
        return self._source.queue

    # Look

    async def get(self, id: str) -> JobInfo:
        """Return the job as it is now. Raises ``JobNotFound``."""
        info = await self.get_or_none(id)
        if info is None:
            raise JobNotFound.in_queue(self.name, id)
        return info

    async def get_or_none(self, id: str) -> JobInfo | None:
        """Return the job as it is now, or ``None`` if the id is unknown or the job is no longer kept."""
        [job] = await (await self._storage()).get(self.name, [check_id(id)])
        return None if job is None else JobInfo(self._source, job)

    async def get_many(self, ids: Sequence[str]) -> list[JobInfo | None]:
        """Return the jobs as they are now, in the order of the ids; ``None`` for an unknown id."""
        ids = [check_id(id) for id in listed("ids", ids, of="ids")]
        storage, infos = await self._storage(), list[JobInfo | None]()
        for start in range(0, len(ids), _AT_ONCE):
            jobs = await storage.get(self.name, ids[start : start + _AT_ONCE])
            infos += [None if job is None else JobInfo(self._source, job) for job in jobs]
        return infos

    async def list_jobs(
        self, state: State | str, *, limit: int | None = None, reverse: bool = False
    ) -> AsyncGenerator[JobInfo, None]:
        """Jobs of a state, in the order they will run, come due, or be forgotten: ``async for job in ...``."""
        wanted, left, cursor = as_state(state), at_most(limit), ""
        storage = await self._storage()
        while left > 0:
            at_once = min(left, 100)
            page = await storage.list_jobs(self.name, wanted, cursor=cursor, limit=at_once, reverse=reverse)
            for job in page.jobs:
                yield JobInfo(self._source, job)
            if not page.cursor:
                return
            cursor, left = page.cursor, left - len(page.jobs)

    async def counts(self) -> Counts:
        """How many jobs there are by state, whether the queue is paused, how long the next in line has waited."""
        return await (await self._storage()).counts(self.name)

    async def metrics(self, last: Duration = "24h") -> list[Minute]:
        """What happened in each of the last minutes, at most 24 hours; minutes without anything are left out."""
        last_ms = milliseconds(last, what="last")
        return await (await self._storage()).metrics(self.name, last_ms=last_ms)

    async def waiting(self) -> int:
        """How many jobs could be claimed now."""
        return (await self.counts()).waiting

    async def active(self) -> int:
        """How many jobs are leased, those of vanished workers included until they are rescued."""
        return (await self.counts()).active

    async def open(self) -> int:
        """How many jobs have not ended; 0 means drained."""
        return (await self.counts()).open

    async def workers(self) -> list[WorkerInfo]:
        """The workers of this queue, as they last described themselves."""
        return [WorkerInfo(record) for record in await (await self._storage()).workers(self.name)]

    async def logs(self, id: str, *, start: int = 0, limit: int = 1000) -> list[str]:
        """Return the lines a job logged, from number ``start`` on, as ``JobHandle.logs`` does."""
        whole_number("start", start, least=0)
        whole_number("limit", limit, least=1)
        page = await (await self._storage()).logs(self.name, check_id(id), start=start, limit=limit)
        return page.lines

    async def usage(self) -> UsageReport:
        """What the jobs of this queue said they used (``context.use(tokens=...)``), in all, by task, group and flow."""
        return usage_report(await (await self._storage()).usage(self.name))

    async def reset_usage(self) -> None:
        """Begin all sums from zero, and what counts against budgets with them."""
        await (await self._storage()).reset_usage(self.name)

    async def budgets(self) -> list[BudgetInfo]:
        """The budgets of this queue and its flows, and what of them is spent."""
        return [budget_info(budget) for budget in await (await self._storage()).budgets(self.name)]

    async def set_budget(
        self, name: str, amount: float, *, per: Duration | None = None, flow: str = ""
    ) -> None:
        """Once ``amount`` of ``name`` is used, no further job begins: until the budget is raised, or, with ``per``,
        until the next period. Jobs that are active go on, so the overshoot is at most what they use."""
        await (await self._storage()).set_budget(self.name, budget_of(name, amount, per=per, flow=flow))

    async def remove_budget(self, name: str, *, flow: str = "") -> bool:
        """Whether there was one."""
        name, flow = check_usage_name(name), check_flow(flow)
        return await (await self._storage()).remove_budget(self.name, name, flow=flow)

    # Operate on jobs

    async def cancel(self, *ids: str, rerun_only: bool = False) -> dict[str, CancelAnswer]:
        """End jobs that have not begun (``cancelled``), ask active ones to stop (``requested``).

        With ``rerun_only``, leave the jobs alone and drop the rerun that waits behind an active one
        (``rerun_cancelled``; ``no_rerun`` if none does).
        """
        storage = await self._storage()
        return await _by_id(
            ids, lambda queue, some: storage.cancel(queue, some, rerun_only=rerun_only), self.name
        )

    async def retry(self, *ids: str) -> dict[str, RetryAnswer]:
        """Have failed and cancelled jobs run again."""
        return await _by_id(ids, (await self._storage()).retry, self.name)

    async def promote(self, *ids: str) -> dict[str, PromoteAnswer]:
        """Have scheduled jobs wait for a worker from now on."""
        return await _by_id(ids, (await self._storage()).promote, self.name)

    async def remove(self, *ids: str) -> dict[str, RemoveAnswer]:
        """Delete jobs, except active ones."""
        return await _by_id(ids, (await self._storage()).remove, self.name)

    async def signal(self, id: str, name: str, data: Any = None) -> SignalAnswer:
        """Send a job a signal, with anything JSON can say.

        ``resumed``: it was suspended until this signal, and waits for a worker now. ``kept``: it was not; the
        signal is there when it asks for it. ``full``: a hundred are kept already, this one is not.
        """
        id = check_id(id)
        return await (await self._storage()).signal(
            self.name, id, check_signal(name), self._source.encode_signal(data)
        )

    async def end_leases(self, *ids: str) -> dict[str, EndLeaseAnswer]:
        """Take active jobs from whoever holds them, as if their leases had run out: they wait again at their old
        place, a stall is counted, and the holder is fenced off. For workers that are known to be gone, or to hang."""
        storage = await self._storage()
        return await _by_id(ids, lambda queue, some: end_leases(storage, queue, some), self.name)

    async def change(
        self,
        id: str,
        *,
        payload: Any = _UNSET,
        priority: int | None = None,
        delay: Duration | None = None,
        result_ttl: Duration | None = None,
        failure_ttl: Duration | None = None,
    ) -> ChangeAnswer:
        """Change one job, all of it or nothing. The payload is that of the queue's serde.

        The answer is ``wrong_state`` if any part cannot change now, such as the priority of an active job.
        The ttls work on finished jobs, too: what is kept, and for how long its id is taken, moves along.
        """
        change = Change(
            payload=None if payload is _UNSET else self._source.encode_payload(payload),
            priority=None if priority is None else whole_number("priority", priority, least=-(2**31) + 1),
            delay_ms=None if delay is None else milliseconds(delay),
            result_ttl_ms=None if result_ttl is None else milliseconds(result_ttl, what="result_ttl"),
            failure_ttl_ms=None if failure_ttl is None else milliseconds(failure_ttl, what="failure_ttl"),
        )
        return await (await self._storage()).change(self.name, check_id(id), change)

    async def dedup(self, key: str) -> str | None:
        """The id of the job that stands for a dedup key; ``None``: the next one under it goes in."""
        return await (await self._storage()).dedup_of(self.name, check_dedup_key(key))

    async def clear_dedup(self, key: str) -> bool:
        """Let the next job under a dedup key in, whatever the earlier one does; false if there was none."""
        return await (await self._storage()).clear_dedup(self.name, check_dedup_key(key))

    # Hold finished jobs

    async def hold(self, consumer: str, *ids: str, ttl: Duration = "7d") -> dict[str, HoldAnswer]:
        """Keep jobs for a consumer, once they have ended: until it releases them, or for ``ttl`` after their end."""
        storage, consumer = await self._storage(), check_consumer(consumer)
        ttl_ms = max(milliseconds(ttl, what="ttl"), 1)
        return await _by_id(
            ids, lambda queue, some: storage.hold(queue, consumer, some, ttl_ms=ttl_ms), self.name
        )

    async def release(self, consumer: str, *ids: str) -> dict[str, ReleaseAnswer]:
        """The consumer needs these jobs no longer: ordinary retention applies."""
        storage, consumer = await self._storage(), check_consumer(consumer)
        return await _by_id(ids, lambda queue, some: storage.release(queue, consumer, some), self.name)

    async def held(self, consumer: str, *, limit: int | None = None) -> AsyncGenerator[JobInfo, None]:
        """Finished jobs that are held for a consumer, in the order they ended: ``async for job in ...``.

        Those already given may be released meanwhile.
        """
        consumer, left, cursor = check_consumer(consumer), at_most(limit), ""
        storage = await self._storage()
        while left > 0:
            page = await storage.held(self.name, consumer, cursor=cursor, limit=min(left, _AT_ONCE))
            for job in page.jobs:
                yield JobInfo(self._source, job)
            if not page.cursor:
                return
            cursor, left = page.cursor, left - len(page.jobs)

    # Operate on the queue

    async def drain(self, *, scheduled: bool = False) -> int:
        """Remove all jobs that wait for a worker or for room in their group, and the scheduled ones if asked.

        Return how many there were. Jobs that wait for other jobs or for a signal stay.
        """
        storage = await self._storage()
        return await to_the_end(
            lambda cursor, most: storage.drain(self.name, scheduled=scheduled, limit=most, cursor=cursor)
        )

    async def clean(self, state: State | str, *, older_than: Duration = 0, limit: int | None = None) -> int:
        """Remove jobs of a terminal state that ended at least so long ago, at most ``limit``, but none that is held;
        how many there were."""
        storage, wanted = await self._storage(), as_state(state)
        older_than_ms = milliseconds(older_than, what="older_than")
        if wanted not in TERMINAL:
            raise InvalidOption(
                f"state={shown(state)} is not a final state. Give {', '.join(sorted(TERMINAL))}."
            )
        return await to_the_end(
            lambda cursor, most: storage.clean(
                self.name, wanted, older_than_ms=older_than_ms, limit=most, cursor=cursor
            ),
            limit=limit,
        )

    async def obliterate(self, *, force: bool = False) -> int:
        """Remove all jobs. Refused with ``StorageError`` while some are active, unless forced."""
        return await (await self._storage()).obliterate(self.name, force=force)

    async def settings(self) -> QueueSettings:
        """What is kept, and how much."""
        return await (await self._storage()).settings(self.name)

    async def configure(self, **changes: Unpack[Settings]) -> QueueSettings:
        """Change some settings, leave the others; gives what holds now. Of two at a time, the later one wins."""
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
                whole_number(name, value, least=0, most=_FURTHEST)
        storage = await self._storage()
        settings = replace(await storage.settings(self.name), **fields)
        await storage.configure(self.name, settings)
        return settings

    async def check(self, *, repair: bool = False) -> Checked:
        """Compare every record with every index, and mend what does not agree if asked. Slow, and exact."""
        return await (await self._storage()).check(self.name, repair=repair)

    # The event log

    def events(
        self,
        *,
        after: After = 0,
        follow: bool = True,
        types: EventTypes = None,
        id: str | None = None,
    ) -> AsyncGenerator[Event, None]:
        """The events after a sequence number (``None``: after the newest; ``"earliest"``: all that are kept), then
        those to come, without end. ``types`` and ``id`` leave others out.

        ``follow=False`` stops at the newest. Raises ``EventsLost`` if some are no longer kept.
        """
        wanted = Filter.of(types, id)
        return queue_events(
            self._source.app, self.name, after=check_after(after), follow=follow, wanted=wanted
        )

    async def hold_events(self, consumer: str, *, offset: int, ttl: Duration = "7d") -> None:
        """Keep the events after ``offset`` for a reader of that name until it moves on, or for ``ttl``."""
        consumer, offset = check_consumer(consumer), whole_number("offset", offset, least=0, most=_FURTHEST)
        await (await self._storage()).hold_events(
            self.name, consumer, offset=offset, ttl_ms=milliseconds(ttl, what="ttl")
        )

    async def release_events(self, consumer: str) -> None:
        """Nothing is kept for that reader any more."""
        await (await self._storage()).release_events(self.name, check_consumer(consumer))

    async def consumers(self) -> list[Consumer]:
        """The readers that events are kept for."""
        return await (await self._storage()).consumers(self.name)


def _dead_letter(queue: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the dead letter among ``fields``, checked."""
    found: dict[str, Any] = {}
    if fields.get("dead_letter") is not None:
        found["dead_letter"] = check_queue(fields["dead_letter"])
    if "dead_letter_task" in fields:
        task = fields["dead_letter_task"]
        found["dead_letter_task"] = "" if isinstance(task, str) and not task else check_task(task)
        found["dead_letter_options"] = ""  # They are of the task that was there before.
    if found.get("dead_letter") == queue:
        raise InvalidOption(
            f"dead_letter={shown(queue)} is the queue itself: a letter that failed would write another, without end. "
            "Give another queue."
        )
    return found


async def _by_id(
    ids: Sequence[str], verb: Callable[[str, Sequence[str]], Awaitable[Sequence[A]]], queue: str
) -> dict[str, A]:
    answers: dict[str, Any] = {}
    ids = [check_id(id) for id in ids]
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        answers.update(zip(some, await verb(queue, some), strict=True))
    return answers
