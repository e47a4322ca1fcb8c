"""Claiming outside any worker.

Jobs whose owner vanished come back by themselves: whoever claims also sweeps, a bounded amount, when it finds
nothing and once per lease. What schedulers have due is fired then, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack, overload

from msgspec.structs import replace

from penstock.client.admin import QueueAdmin
from penstock.client.bulk import enqueue_many
from penstock.client.claim import Claim, ClaimedJob
from penstock.client.codec import JobCodec
from penstock.client.firing import sweep
from penstock.client.handle import JobHandle, call
from penstock.client.hints import Hinting
from penstock.client.options import PLACEMENT, TREATMENT, CallOptions, JobOptions, placed, refuse_unknown
from penstock.client.optionvalues import listed, whole_number
from penstock.client.schedules import QueueSchedulers, SchedulerInfo, When
from penstock.client.task import JobSpec
from penstock.core.job import NewJob, Options
from penstock.core.names import check_id, check_task, check_worker, uuid7
from penstock.core.outcome import Release
from penstock.core.text import get_logger, shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidInput, InvalidOption, StorageError
from penstock.storage.values import Settlement, Take

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import Serde
    from penstock.client.session import Session
    from penstock.client.sync import SyncQueue
    from penstock.storage.contract import Storage
    from penstock.storage.values import Claimed


_log = get_logger(__name__)

_SWEEP_AT_ONCE: Final = 100
_LONGEST_WAIT_MS: Final = 5_000


class Claiming:
    """What a claim asks for: whose jobs, for how long, how long to wait (``None``: until there is one)."""

    __slots__ = ("lease_ms", "source", "wait_ms", "worker")

    def __init__(self, source: JobCodec, *, lease_ms: int, wait_ms: int | None, worker: str | None) -> None:
        self.source = source
        self.lease_ms = lease_ms
        self.wait_ms = wait_ms
        self.worker = worker

    async def claim(self, count: int) -> list[ClaimedJob]:
        """Up to ``count`` jobs; none if the wait is over. A caller that gives up leaves nothing leased."""
        source, session = self.source, await self.source.app.session()
        worker = self.worker or session.worker
        take = Take(worker, count, self.lease_ms)
        claimed = await self._claimed(session, take)
        return [
            ClaimedJob(source, session, lease, lease_ms=self.lease_ms, worker=worker)
            for lease in claimed.leases
        ]

    async def _claimed(self, session: Session, take: Take) -> Claimed:
        loop, storage, queue = asyncio.get_running_loop(), session.storage, self.source.queue
        deadline = None if self.wait_ms is None else loop.time() + self.wait_ms / 1000
        if session.sweep_is_due(queue, self.lease_ms):
            await sweep(storage, queue, limit=_SWEEP_AT_ONCE, enqueue_chain=session.enqueue_chain)
        claimed = await _take(storage, queue, take)
        if claimed.leases:
            return claimed
        await sweep(storage, queue, limit=_SWEEP_AT_ONCE, enqueue_chain=session.enqueue_chain)
        while not (claimed := await _take(storage, queue, take)).leases:
            due_ms = _LONGEST_WAIT_MS if claimed.wait_ms is None else max(claimed.wait_ms, 1)
            wait_ms = min(_LONGEST_WAIT_MS, self.lease_ms, due_ms)
            if deadline is not None:
                wait_ms = min(wait_ms, int((deadline - loop.time()) * 1000))
                if wait_ms <= 0:
                    break
            await storage.wait(queue, timeout_ms=wait_ms)
            if session.sweep_is_due(queue, min(self.lease_ms, _LONGEST_WAIT_MS)):
                await sweep(storage, queue, limit=_SWEEP_AT_ONCE, enqueue_chain=session.enqueue_chain)
        return claimed


async def _take(storage: Storage, queue: str, take: Take) -> Claimed:
    """A claim that a caller may be cancelled in: what it got is handed back, not leased to nobody."""
    claiming = asyncio.ensure_future(storage.claim(queue, take))
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        _keep(asyncio.create_task(_hand_back(storage, queue, claiming)))
        raise


async def _hand_back(storage: Storage, queue: str, claiming: asyncio.Future[Claimed]) -> None:
    try:
        leases = (await claiming).leases
        if leases:
            await storage.settle(queue, [Settlement(lease.id, lease.token, Release()) for lease in leases])
    except StorageError as error:
        _log.warning(
            "queue %s: jobs of a cancelled claim come back when their lease expires: %s", queue, error
        )


_kept: set[asyncio.Task[None]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    _kept.add(task)
    task.add_done_callback(_kept.discard)


# A queue: put payloads in without a task, and take jobs out in a loop of one's own.


_OPTIONS: Final = TREATMENT | PLACEMENT
_MOST_AT_ONCE: Final = 10_000


class Queue(Hinting, QueueAdmin, QueueSchedulers):
    """Made by ``app.queue(name)``; light, not tied to an event loop, and there without being created."""

    hints_for = "queue"

    def __init__(
        self,
        app: App,
        name: str,
        *,
        serde: Serde,
        result_serde: Serde,
        payload_type: Any,
        result_type: Any,
        defaults: Options,
        fields: Mapping[str, Any],
    ) -> None:
        self._source = JobCodec(
            app,
            name,
            serde=serde,
            result_serde=result_serde,
            payload_type=payload_type,
            result_type=result_type,
        )
        self._defaults = defaults
        self._fields = fields

    def __repr__(self) -> str:
        return f"<Queue {self.name}>"

    async def enqueue(self, payload: Any, *, task: str = "", **options: Unpack[JobOptions]) -> JobHandle[Any]:
        """Put one payload in. Concurrent calls travel together.

        ``task`` names the task that is to get it, in a worker that has it: then the payload is an object of its
        arguments by name. Raises ``InvalidInput`` for what cannot be stored, ``StorageError`` if the store did
        not take it.
        """
        job = self._build(payload, task, options)
        session = await self._source.app.session()
        answer = await session.enqueue(self.name, job)
        return JobHandle(self._source, answer.id, answer)

    async def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        ids: Iterable[str] | None = None,
        task: str = "",
        **options: Unpack[JobOptions],
    ) -> list[JobHandle[Any]]:
        """Put many payloads in, with the ids given beside them or generated ones; the options are for all.

        All of them are checked before the first is written. Then they go in chunks, each of which is written as
        a whole or not at all.
        """
        if "id" in options:
            raise InvalidOption("id is one job's. Give ids=[...], one for each payload.")
        treated, fields = self._parse(task, options)
        encode = self._source.encode_payload
        data = [encode(payload) for payload in listed("payloads", payloads, of="payloads")]
        names = (
            [uuid7() for _ in data] if ids is None else [check_id(id) for id in listed("ids", ids, of="ids")]
        )
        if len(names) != len(data):
            raise InvalidInput(f"there are {len(data)} payloads but {len(names)} ids. Give one for each.")
        jobs = [NewJob(id, payload, treated, **fields) for id, payload in zip(names, data, strict=True)]
        return await enqueue_many(self._source, jobs)

    async def call(self, payload: Any, *, task: str = "", **options: Unpack[CallOptions]) -> Any:
        """Enqueue one payload and wait for its result, at most for the option ``wait``.

        Raises what ``enqueue`` and ``JobHandle.result`` raise.
        """
        wait = options.pop("wait", None)
        return await call(self._source, self._build(payload, task, options), wait)

    async def schedule(
        self,
        name: str,
        payload: Any,
        *,
        task: str = "",
        options: JobOptions | None = None,
        **when: Unpack[When],
    ) -> SchedulerInfo:
        """Have jobs with this payload come again: ``app.schedule`` for payloads, with the options of ``enqueue``."""
        return await self._put_scheduler(name, self._build(payload, task, options or {}), when)

    def prepare(self, payload: Any, *, task: str = "", **options: Unpack[JobOptions]) -> JobSpec[Any]:
        """One payload that is not in yet, for flows; takes what ``enqueue`` takes."""
        return JobSpec(self._source, self._build(payload, task, options))

    def job(self, id: str) -> JobHandle[Any]:
        """A handle for a known id. Nothing is asked of the store yet."""
        return JobHandle(self._source, check_id(id))

    @overload
    def claim(
        self, *, lease: Duration = "30s", wait: None = None, worker: str | None = None
    ) -> Claim[ClaimedJob]: ...
    @overload
    def claim(
        self, *, lease: Duration = "30s", wait: Duration, worker: str | None = None
    ) -> Claim[ClaimedJob | None]: ...
    def claim(
        self, *, lease: Duration = "30s", wait: Duration | None = None, worker: str | None = None
    ) -> Any:
        """``async with queue.claim() as job``: take the next job, settle it as the block is left; see ``Claim``.

        Waits for a job; with ``wait``, at most so long, and ``job`` is ``None`` if there was none. The lease is
        extended while the block runs, so it may be short: it is how soon the job comes back if this process dies.
        """
        return Claim(self._claiming(lease, wait, worker))

    async def claim_one(
        self, *, lease: Duration = "30s", wait: Duration | None = None, worker: str | None = None
    ) -> ClaimedJob | None:
        """Take the next job, to be settled before ``lease`` is over, or extended.

        Waits for a job; with ``wait``, at most so long, and gives ``None`` if there was none.
        """
        jobs = await self._claiming(lease, wait, worker).claim(1)
        return jobs[0] if jobs else None

    async def claim_many(
        self, count: int, *, lease: Duration = "30s", wait: Duration | None = None, worker: str | None = None
    ) -> list[ClaimedJob]:
        """Take up to ``count`` jobs: as many as there are, waiting only for the first."""
        count = whole_number("count", count, least=1, most=_MOST_AT_ONCE)
        return await self._claiming(lease, wait, worker).claim(count)

    @property
    def sync(self) -> SyncQueue:
        """The same for synchronous code."""
        from penstock.client.sync import SyncQueue

        return SyncQueue(self)

    def _build(self, payload: Any, task: str, options: Mapping[str, Any]) -> NewJob:
        treated, fields = self._parse(task, options)
        id = fields.pop("id", None) or uuid7()
        return NewJob(id, self._source.encode_payload(payload), treated, **fields)

    def _parse(self, task: str, options: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
        refuse_unknown(options, _OPTIONS, where=f"queue {shown(self.name)}")
        treated = self._source.app.treatment(self._defaults, options)
        if task:
            treated = replace(treated, task=check_task(task))
        return treated, placed(self._fields, options)

    def _claiming(self, lease: Duration, wait: Duration | None, worker: str | None) -> Claiming:
        lease_ms = milliseconds(lease, what="lease")
        if lease_ms < 1:
            raise InvalidOption(
                f"lease={shown(lease)} is over at once. Give how long a vanished owner may go unnoticed."
            )
        return Claiming(
            self._source,
            lease_ms=lease_ms,
            wait_ms=None if wait is None else milliseconds(wait, what="wait"),
            worker=None if worker is None else check_worker(worker),
        )
