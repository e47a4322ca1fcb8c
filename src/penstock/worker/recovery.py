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
from penstock.storage.base import Storage
from penstock.storage.values import Held, Settled, Settlement
from penstock.worker.run import Run
from penstock.worker.slots import Lane

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
    lane: Lane,
    error: BaseException,
    *,
    worker_id: str,
    settled: Callable[[Sequence[Run], Sequence[Settled]], None],
    failed: Callable[[Lane, BaseException], None],
) -> None:
    """Ask until the store answers; then hand back leases whose claim's answer was lost on the way.

    ``error`` is what began it: one that is not the store's own is about an outcome, and they are settled apart.
    """
    if time.monotonic() - lane.recovered_at > _RELAPSE_S:
        lane.backoff_s = _FIRST_BACKOFF_S
    while True:
        await asyncio.sleep(lane.backoff_s)
        if lane.in_flight:
            continue
        lane.backoff_s = min(lane.backoff_s * 2, _LONGEST_BACKOFF_S)
        try:
            await hand_back_unknown(storage, lane, worker_id=worker_id)
            if not isinstance(error, StorageError):
                await settle_one_by_one(storage, lane, settled=settled)
            lane.recovered_at = time.monotonic()
            return
        except Exception as again:
            failed(lane, again)


async def hand_back_unknown(storage: Storage, lane: Lane, *, worker_id: str) -> None:
    """Release the leases that the store made for us in a claim whose answer never came.

    To be called while no claim is under way: its leases would look unknown, too.
    """
    held = await storage.leases_of(lane.name, worker_id)
    unknown = [lease for lease in held if lease.token not in lane.held]
    if unknown:
        await storage.settle(lane.name, releases(unknown))


async def settle_one_by_one(
    storage: Storage, lane: Lane, *, settled: Callable[[Sequence[Run], Sequence[Settled]], None]
) -> None:
    """Settle the lane's outcomes apart: one that no store can take must not keep the others from it.

    Raises ``StorageError`` if the store is away again; what is not settled then stays in the lane.
    """
    while lane.outcomes:
        run = lane.outcomes[0]
        assert run.outcome is not None
        answers = await _settle_alone(storage, lane, run)
        lane.outcomes.remove(run)
        lane.held.pop(run.lease.token, None)
        if answers:
            settled([run], answers)


async def _settle_alone(storage: Storage, lane: Lane, run: Run) -> list[Settled]:
    """Settle one run. If no store can take its outcome, settle it as failed, for another run would end the same way."""
    for _ in range(2):
        assert run.outcome is not None
        try:
            settlement = Settlement(run.lease.id, run.lease.token, run.outcome)
            return (await storage.settle(lane.name, [settlement])).answers
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
