"""Recovery from outages of the store: retry the first connection, repair the effects of lost answers, and call all
queues although some do not answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from penstock.core.outcome import Release, final_failure
from penstock.core.text import get_logger
from penstock.errors import StorageError, StorageUnavailable
from penstock.storage.contract import Storage
from penstock.storage.values import Held, Settled, Settlement
from penstock.worker.run import Run
from penstock.worker.slots import ServedQueue

if TYPE_CHECKING:
    from penstock.client.app import App

logger = get_logger("penstock.worker")

_FIRST_BACKOFF_S: Final = 0.1
_LONGEST_BACKOFF_S: Final = 5.0
# A store that fails again this soon has not recovered: a read-only store answers some calls in between.
_RELAPSE_S: Final = 2.0
# As long as other calls keep trying. SQLite waits for locks itself.
_START_PATIENCE_S: Final = 30.0
_LONGEST_START_PAUSE_S: Final = 1.0


async def connected(app: App, *, stopped: Callable[[], bool]) -> Storage:
    """Open the app's storage. While the store is away, loads its data or fails over, try again for 30 s.

    Raise ``StorageUnavailable`` after that, or as soon as ``stopped`` returns true, and other errors immediately.
    """
    local = app.url.startswith(("sqlite:", "memory:"))
    deadline = time.monotonic() + (0.0 if local else _START_PATIENCE_S)
    pause_s = _FIRST_BACKOFF_S
    while True:
        try:
            return await app.connect()
        except StorageUnavailable as error:
            rest_s = deadline - time.monotonic()
            if rest_s <= 0 or stopped():
                raise
            if pause_s == _FIRST_BACKOFF_S:
                logger.warning("%s. Trying again for %.0f s", str(error).rstrip("."), rest_s)
        await asyncio.sleep(min(pause_s, rest_s))
        pause_s = min(2 * pause_s, _LONGEST_START_PAUSE_S)


async def until_it_answers(
    storage: Storage,
    served: ServedQueue,
    error: BaseException,
    *,
    worker_id: str,
    settled: Callable[[Sequence[Run], Sequence[Settled]], None],
    failed: Callable[[ServedQueue, BaseException], None],
) -> None:
    """Wait until the store answers; then hand back the leases of claims whose answers were lost.

    ``error`` is the first failure. If it is not a ``StorageError``, an outcome caused it, so outcomes are settled one
    by one.
    """
    if time.monotonic() - served.recovered_at > _RELAPSE_S:
        served.backoff_s = _FIRST_BACKOFF_S
    while True:
        await asyncio.sleep(served.backoff_s)
        if served.in_flight:
            continue
        served.backoff_s = min(served.backoff_s * 2, _LONGEST_BACKOFF_S)
        try:
            await hand_back_unknown(storage, served, worker_id=worker_id)
            if not isinstance(error, StorageError):
                await settle_one_by_one(storage, served, settled=settled)
            served.recovered_at = time.monotonic()
            return
        except Exception as again:
            failed(served, again)


async def hand_back_unknown(storage: Storage, served: ServedQueue, *, worker_id: str) -> None:
    """Release the leases of claims whose answers were lost.

    Call this while no claim is pending, because its leases would look unknown, too.
    """
    held = await storage.leases_of(served.name, worker_id)
    unknown = [lease for lease in held if lease.token not in served.held]
    if unknown:
        await storage.settle(served.name, releases(unknown))


async def settle_one_by_one(
    storage: Storage, served: ServedQueue, *, settled: Callable[[Sequence[Run], Sequence[Settled]], None]
) -> None:
    """Settle the queue's outcomes one by one, so that an outcome that no store accepts does not block the others.

    Raise ``StorageError`` if the store is away again. Then the other outcomes stay.
    """
    while served.outcomes:
        run = served.outcomes[0]
        assert run.outcome is not None
        answers = await _settle_alone(storage, served, run)
        served.outcomes.remove(run)
        served.held.pop(run.lease.token, None)
        if answers:
            settled([run], answers)


async def _settle_alone(storage: Storage, served: ServedQueue, run: Run) -> list[Settled]:
    """Settle one run. If no store accepts its outcome, settle it as failed: another run would end the same way."""
    for _ in range(2):
        assert run.outcome is not None
        try:
            settlement = Settlement(run.lease.id, run.lease.token, run.outcome)
            return (await storage.settle(served.name, [settlement])).answers
        except StorageError:
            raise
        except Exception as error:
            logger.exception("the outcome of job %r cannot be stored", run.lease.id)
            run.outcome, run.error = final_failure(error), error
    logger.error("job %r cannot be settled; its lease will expire", run.lease.id)
    return []


def releases(leases: Sequence[Held]) -> list[Settlement]:
    """Return the settlements that hand these leases back."""
    return [Settlement(lease.id, lease.token, Release()) for lease in leases]


T = TypeVar("T")

ROUND_PATIENCE_S: Final = 1.0


class Round(NamedTuple, Generic[T]):
    """The answers by queue, the first failure, and whether the answer of a queue is late."""

    answers: dict[str, T]
    failure: Exception | None
    is_late: bool


class Rounds(Generic[T]):
    """Calls every queue once per round, and waits ``patience_s`` for the answers.

    The queues of a cluster are on several servers. A call to a server that is away, or for a slot that is moving, takes
    up to 30 s. Meanwhile the leases of other queues must be renewed, and their jobs rescued.

    A late call goes on beside the next rounds, which leave its queue out. With ``one_by_one``, a call begins when the
    one before has ended or is late.
    """

    def __init__(
        self,
        call: Callable[[str], Coroutine[Any, Any, T]],
        *,
        patience_s: float = ROUND_PATIENCE_S,
        one_by_one: bool = False,
    ) -> None:
        self._call = call
        self._patience_s = patience_s
        self._one_by_one = one_by_one
        self._calls: dict[str, asyncio.Task[T]] = {}

    async def run(self, queues: Iterable[str]) -> Round[T]:
        """Run a round. Its answers include those of late calls that have ended since the round before."""
        for queue in queues:
            if queue not in self._calls:
                call = self._calls[queue] = asyncio.create_task(self._call(queue))
                call.add_done_callback(_retrieve)
                if self._one_by_one:
                    await asyncio.wait([call], timeout=self._patience_s)
        if self._calls and not self._one_by_one:
            await asyncio.wait(self._calls.values(), timeout=self._patience_s)
        return self._collect()

    def _collect(self) -> Round[T]:
        answers: dict[str, T] = {}
        failure: Exception | None = None
        for queue, call in [*self._calls.items()]:
            if not call.done():
                continue
            del self._calls[queue]
            try:
                answers[queue] = call.result()
            except Exception as error:
                failure = failure or error
        return Round(answers, failure, is_late=bool(self._calls))

    def close(self) -> None:
        """Cancel the calls under way."""
        for call in self._calls.values():
            call.cancel()


def _retrieve(call: asyncio.Task[Any]) -> None:
    """Retrieve the outcome of a call, so that asyncio does not warn about one that nobody waits for."""
    if not call.cancelled():
        call.exception()
