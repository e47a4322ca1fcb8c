"""A queue: put payloads in without a task, and take jobs out in a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack, overload

from msgspec.structs import replace

from penstock.admin import QueueAdmin
from penstock.bulk import enqueue_many
from penstock.claimed import Claim, ClaimedJob
from penstock.claiming import Claiming
from penstock.core.display import shown
from penstock.core.duration import Duration, milliseconds
from penstock.core.ids import uuid7
from penstock.core.job import NewJob, Options
from penstock.core.names import check_id, check_task, check_worker
from penstock.errors import InvalidInput, InvalidOption
from penstock.handle import JobHandle, call
from penstock.hints import Hinting
from penstock.options import PLACEMENT, TREATMENT, CallOptions, JobOptions, placed, refuse_unknown
from penstock.optionvalues import listed, whole_number
from penstock.scheduler import SchedulerInfo, When
from penstock.schedulers import QueueSchedulers
from penstock.source import Source
from penstock.task import JobSpec

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.serde import Serde
    from penstock.sync import SyncQueue

__all__ = ["Queue"]

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
        self._source = Source(
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
        from penstock.sync import SyncQueue

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
