"""The sync faces of jobs that are claimed in a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.claimed import Claim, ClaimedJob
from penstock.leased import Signal
from penstock.loopthread import run
from penstock.sync.face import Face, as_sync
from penstock.sync.jobs import SyncJobHandle

if TYPE_CHECKING:
    from penstock.core.job import Policy
    from penstock.flow.parts import Part

__all__ = ["SyncClaim", "SyncClaimedJob"]


class SyncClaimedJob(Face[ClaimedJob]):
    """See ``ClaimedJob``."""

    __slots__ = ()

    @property
    def id(self) -> str:
        return self._target.id

    @property
    def queue(self) -> str:
        return self._target.queue

    @property
    def ref(self) -> str:
        return self._target.ref

    @property
    def task(self) -> str:
        return self._target.task

    @property
    def token(self) -> int:
        return self._target.token

    @property
    def run(self) -> int:
        return self._target.run

    @property
    def failures(self) -> int:
        return self._target.failures

    @property
    def attempts(self) -> int:
        return self._target.attempts

    @property
    def headers(self) -> Mapping[str, str]:
        return self._target.headers

    @property
    def group(self) -> str:
        return self._target.group

    @property
    def cost(self) -> int:
        return self._target.cost

    @property
    def scheduler(self) -> str:
        return self._target.scheduler

    @property
    def scheduled_for(self) -> datetime | None:
        return self._target.scheduled_for

    @property
    def enqueued_at(self) -> datetime:
        return self._target.enqueued_at

    @property
    def step(self) -> str:
        return self._target.step

    @property
    def signal(self) -> Signal | None:
        return self._target.signal

    @property
    def timed_out(self) -> bool:
        return self._target.timed_out

    @property
    def payload(self) -> Any:
        return self._target.payload

    @property
    def cancelled(self) -> bool:
        return self._target.cancelled

    @property
    def settled(self) -> bool:
        return self._target.settled

    @property
    def result(self) -> Any:
        return self._target.result

    @result.setter
    def result(self, value: Any) -> None:
        self._target.result = value

    complete = as_sync(ClaimedJob.complete)
    fail = as_sync(ClaimedJob.fail)
    release = as_sync(ClaimedJob.release)
    rate_limited = as_sync(ClaimedJob.rate_limited)
    snooze = as_sync(ClaimedJob.snooze)
    suspend = as_sync(ClaimedJob.suspend)
    wait_for_children = as_sync(ClaimedJob.wait_for_children)
    children = as_sync(ClaimedJob.children)

    def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[SyncJobHandle[Any]]:
        """See ``ClaimedJob.add_children``."""
        added = run(self._target.add_children(children, on_failure=on_failure))
        return [SyncJobHandle(handle) for handle in added]

    extend = as_sync(ClaimedJob.extend)
    progress = as_sync(ClaimedJob.progress)
    log = as_sync(ClaimedJob.log)
    use = as_sync(ClaimedJob.use)
    update_payload = as_sync(ClaimedJob.update_payload)


class SyncClaim(Face[Claim[Any]]):
    """See ``Claim``: ``with queue.sync.claim() as job``."""

    __slots__ = ()

    def __enter__(self) -> Any:
        job = run(self._target.__aenter__())
        return None if job is None else SyncClaimedJob(job)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return run(self._target.__aexit__(kind, error, trace))
