"""Queues: enqueue payloads without a task, and claim jobs outside a worker.

A claim also sweeps the queue, a bounded amount, once per lease and when it finds no job. That rescues the jobs of dead
owners, and fires schedules that are due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack, cast, overload

from msgspec.structs import replace

from penstock import client
from penstock.client.admin import QueueAdmin
from penstock.client.claim import Claim, ClaimedJob
from penstock.client.codec import JobCodec
from penstock.client.firing import sweep
from penstock.client.handle import JobHandle, call, enqueue_many
from penstock.client.hints import Hinting
from penstock.client.options import (
    JOB,
    TIMES,
    CallOptions,
    JobOptions,
    ScheduleOptions,
    placed,
    refuse_unknown,
)
from penstock.client.parsers import listed, whole_number
from penstock.client.schedules import (
    QueueSchedulers,
    SchedulerInfo,
    put_scheduler,
    schedule_spec,
)
from penstock.client.steps import QueueSteps
from penstock.client.task import JobSpec
from penstock.core.job import NewJob, Options
from penstock.core.names import check_id, check_scheduler, check_task, check_worker, uuid7
from penstock.core.outcome import Release
from penstock.core.schedule import When
from penstock.core.text import get_logger, shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidInput, InvalidOption, StorageError
from penstock.storage.values import Settlement, Take

if TYPE_CHECKING:
    from penstock.client.rules import Rules
    from penstock.client.session import Session
    from penstock.storage.contract import Storage
    from penstock.storage.values import Claimed


_log = get_logger(__name__)

_SWEEP_LIMIT: Final = 100
_LONGEST_WAIT_MS: Final = 5_000


class Claiming:
    """The parameters of a claim. ``wait_ms`` is the longest wait; ``None`` waits for a job without a limit."""

    __slots__ = ("lease_ms", "source", "wait_ms", "worker")

    def __init__(self, source: JobCodec, *, lease_ms: int, wait_ms: int | None, worker: str | None) -> None:
        self.source = source
        self.lease_ms = lease_ms
        self.wait_ms = wait_ms
        self.worker = worker

    async def claim(self, count: int) -> list[ClaimedJob]:
        """Claim up to ``count`` jobs; none if the wait is over. A cancelled caller leaves nothing leased."""
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
            await sweep(storage, queue, limit=_SWEEP_LIMIT, enqueue_chain=session.enqueue_chain)
        claimed = await _take(storage, queue, take)
        if claimed.leases:
            return claimed
        await sweep(storage, queue, limit=_SWEEP_LIMIT, enqueue_chain=session.enqueue_chain)
        while not (claimed := await _take(storage, queue, take)).leases:
            due_ms = _LONGEST_WAIT_MS if claimed.wait_ms is None else max(claimed.wait_ms, 1)
            wait_ms = min(_LONGEST_WAIT_MS, self.lease_ms, due_ms)
            if deadline is not None:
                wait_ms = min(wait_ms, int((deadline - loop.time()) * 1000))
                if wait_ms <= 0:
                    break
            await storage.wait(queue, timeout_ms=wait_ms)
            if session.sweep_is_due(queue, min(self.lease_ms, _LONGEST_WAIT_MS)):
                await sweep(storage, queue, limit=_SWEEP_LIMIT, enqueue_chain=session.enqueue_chain)
        return claimed


async def _take(storage: Storage, queue: str, take: Take) -> Claimed:
    """Claim jobs. If the caller is cancelled, hand them back."""
    claiming = asyncio.ensure_future(storage.claim(queue, take))
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        _keep_running(asyncio.create_task(_hand_back(storage, queue, claiming)))
        raise


async def _hand_back(storage: Storage, queue: str, claiming: asyncio.Future[Claimed]) -> None:
    try:
        leases = (await claiming).leases
        if leases:
            await storage.settle(queue, [Settlement(lease.id, lease.token, Release()) for lease in leases])
    except StorageError as error:
        _log.warning(
            "queue %s: jobs of a cancelled claim come back when their leases expire: %s", queue, error
        )


_hand_backs: set[asyncio.Task[None]] = set()


def _keep_running(task: asyncio.Task[None]) -> None:
    _hand_backs.add(task)
    task.add_done_callback(_hand_backs.discard)


_MAX_CLAIM: Final = 10_000


class Queue(Hinting, QueueAdmin, QueueSteps, QueueSchedulers):
    """A queue. ``app.queue(name)`` makes it, on any event loop; the queue itself needs no creation."""

    hints_for = "queue"

    def __init__(self, source: JobCodec) -> None:
        self._source = source

    def __repr__(self) -> str:
        return f"<Queue {self.name}>"

    async def enqueue(self, payload: Any, *, task: str = "", **options: Unpack[JobOptions]) -> JobHandle[Any]:
        """Enqueue one payload. Concurrent calls are sent together.

        ``task`` names a task that the workers have; then the payload is an object of its arguments by name.
        The job gets the options of the app and of this call, not those of ``@app.task``. If the app has the task, its
        rules apply: ``group``, ``cost``, ``priority``, ``dedup``, ``unique`` and ``deadline``. An app without the task
        does not know its rules: import the module that defines it (``app.load``), or give ``group``, ``dedup`` and so
        on here.

        Raises:
            InvalidInput: the payload or an option is not valid. Nothing was written.
            StorageError: the store did not accept the job.
        """
        job, rules = self._build(payload, task, options)
        session = await self._source.app.session()
        answer = await session.enqueue(self.name, job)
        if rules is not None:
            rules.refuse_duplicate(answer, self.name)
        return JobHandle(self._source, answer.id, answer)

    async def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        ids: Iterable[str] | None = None,
        task: str = "",
        **options: Unpack[JobOptions],
    ) -> list[JobHandle[Any]]:
        """Enqueue many payloads, with these ids or generated ones. The options apply to all.

        All jobs are checked before the first is written. Each chunk of them is then written as a whole or not at all.
        """
        if "id" in options:
            raise InvalidOption("id belongs to a single job. Give ids=[...], one for each payload.")
        policy, fields = self._parse(task, options)
        encode = self._source.encode_payload
        data = [encode(payload) for payload in listed("payloads", payloads, of="payloads")]
        names = (
            [uuid7() for _ in data] if ids is None else [check_id(id) for id in listed("ids", ids, of="ids")]
        )
        if len(names) != len(data):
            raise InvalidInput(f"there are {len(data)} payloads but {len(names)} ids. Give one for each.")
        rules = self._rules(task, options)
        each = (
            [fields] * len(data)
            if rules is None
            else [self._ruled(fields, rules, payload) for payload in data]
        )
        return await enqueue_many(
            self._source,
            [NewJob(id, payload, policy, **own) for id, payload, own in zip(names, data, each, strict=True)],
        )

    async def call(self, payload: Any, *, task: str = "", **options: Unpack[CallOptions]) -> Any:
        """Enqueue one payload and wait for its result: for ``wait``, by default as long as the app says (30 s).

        Raises what ``enqueue`` and ``JobHandle.result`` raise.
        """
        wait = options.pop("wait", self._source.app.wait)
        job, rules = self._build(payload, task, options)
        return await call(self._source, job, wait, None if rules is None else rules.refuse_duplicate)

    async def schedule(
        self,
        name: str,
        payload: Any,
        *,
        task: str = "",
        options: JobOptions | None = None,
        **given: Unpack[ScheduleOptions],
    ) -> SchedulerInfo:
        """Enqueue this payload on a schedule. See ``app.schedule``.

        Takes the options of ``enqueue`` besides the times. They may also be in ``options``.
        """
        when = cast(When, {option: value for option, value in given.items() if option in TIMES})
        own = {option: value for option, value in given.items() if option not in TIMES}
        together = cast(JobOptions, {**(options or {}), **own})
        spec = schedule_spec(when, self.prepare(payload, task=task, **together))
        storage = await self._source.app.connect()
        return await put_scheduler(storage, self.name, check_scheduler(name), spec)

    def prepare(self, payload: Any, *, task: str = "", **options: Unpack[JobOptions]) -> JobSpec[Any]:
        """Make one job for a flow, without enqueueing it. Takes the arguments of ``enqueue``."""
        job, rules = self._build(payload, task, options)
        return JobSpec(self._source, job, given=options, rules=rules)

    def job(self, id: str) -> JobHandle[Any]:
        """Return a handle for a known id, without a request to the store."""
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
        """Claim the next job with ``async with queue.claim() as job``, and settle it on exit; see ``Claim``.

        It waits for a job. ``wait`` limits the wait; then ``job`` may be ``None``. The lease is
        extended while the block runs, so it may be short: if this process dies, the job comes back after it.
        """
        return Claim(self._claiming(lease, wait, worker))

    async def claim_one(
        self, *, lease: Duration = "30s", wait: Duration | None = None, worker: str | None = None
    ) -> ClaimedJob | None:
        """Claim the next job. Settle it, or extend its lease, before ``lease`` is over.

        It waits for a job. ``wait`` limits the wait; then the result may be ``None``.
        """
        jobs = await self._claiming(lease, wait, worker).claim(1)
        return jobs[0] if jobs else None

    async def claim_many(
        self, count: int, *, lease: Duration = "30s", wait: Duration | None = None, worker: str | None = None
    ) -> list[ClaimedJob]:
        """Claim up to ``count`` jobs. It waits only for the first."""
        count = whole_number("count", count, least=1, most=_MAX_CLAIM)
        return await self._claiming(lease, wait, worker).claim(count)

    @property
    def sync(self) -> client.SyncQueue:
        """Return the same interface for synchronous code."""
        return client.SyncQueue(self)

    def _build(self, payload: Any, task: str, options: Mapping[str, Any]) -> tuple[NewJob, Rules | None]:
        """Return the job, and the rules of its task that apply to it."""
        policy, fields = self._parse(task, options)
        id = fields.pop("id", None) or uuid7()
        data = self._source.encode_payload(payload)
        rules = self._rules(task, options)
        if rules is not None:
            fields = self._ruled(fields, rules, data)
        return NewJob(id, data, policy, **fields), rules

    def _rules(self, task: str, options: Mapping[str, Any]) -> Rules | None:
        """Return the rules of a task of the app that apply beside these options."""
        if not task and "unique" not in options:
            return None
        known = self._source.app.tasks.get(task)
        if known is not None:
            return known.rules_beside(options)
        if unique := options.get("unique"):
            raise InvalidOption(
                f"unique={shown(unique)} compares the arguments of a task, and this app has no task {shown(task)}. "
                "Use dedup=... with a key of your own."
            )
        return None

    def _ruled(self, fields: Mapping[str, Any], rules: Rules, data: bytes) -> dict[str, Any]:
        return placed(fields, rules.constants | rules.options(data, self._source.serde))

    def _parse(self, task: str, options: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
        refuse_unknown(options, JOB, where=f"queue {shown(self.name)}")
        handler = None if task else self._source.app.handlers.get(self.name)
        base = self._source.app.defaults if handler is None else handler.defaults
        policy = self._source.app.with_policy(base, options)
        if task:
            policy = replace(policy, task=check_task(task))
        return policy, placed(self._source.app.fields if handler is None else handler.fields, options)

    def _claiming(self, lease: Duration, wait: Duration | None, worker: str | None) -> Claiming:
        lease_ms = milliseconds(lease, what="lease")
        if lease_ms < 1:
            raise InvalidOption(
                f"lease must be longer than 0, got {shown(lease)}. It is how soon the job comes back if its owner dies."
            )
        return Claiming(
            self._source,
            lease_ms=lease_ms,
            wait_ms=None if wait is None else milliseconds(wait, what="wait"),
            worker=None if worker is None else check_worker(worker),
        )
