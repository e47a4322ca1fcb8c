"""Get over a time without the store: connect patiently at the start, and put right what lost answers left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.core.outcome import Release
from penstock.core.text import get_logger
from penstock.core.verdict import final_failure
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
# A store that fails again so soon has not recovered: one that can be read, and not written, answers in
# between.
_RELAPSE_S: Final = 2.0
# As long as any call insists. A file is there or it is not, and SQLite itself waits for locks.
_START_PATIENCE_S: Final = 30.0
_LONGEST_START_PAUSE_S: Final = 1.0


async def connected(app: App, *, stopped: Callable[[], bool]) -> Storage:
    """Open the app's storage. While the store is away, loads its data or fails over, try again for 30 s.

    Raises ``StorageUnavailable`` after that, or as soon as ``stopped`` returns true, and other errors at once.
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
    """Ask until the store answers; then hand back leases whose claim's answer was lost on the way.

    ``error`` is what began it: one that is not the store's own is about an outcome, and they are settled apart.
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
    """Release the leases that the store made for us in a claim whose answer never came.

    To be called while no claim is under way: its leases would look unknown, too.
    """
    held = await storage.leases_of(served.name, worker_id)
    unknown = [lease for lease in held if lease.token not in served.held]
    if unknown:
        await storage.settle(served.name, releases(unknown))


async def settle_one_by_one(
    storage: Storage,
    served: ServedQueue,
    *,
    settled: Callable[[Sequence[Run], Sequence[Settled]], None],
) -> None:
    """Settle the lane's outcomes apart: one that no store can take must not keep the others from it.

    Raises ``StorageError`` if the store is away again; what is not settled then stays in the lane.
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
    """Settle one run. If no store can take its outcome, settle it as failed, for another run would end the same way."""
    for _ in range(2):
        assert run.outcome is not None
        try:
            settlement = Settlement(run.lease.id, run.lease.token, run.outcome)
            return (await storage.settle(served.name, [settlement])).answers
        except StorageError:
            raise
        except Exception as error:
            logger.exception("The outcome of job %r cannot be stored", run.lease.id)
            run.outcome, run.error = final_failure(error), error
    logger.error("Job %r cannot be settled; its lease will expire", run.lease.id)
    return []


def releases(leases: Sequence[Held]) -> list[Settlement]:
    """Settlements that hand these back."""
    return [Settlement(lease.id, lease.token, Release()) for lease in leases]
