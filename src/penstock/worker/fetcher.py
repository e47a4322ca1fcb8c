"""The fetcher: keeps the slots full and settles what is done, in as few round trips as there can be.

An outcome and the claim of the next job travel together. Up to two calls per queue are under way: while the
store works on one half of the slots, Python works on the other. A lone outcome goes out at once, so that a
quiet queue answers as fast as it can; under load, outcomes gather while calls are under way.

A queue that gave less than it was asked for is *dry*: it is left alone until a wait ends. A wait with slots to
spare is a claim that waits, so that a job which comes to an idle worker needs no further round trip.

A call that is under way holds others back: outcomes gather until it ends, and leases of a claim that was given up
are looked for after it. So every call, however it ends, passes ``_ended``, which looks for what can be sent now.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec

from penstock.core.job import Lease
from penstock.core.text import get_logger
from penstock.storage.contract import Storage
from penstock.storage.values import Claimed, Held, Settled, SettledBatch, Settlement, Take
from penstock.worker import recovery
from penstock.worker.run import Run
from penstock.worker.slots import Limits, ServedQueue, apportion

if TYPE_CHECKING:
    from penstock.worker.executor import Executor


logger = get_logger("penstock.worker")

# How late a job may be found whose wake-up went to a worker that died before it could act on it.
LONGEST_WAIT_MS: Final = 1_000
_MOST_IN_FLIGHT: Final = 2
_MOST_PER_WAIT: Final = 10
# A full worker has no waiters, so a dry queue beside a busy one is asked again after this long.
_PROBE_AFTER_S: Final = 0.05
_SETTLE_FIRST_S: Final = 0.001

P = ParamSpec("P")


class Fetcher:
    """Owns the lanes. Everything here happens on the worker's loop.

    ``settled(runs, answers)`` is called for the outcomes the store has answered, ``dried(served)`` when a lane
    turns dry, ``failed(served, error)`` and ``recovered(served)`` around a time without the store, ``ended()`` after
    every call. An error that one of them raises is logged and changes nothing.
    """

    def __init__(
        self,
        storage: Storage,
        served_queues: Sequence[ServedQueue],
        *,
        worker_id: str,
        lease_ms: int,
        concurrency: int,
        limits: Limits | None = None,
        settled: Callable[[Sequence[Run], Sequence[Settled]], None],
        started: Callable[[Sequence[Run]], None],
        dried: Callable[[ServedQueue], None],
        failed: Callable[[ServedQueue, BaseException], None],
        recovered: Callable[[ServedQueue], None],
        ended: Callable[[], None],
    ) -> None:
        self._storage = storage
        self.served_queues = tuple(served_queues)
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._concurrency = concurrency
        self._most_per_take = (concurrency + 1) // 2
        self.limits = limits
        if limits is not None:
            limits.room_again = lambda: self._wake(*self.served_queues)
        self._settled = _guarded(settled)
        self._started = _guarded(started)
        self._dried = _guarded(dried)
        self._failed = _guarded(failed)
        self._recovered = _guarded(recovered)
        self._call_ended = _guarded(ended)
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._reserved = 0
        self._pump_scheduled = False
        self._tending: asyncio.TimerHandle | None = None
        self._starting = False
        self._closed = False
        self._calls: set[asyncio.Task[None]] = set()
        self.claiming = False
        self.hand_back_new = False
        self.longest_wait_ms = LONGEST_WAIT_MS
        self.last_claim_at = time.monotonic()
        self.executor: Executor

    # What others tell the fetcher

    def begin(self) -> None:
        """Start, or go on, to claim."""
        self.claiming = True
        self.pump_soon()

    def stop_claiming(self) -> None:
        """No job is claimed from now on, apart from calls under way. Outcomes are settled as before."""
        self.claiming = False
        for served in self.served_queues:
            self._stop_waiting(served)

    def finished(self, run: Run) -> None:
        """A run has its outcome."""
        run.served.outcomes.append(run)
        if not self.executor.running and not self._starting:
            self._pump()  # nobody else is about to finish: a lone job is not kept waiting
        else:
            self.pump_soon()

    def pump_soon(self) -> None:
        """Look for what can be sent, once this turn of the loop is over."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def forget(self, run: Run) -> None:
        """The lease is not ours any more: nothing is left to settle."""
        run.served.held.pop(run.lease.token, None)

    @property
    def free(self) -> int:
        """Slots without a run, and without a claim under way for them."""
        return self._concurrency - len(self.executor.running) - self._reserved

    @property
    def idle(self) -> bool:
        """Nothing is held and nothing is under way."""
        return not any(served.held or served.outcomes or served.in_flight for served in self.served_queues)

    async def close(self) -> None:
        """Give up what is under way."""
        self._closed = True
        self.stop_claiming()
        tasks = [
            *self._calls,
            *(served.recovering for served in self.served_queues if served.recovering),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Sending

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self._closed:
            return
        grants = self._grants()
        for served in self.served_queues:
            if served.recovering is None and served.in_flight < _MOST_IN_FLIGHT:
                self._send_for(served, grants.get(served, 0))
        if self.limits is not None:
            self.limits.tend()
        if self.claiming:
            self._tend_waiters_soon()

    def _grants(self) -> dict[ServedQueue, int]:
        """The free slots, shared among the lanes that may have jobs; if none has, among all that settle."""
        free = self.free if self.limits is None else min(self.free, self.limits.whole())
        if free <= 0 or not self.claiming:
            return {}
        if len(self.served_queues) == 1:
            grants = {self.served_queues[0]: free}
        else:
            now = time.monotonic()
            ready = [served for served in self.served_queues if self._may_have_jobs(served, now)]
            grants = apportion(free, ready or [served for served in self.served_queues if served.outcomes])
        return grants if self.limits is None else self.limits.capped(grants)

    def _may_have_jobs(self, served: ServedQueue, now: float) -> bool:
        if served.recovering is not None or self._free_for(served) <= 0:
            return False
        return not served.dry or (served.waiter is None and now - served.dried_at >= _PROBE_AFTER_S)

    def _send_for(self, served: ServedQueue, granted: int) -> None:
        while served.in_flight < _MOST_IN_FLIGHT:
            runs = served.outcomes[: self._most_per_take]
            count = min(granted, self._most_per_take)
            # With outcomes to settle asking costs little, but a lone caller would wait for the needless answer, too.
            wanted = count if (runs and not served.trickling) or self._should_ask(served) else 0
            enough = self._most_per_take if served.in_flight else 1
            if len(runs) < enough and wanted < enough:
                return
            del served.outcomes[: len(runs)]
            granted -= wanted
            self._send(served, runs, wanted)

    def _free_for(self, served: ServedQueue) -> int:
        """Free slots, as far as the worker's limits let them be filled from this lane."""
        return self.free if self.limits is None else min(self.free, self.limits.room(served.name))

    def _reserve(self, served: ServedQueue, count: int) -> None:
        """Slots, and room in the limits, for a claim that is sent; given back by a negative count."""
        self._reserved += count
        if self.limits is not None:
            self.limits.reserve(served.name, count)

    def _should_ask(self, served: ServedQueue) -> bool:
        if served.in_flight and not served.flowing:
            return False  # the answer that is under way will tell whether there is more
        return not served.dry or (
            len(self.served_queues) > 1 and self._may_have_jobs(served, time.monotonic())
        )

    def _send(self, served: ServedQueue, runs: list[Run], count: int) -> None:
        self._reserve(served, count)
        self._begin(served, self._call(served, runs, count), places=1)

    def _begin(self, served: ServedQueue, call: Coroutine[Any, Any, None], *, places: int) -> None:
        """Start a call that takes up so many of the lane's places for calls. It must end by ``_ended``."""
        served.in_flight += places
        self._calls.add(task := self._spawn(call))
        task.add_done_callback(self._calls.discard)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In our own context: what is started from there must not see the variables of a handler that finished."""
        return self._loop.create_task(call, context=self._context.copy())

    async def _call(self, served: ServedQueue, runs: list[Run], count: int) -> None:
        sent_at = served.ask()
        try:
            self._take_answer(served, runs, count, await self._ask(served, runs, count), sent_at)
        except BaseException as error:
            self._lost_call(served, runs, error)
        finally:
            self._reserve(served, -count)
            self._ended(served, places=1, asked=sent_at)

    def _ended(self, served: ServedQueue, *, places: int = 0, asked: float | None = None) -> None:
        """A call is over, whichever way: do what was held back because of it."""
        served.in_flight -= places
        if asked is not None:
            served.asked.remove(asked)
        self._make_sure_soon(served)
        self._call_ended()
        self._pump()

    async def _ask(self, served: ServedQueue, runs: list[Run], count: int) -> SettledBatch:
        take = Take(self._worker_id, count, self._lease_ms) if count else None
        if runs:
            settlements = [Settlement(run.lease.id, run.lease.token, run.outcome) for run in runs]  # type: ignore[arg-type]
            return await self._storage.settle(served.name, settlements, take=take)
        assert take is not None
        return SettledBatch([], await self._storage.claim(served.name, take))

    def _take_answer(
        self, served: ServedQueue, runs: list[Run], count: int, batch: SettledBatch, sent_at: float
    ) -> None:
        held = served.held
        for run in runs:
            held.pop(run.lease.token, None)
        if batch.claimed is not None:
            self._receive(served, batch.claimed, count, sent_at)
        elif served.dry and not held:
            self._dried(served)
        self._settled(runs, batch.answers)

    def _receive(self, served: ServedQueue, claimed: Claimed, count: int, sent_at: float) -> None:
        now = self.last_claim_at = time.monotonic()
        leases = claimed.leases
        served.claims += len(leases)
        served.progress += max(len(leases), 1) / served.weight
        if leases:
            if self.hand_back_new or now - sent_at > 0.8 * self._lease_ms / 1000:
                self._hand_back(served, [Held(lease.id, lease.token) for lease in leases], sent_at)
            else:
                self._start(served, leases, now)
        dry = len(leases) < count
        if dry:
            served.dried_at = now
            if claimed.wait_ms is not None and claimed.wait_ms < self.longest_wait_ms:
                served.set_alarm(now, now + max(claimed.wait_ms, 1) / 1000, self._wake, self._context)
        turned_dry = dry and not served.dry
        served.dry = dry
        served.flowing = not dry
        served.trickling = dry and len(leases) <= 1
        if turned_dry or (dry and not leases):
            self._dried(served)

    def _start(self, served: ServedQueue, leases: Sequence[Lease], now: float) -> None:
        executor = self.executor
        runs = [executor.prepare(served, lease, now) for lease in leases]
        # All are held before the first begins: it may hog the loop, and the heartbeat must know of the others.
        for run in runs:
            served.held[run.lease.token] = run
        self._started(runs)
        self._starting = True
        try:
            for run in runs:
                executor.start(run)
        finally:
            self._starting = False
        if self.limits is not None:
            self.limits.note(served.name, len(runs))

    # Waiting

    def _tend_waiters_soon(self) -> None:
        """At once if nothing runs; else let short jobs end first: whoever waits for them comes before us."""
        if not self.executor.running:
            self._tend_waiters()
        elif self._tending is None:
            self._tending = self._loop.call_later(_SETTLE_FIRST_S, self._tend_waiters, context=self._context)

    def _tend_waiters(self) -> None:
        self._tending = None
        if not self.claiming:
            return
        for served in self.served_queues:
            if self._free_for(served) <= 0 and not served.spare:
                # Woken now, a full worker would swallow what an idle one could have acted upon.
                self._stop_waiting(served)
            elif served.dry and served.waiter is None and served.recovering is None:
                self._begin_wait(served)

    def _stop_waiting(self, served: ServedQueue) -> None:
        if served.waiter is not None:
            served.waiter.cancel()
            # The store may have leased jobs to it before it heard of that.
            served.unsure = served.unsure or served.spare > 0
            self._end_wait(served)
            self._make_sure_soon(served)
        served.drop_alarm()

    async def _wait(self, served: ServedQueue, count: int) -> None:
        """Sleep until there may be something; with slots to spare, come back with it."""
        began_at = served.ask()
        try:
            if count:
                take = Take(self._worker_id, count, self._lease_ms)
                # Well within a lease: when the claim was made is not known, only when the wait for it began.
                wait_ms = min(self.longest_wait_ms, 2 * self._lease_ms // 5)
                claimed = await self._storage.claim(served.name, take, wait_ms=wait_ms)
                self._receive(served, claimed, count, began_at)
            else:
                await self._storage.wait(served.name, timeout_ms=self.longest_wait_ms)
                served.dry = False
        except BaseException as error:
            if served.waiter is asyncio.current_task():  # else it was given up
                self._lost_call(served, [], error)
        finally:
            if served.waiter is asyncio.current_task():
                self._end_wait(served)
            self._ended(served, asked=began_at)

    def _begin_wait(self, served: ServedQueue) -> None:
        # Reserved slots: so it gets few, and none if others would have to go without.
        served.spare = min(_MOST_PER_WAIT, self._free_for(served) // (2 * len(self.served_queues)))
        self._reserve(served, served.spare)
        served.waiter = self._spawn(self._wait(served, served.spare))

    def _end_wait(self, served: ServedQueue) -> None:
        self._reserve(served, -served.spare)
        served.spare, served.waiter = 0, None

    def _wake(self, *served_queues: ServedQueue) -> None:
        """There may be jobs in these by now."""
        for served in served_queues:
            served.dry = False
        self._pump()

    def _make_sure_soon(self, served: ServedQueue) -> None:
        """Look for leases of a claim that was given up, as soon as no call is under way whose leases are to come."""
        if served.unsure and not served.in_flight and served.recovering is None and not self._closed:
            served.unsure = False
            self._begin(served, self._make_sure(served), places=_MOST_IN_FLIGHT)

    async def _make_sure(self, served: ServedQueue) -> None:
        sent_at = served.ask()
        try:
            await recovery.hand_back_unknown(self._storage, served, worker_id=self._worker_id)
        except BaseException as error:
            self._lost_call(served, [], error)
        finally:
            self._ended(served, places=_MOST_IN_FLIGHT, asked=sent_at)

    # When the store is away

    def _lost_call(self, served: ServedQueue, runs: list[Run], error: BaseException) -> None:
        """The outcomes are kept: nobody else can have settled them, and a repeated settle does no harm."""
        if isinstance(error, KeyboardInterrupt | GeneratorExit) or self._closed:
            raise error
        served.outcomes[:0] = runs
        if served.recovering is None:
            self._failed(served, error)
            served.recovering = self._spawn(self._recover(served, error))

    async def _recover(self, served: ServedQueue, error: BaseException) -> None:
        try:
            await recovery.until_it_answers(
                self._storage,
                served,
                error,
                worker_id=self._worker_id,
                settled=self._settled,
                failed=self._failed,
            )
            served.dry = False
            self._recovered(served)
        finally:
            served.recovering = None
            self._ended(served)

    def _hand_back(self, served: ServedQueue, leases: Sequence[Held], sent_at: float) -> None:
        """We are stopping, or the answer came so late that these may be somebody else's: let the store decide."""
        served.asked.append(sent_at)
        self._begin(served, self._release(served, leases, sent_at), places=1)

    async def _release(self, served: ServedQueue, leases: Sequence[Held], sent_at: float) -> None:
        try:
            await self._storage.settle(served.name, recovery.releases(leases))
        except BaseException as error:
            # Not repeated here: recovery hands back what nobody knows of, or it expires.
            self._lost_call(served, [], error)
        finally:
            self._ended(served, places=1, asked=sent_at)


def _guarded(callback: Callable[P, None]) -> Callable[P, None]:
    """Return ``callback`` so that an error in it is logged: it must not end the call that it is told of."""

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:
            logger.exception("A worker callback failed: %r", callback)

    return guarded
