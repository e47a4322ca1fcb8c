"""The verbs on jobs, of a handle (``JobVerbs``) and of a queue, which takes ids (``QueueJobVerbs``).

docs/verbs.md defines each of them. Those of a queue take any number of ids, and return the answers by id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Never, TypeAlias, TypeVar

from penstock.client.hints import refuse_keywords
from penstock.client.parsers import whole_number
from penstock.core.lifecycle import (
    CancelAnswer,
    ChangeAnswer,
    HoldAnswer,
    PromoteAnswer,
    ReleaseAnswer,
    RemoveAnswer,
    RetryAnswer,
    SignalAnswer,
    State,
)
from penstock.core.names import check_consumer, check_dedup_key, check_id, check_signal
from penstock.core.units import Duration, milliseconds
from penstock.storage.values import Change, Held

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.client.handle import JobHandle
    from penstock.core.job import Job
    from penstock.storage.contract import Storage

A = TypeVar("A")

_CHUNK: Final = 1000
_UNSET: Final = object()
_STOPS: Final = "A running coroutine function is stopped; a plain function must check context.cancelled."
_CANCEL_HINTS: Final = {"terminate": _STOPS, "signal": _STOPS}


class JobVerbs:
    """The verbs on one job, which ``JobHandle`` inherits."""

    __slots__ = ()

    if TYPE_CHECKING:
        id: str
        _source: JobCodec

    async def cancel(self, /, *, rerun_only: bool = False, **other: Never) -> CancelAnswer:
        """Cancel the job if it has not started (``cancelled``), or ask it to stop (``requested``).

        With ``rerun_only``, only drop the rerun that waits behind the job (``rerun_cancelled``).
        """
        refuse_keywords(other, _CANCEL_HINTS, where="job.cancel()")
        storage = await self._source.app.connect()
        [answer] = await storage.cancel(self._source.queue, [self.id], rerun_only=rerun_only)
        return answer

    async def retry(self) -> RetryAnswer:
        """Run a failed or cancelled job again."""
        [answer] = await (await self._source.app.connect()).retry(self._source.queue, [self.id])
        return answer

    async def promote(self) -> PromoteAnswer:
        """Make a scheduled job due now."""
        [answer] = await (await self._source.app.connect()).promote(self._source.queue, [self.id])
        return answer

    async def remove(self) -> RemoveAnswer:
        """Delete the job, unless it is active."""
        [answer] = await (await self._source.app.connect()).remove(self._source.queue, [self.id])
        return answer

    async def signal(self, name: str, data: Any = None) -> SignalAnswer:
        """Send a signal to the job, with data that JSON can encode; see ``Queue.signal``."""
        storage = await self._source.app.connect()
        return await storage.signal(
            self._source.queue, self.id, check_signal(name), self._source.encode_signal(data)
        )

    async def keep_result(self, ttl: Duration) -> bool:
        """Keep the result for ``ttl`` after the job finishes; return whether the job is known."""
        change = Change(result_ttl_ms=milliseconds(ttl, what="ttl"))
        return (
            await (await self._source.app.connect()).change(self._source.queue, self.id, change) == "changed"
        )


class QueuePart:
    """A part of the methods of a queue. ``Queue`` inherits all parts."""

    _source: JobCodec

    if TYPE_CHECKING:

        def job(self, id: str) -> JobHandle[Any]: ...

    @property
    def name(self) -> str:
        return self._source.queue

    async def _storage(self) -> Storage:
        return await self._source.app.connect()


class QueueJobVerbs(QueuePart):
    """The verbs on jobs of a queue."""

    async def cancel(self, *ids: str, rerun_only: bool = False) -> dict[str, CancelAnswer]:
        """Cancel jobs that have not started (``cancelled``), and ask active jobs to stop (``requested``).

        With ``rerun_only``, only drop the rerun that waits behind an active job
        (``rerun_cancelled``; ``no_rerun`` if there is none).
        """
        storage = await self._storage()
        return await _by_id(
            ids, lambda queue, chunk: storage.cancel(queue, chunk, rerun_only=rerun_only), self.name
        )

    async def retry(self, *ids: str) -> dict[str, RetryAnswer]:
        """Run failed and cancelled jobs again."""
        return await _by_id(ids, (await self._storage()).retry, self.name)

    async def promote(self, *ids: str) -> dict[str, PromoteAnswer]:
        """Make scheduled jobs due now."""
        return await _by_id(ids, (await self._storage()).promote, self.name)

    async def remove(self, *ids: str) -> dict[str, RemoveAnswer]:
        """Delete jobs, except active ones."""
        return await _by_id(ids, (await self._storage()).remove, self.name)

    async def signal(self, id: str, name: str, data: Any = None) -> SignalAnswer:
        """Send a signal to a job, with data that JSON can encode.

        ``resumed``: the job was suspended until this signal, and waits for a worker now. ``kept``: it was not; the
        signal is kept until the job waits for it. ``full``: the job has a hundred signals, so this one is not kept.
        """
        return await self.job(id).signal(name, data)

    async def end_leases(self, *ids: str) -> dict[str, EndLeaseAnswer]:
        """Take active jobs back from their workers, as if their leases had expired.

        They wait at their old place, a stall is counted, and the old holder can no longer change them. Use it for
        workers that are dead or hang.
        """
        storage = await self._storage()
        return await _by_id(ids, lambda queue, chunk: end_leases(storage, queue, chunk), self.name)

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
        """Change one job, completely or not at all. The serde of the queue encodes the payload.

        The answer is ``wrong_state`` if any part cannot change now, such as the priority of an active job.
        The ttls of finished jobs can change, too.
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
        """Return the id of the job that has a dedup key; ``None`` if the key is free."""
        return await (await self._storage()).dedup_of(self.name, check_dedup_key(key))

    async def clear_dedup(self, key: str) -> bool:
        """Free a dedup key, so that the next job is enqueued. Return whether the key was taken."""
        return await (await self._storage()).clear_dedup(self.name, check_dedup_key(key))

    async def hold(self, consumer: str, *ids: str, ttl: Duration = "7d") -> dict[str, HoldAnswer]:
        """Keep finished jobs for a consumer until it releases them, at most for ``ttl`` after they finish."""
        storage, consumer = await self._storage(), check_consumer(consumer)
        ttl_ms = max(milliseconds(ttl, what="ttl"), 1)
        return await _by_id(
            ids, lambda queue, chunk: storage.hold(queue, consumer, chunk, ttl_ms=ttl_ms), self.name
        )

    async def release(self, consumer: str, *ids: str) -> dict[str, ReleaseAnswer]:
        """Release jobs that a consumer held; normal retention applies again."""
        storage, consumer = await self._storage(), check_consumer(consumer)
        return await _by_id(ids, lambda queue, chunk: storage.release(queue, consumer, chunk), self.name)


async def _by_id(
    ids: Sequence[str], verb: Callable[[str, Sequence[str]], Awaitable[Sequence[A]]], queue: str
) -> dict[str, A]:
    answers: dict[str, Any] = {}
    ids = [check_id(id) for id in ids]
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        answers.update(zip(chunk, await verb(queue, chunk), strict=True))
    return answers


EndLeaseAnswer: TypeAlias = Literal["ended", "not_active", "not_found"]


async def end_leases(storage: Storage, queue: str, ids: Sequence[str]) -> list[EndLeaseAnswer]:
    """End the leases of active jobs, as if they had expired, and rescue the jobs. Return an answer for each id."""
    leases = [_held(job) for job in await storage.get(queue, ids)]
    await take_back(storage, queue, [lease for lease in leases if isinstance(lease, Held)])
    return ["ended" if isinstance(lease, Held) else lease for lease in leases]


async def take_back(storage: Storage, queue: str, leases: Iterable[Held]) -> None:
    """Rescue the jobs of these leases now, except those that were settled or claimed again."""
    left = set(leases)
    while left:  # A holder may extend its lease between the two calls.
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
