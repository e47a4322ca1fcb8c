"""The sweeper, the death watch and the drain watch: the duties of a worker besides running jobs.

The sweeper runs time-based maintenance and fires due schedulers. Any number may run: each call is atomic and safe to
repeat. To run one without workers: ``python -m penstock.worker.sweeper --url valkey://host``.

The death watch takes jobs back from dead worker processes without waiting for their leases. It acts only on proof
(``Storage.lives``). Together the workers check at most about four times a second: the more workers there are, the
longer each one pauses.

The drain watch notices that queues have no more open jobs: it emits ``drained``, and stops burst workers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Final

from penstock.client.firing import Fire, sweep
from penstock.client.job_verbs import take_back
from penstock.client.situation import counted, in_units
from penstock.core.flow import DependencyRecord
from penstock.core.job import Job
from penstock.core.lifecycle import OPEN, State
from penstock.core.names import check_queue
from penstock.core.text import get_logger, log_to_stderr
from penstock.core.units import Duration, describe, milliseconds
from penstock.errors import StorageError
from penstock.storage import open_storage
from penstock.storage.contract import Storage
from penstock.storage.values import Counts, Swept
from penstock.worker.recovery import Round, Rounds
from penstock.worker.slots import ServedQueue

logger = get_logger("penstock.sweeper")
_worker_logger = get_logger("penstock.worker")

_CHECK_EVERY_S: Final = 1.0
_CHECKS_PER_SECOND: Final = 4

_SOONEST_S: Final = 1.0
_SOONEST_SLOT_S: Final = 0.05
_SPREAD_S: Final = 0.02
_MOST_ROUNDS: Final = 20
_AT_ONCE: Final = 200
_CLOCKS_EVERY_S: Final = 60.0
_SKEW_MS: Final = 2_000
_LONG_WAIT_MS: Final = 5_000


class DeathWatch:
    """Watches the workers of ``queues``, by default of all queues."""

    def __init__(self, storage: Storage, queues: Sequence[str] | None = None) -> None:
        self._storage = storage
        self._queues = queues
        self._dead_without_jobs: dict[str, set[str]] = {}
        self._worker_counts: dict[str, int] = {}
        self._rounds = Rounds(self._look)

    async def run(self) -> None:
        """Watch until cancelled. After an error, try again the next time."""
        with closing(self._rounds):
            await self._keep_watching()

    async def _keep_watching(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(self._rest_s() * random.uniform(0.8, 1.2))
            try:
                await self.run_once()
                failing = False
            except StorageError as error:
                log = _worker_logger.debug if failing else _worker_logger.warning
                log("looking for dead workers failed and will be repeated: %s", error)
                failing = True
            except Exception:
                _worker_logger.exception("looking for dead workers failed and will be repeated")

    async def run_once(self) -> int:
        """Check each queue; return how many jobs were taken from dead workers.

        Raise the first failure after all other queues had their turn.
        """
        queues = await self._storage.queues() if self._queues is None else self._queues
        round = await self._rounds.run(queues)
        if round.failure is not None:
            raise round.failure
        return sum(round.answers.values())

    async def _look(self, queue: str) -> int:
        lives = await self._storage.lives(queue)
        self._worker_counts[queue] = len(lives)
        dead = {worker for worker, is_alive in lives.items() if not is_alive}
        dead_without_jobs = self._dead_without_jobs.setdefault(queue, set())
        dead_without_jobs &= dead
        return sum([await self._rescue(queue, worker) for worker in sorted(dead - dead_without_jobs)])

    async def _rescue(self, queue: str, worker: str) -> int:
        held = await self._storage.leases_of(queue, worker)
        if not held:
            # Its jobs were returned before, and a dead worker claims no more.
            self._dead_without_jobs[queue].add(worker)
            return 0
        await take_back(self._storage, queue, held)
        _worker_logger.warning(
            "queue %s: worker %s has died; %d of its jobs %s again",
            *(queue, worker, len(held), "waits" if len(held) == 1 else "wait"),
        )
        return len(held)

    def _rest_s(self) -> float:
        return _CHECK_EVERY_S * max(1.0, max(self._worker_counts.values(), default=0) / _CHECKS_PER_SECOND)


class DrainWatch:
    """Reads the store's counts when queues run dry; called on the worker's loop.

    ``drained(queue)`` is called each time a queue runs out of open jobs. ``ended(message)``, if given, is called when
    no queue has anything to wait for: it is drained, or neither time nor a worker can move its remaining jobs.
    """

    def __init__(
        self,
        storage: Storage,
        served_queues: Sequence[ServedQueue],
        *,
        drained: Callable[[str], None],
        ended: Callable[[str], None] | None,
    ) -> None:
        self._storage = storage
        self._served_queues = served_queues
        self._drained = drained
        self._ended = ended
        # By queue, the number of claims when it was last reported as drained.
        self._reported: dict[str, int] = {}
        # The same for the last long wait.
        self._waits: dict[str, int] = {}
        # By queue, a job that waits for another queue: while it does, the other jobs need no check.
        self._awaits: dict[str, str] = {}
        self._check: asyncio.Task[None] | None = None

    def dried(self, _: ServedQueue) -> None:
        """Check the queues, because one returned less than requested."""
        if self._check is None and not any(served.held for served in self._served_queues if served.dry):
            self._check = asyncio.get_running_loop().create_task(self._look())

    def close(self) -> None:
        """Cancel a check under way."""
        if self._check is not None:
            self._check.cancel()

    async def _look(self) -> None:
        try:
            states = [await self._state(served) for served in self._served_queues]
            # Check twice: during the first check a job may move to a queue that was checked before.
            if (
                all(states)
                and self._ended
                and states == [await self._state(served) for served in self._served_queues]
            ):
                self._ended("; ".join(states))
        except StorageError:
            # The fetcher notices by itself, and the next dry claim checks again.
            pass
        except Exception:
            _worker_logger.exception("checking for remaining jobs failed and will be repeated")
        finally:
            self._check = None

    async def _state(self, served: ServedQueue) -> str:
        """Return why there is nothing to wait for in this queue; empty if there is something."""
        claims = served.claims
        counts = await self._storage.counts(served.name)
        if served.held or served.claims != claims:
            return ""
        if counts.open == 0:
            if self._reported.get(served.name) != claims:
                self._reported[served.name] = claims
                self._drained(served.name)
            return f"queue {served.name!r} is drained"
        if self._ended is None:
            return ""
        if counts.paused:
            return f"queue {served.name!r} is paused with {counts.open} open jobs"
        if await self._is_over_budget(served):
            return f"queue {served.name!r} has spent its budget, with {counts.open} open jobs"
        if counts.open == counts.blocked and counts.next_ms is None and not await self._awaits_others(served):
            return (
                f"queue {served.name!r} has {counts.blocked} blocked jobs that need an action: "
                "resume a group, send a signal or retry a job"
            )
        self._note_wait(served, counts)
        return ""

    def _note_wait(self, served: ServedQueue, counts: Counts) -> None:
        """Log, once until the next claim, that nothing is due for a while."""
        wait_ms = 0 if counts.waiting or counts.active else counts.next_ms or 0
        if wait_ms < _LONG_WAIT_MS or self._waits.get(served.name) == served.claims:
            return
        self._waits[served.name] = served.claims
        verb = "is" if counts.open == 1 else "are"
        _worker_logger.info(
            "queue %r: nothing is due for %s; this burst worker waits, because %s %s open",
            *(served.name, in_units(wait_ms), counted(counts.open, "job"), verb),
        )

    async def _is_over_budget(self, served: ServedQueue) -> bool:
        """Return whether a budget without a period is spent. A budget with a period is worth waiting for."""
        budgets = await self._storage.budgets(served.name)
        return any(not b.flow and not b.per_ms and b.spent >= b.micros for b in budgets)

    async def _awaits_others(self, served: ServedQueue) -> bool:
        """Return whether a blocked job waits for a job of another queue that may still end."""
        if id := self._awaits.pop(served.name, ""):
            [job] = await self._storage.get(served.name, [id])
            if job is not None and await self._awaits_another(served, job):
                return True
        cursor = ""
        while True:
            page = await self._storage.list_jobs(served.name, State.BLOCKED, cursor=cursor, limit=_AT_ONCE)
            for job in page.jobs:
                if await self._awaits_another(served, job):
                    return True
            cursor = page.cursor
            if not cursor:
                return False

    async def _awaits_another(self, served: ServedQueue, job: Job) -> bool:
        if job.blocked_by != "children":
            return False
        start = 0
        while edges := await self._storage.dependencies(served.name, job.id, start=start, limit=_AT_ONCE):
            for edge in edges:
                if edge.state == "pending" and edge.queue != served.name and await self._may_end(edge):
                    self._awaits[served.name] = job.id
                    return True
            start += len(edges)
        return False

    async def _may_end(self, edge: DependencyRecord) -> bool:
        """Return whether the dependency may end, apart from open jobs in this worker's queues: those are counted."""
        if edge.queue not in {served.name for served in self._served_queues}:
            return True
        [job] = await self._storage.get(edge.queue, [edge.id])
        return job is None or job.state not in OPEN


class Sweeper:
    """Sweeps ``queues``, by default all queues, at least every ``interval`` and when something is about to fall due."""

    def __init__(
        self,
        storage: Storage,
        queues: Sequence[str] | None = None,
        *,
        interval: Duration = "5s",
        fire: Fire | None = None,
    ) -> None:
        self._storage = storage
        self._queues = None if queues is None else tuple(check_queue(queue) for queue in queues)
        self._fire = fire
        self._interval_s = milliseconds(interval, what="interval") / 1000
        self._clocks_at = 0.0
        self._skewed: set[str] = set()
        # One by one, so that many queues do not share one long transaction.
        self._rounds = Rounds(self._sweep, one_by_one=True)

    async def run_once(self) -> dict[str, Swept]:
        """Sweep each queue until nothing is left to do now; return the answer of the last call for each.

        Raise the first failure after all other queues had their turn.
        """
        round = await self._round()
        if round.failure is not None:
            raise round.failure
        return round.answers

    async def _round(self) -> Round[Swept]:
        queues = await self._storage.queues() if self._queues is None else self._queues
        return await self._rounds.run(queues)

    async def run(self) -> None:
        """Sweep until cancelled. After an error, such as an unreachable store, try again in the next round."""
        with closing(self._rounds):
            await self._keep_sweeping()

    async def _keep_sweeping(self) -> None:
        # Workers that start together must not sweep together.
        await asyncio.sleep(random.random() * min(_SOONEST_S, self._interval_s))
        while True:
            rest_s = self._interval_s
            try:
                swept, failure, _ = await self._round()
                rest_s = self._sleep_s(swept)
                await self._check_clocks(swept)
                if failure is not None:
                    raise failure
            except StorageError as error:
                logger.warning("the sweep failed and will be repeated: %s", error)
            except Exception:
                logger.exception("the sweep failed and will be repeated")
            await asyncio.sleep(rest_s)

    async def _sweep(self, queue: str) -> Swept:
        swept = await sweep(self._storage, queue, fire=self._fire)
        for _ in range(_MOST_ROUNDS):
            if not swept.more:
                break
            swept = await sweep(self._storage, queue, fire=self._fire)
        return swept

    async def _check_clocks(self, queues: Iterable[str]) -> None:
        """Warn once if a queue's time differs from its store's clock, or that clock from this machine's."""
        if time.monotonic() - self._clocks_at < _CLOCKS_EVERY_S:
            return
        self._clocks_at = time.monotonic()
        for queue in queues:
            clock = await self._storage.clock(queue)
            self._log_skew(f"the time of queue {queue!r}", "the store's clock", clock.ahead_ms)
            apart_ms = clock.wall_ms - time.time_ns() // 1_000_000
            self._log_skew(f"the store's clock (queue {queue!r})", "this machine's", apart_ms)

    def _log_skew(self, what: str, other: str, ahead_ms: int) -> None:
        if abs(ahead_ms) < _SKEW_MS:
            if what in self._skewed:
                self._skewed.remove(what)
                logger.info("%s agrees with %s again", what, other)
        elif what not in self._skewed:
            self._skewed.add(what)
            side = "ahead of" if ahead_ms > 0 else "behind"
            logger.warning("%s is %s %s %s", what, describe(abs(ahead_ms)), side, other)

    def _sleep_s(self, swept: dict[str, Swept]) -> float:
        """Return a pause that differs between workers, but ends when a scheduler's slot comes."""
        rest_s = self._rest_s(swept) * random.uniform(0.8, 1.2)
        slots_s = [result.slot_wait_ms / 1000 for result in swept.values() if result.slot_wait_ms is not None]
        if any(result.awaiting for result in swept.values()):
            slots_s.append(_SOONEST_S)
        if not slots_s:
            return rest_s
        return min(rest_s, max(min(slots_s), _SOONEST_SLOT_S) + random.random() * _SPREAD_S)

    def _rest_s(self, swept: dict[str, Swept]) -> float:
        """Return the seconds until something falls due, but at least one: claims promote jobs without a sweep."""
        if any(result.more for result in swept.values()):
            return min(_SOONEST_S, self._interval_s) / 10
        due_s = [result.wait_ms / 1000 for result in swept.values() if result.wait_ms is not None]
        return min(self._interval_s, max(min(due_s, default=self._interval_s), _SOONEST_S))


async def _serve(url: str, queues: Sequence[str] | None, interval: str) -> None:
    storage = open_storage(url)
    await storage.open()
    try:
        sweeping = asyncio.ensure_future(_sweep_and_watch(storage, queues, interval))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, sweeping.cancel)
        await asyncio.wait([sweeping])
        if not sweeping.cancelled():
            sweeping.result()
    finally:
        await storage.close()


async def _sweep_and_watch(storage: Storage, queues: Sequence[str] | None, interval: str) -> None:
    sweeper, watch = Sweeper(storage, queues, interval=interval), DeathWatch(storage, queues)
    await asyncio.gather(sweeper.run(), watch.run())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a sweeper from the command line, until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m penstock.worker.sweeper", description=__doc__)
    parser.add_argument("--url", default=os.environ.get("PENSTOCK_URL"), help="the store (or PENSTOCK_URL)")
    parser.add_argument("--queue", action="append", dest="queues", help="only this queue; may be repeated")
    parser.add_argument("--interval", default="5s", help="sweep at least this often")
    options = parser.parse_args(arguments)
    if not options.url:
        parser.error("--url is missing, and PENSTOCK_URL is not set")
    log_to_stderr()
    asyncio.run(_serve(options.url, options.queues, options.interval))


if __name__ == "__main__":
    main()
