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
from penstock.storage.base import Storage
from penstock.storage.values import Claimed, Held, Settled, SettledBatch, Settlement, Take
from penstock.worker import recovery
from penstock.worker.run import Run
from penstock.worker.slots import Lane, Limits, apportion

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

    ``settled(runs, answers)`` is called for the outcomes the store has answered, ``dried(lane)`` when a lane
    turns dry, ``failed(lane, error)`` and ``recovered(lane)`` around a time without the store, ``ended()`` after
    every call. An error that one of them raises is logged and changes nothing.
    """

    def __init__(
        self,
        storage: Storage,
        lanes: Sequence[Lane],
        *,
        worker_id: str,
        lease_ms: int,
        concurrency: int,
        limits: Limits | None = None,
        settled: Callable[[Sequence[Run], Sequence[Settled]], None],
        started: Callable[[Sequence[Run]], None],
        dried: Callable[[Lane], None],
        failed: Callable[[Lane, BaseException], None],
        recovered: Callable[[Lane], None],
        ended: Callable[[], None],
    ) -> None:
        self._storage = storage
        self.lanes = tuple(lanes)
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._concurrency = concurrency
        self._most_per_take = (concurrency + 1) // 2
        self.limits = limits
        if limits is not None:
            limits.room_again = lambda: self._wake(*self.lanes)
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
        for lane in self.lanes:
            self._stop_waiting(lane)

    def finished(self, run: Run) -> None:
        """A run has its outcome."""
        run.lane.outcomes.append(run)
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
        run.lane.held.pop(run.lease.token, None)

    @property
    def free(self) -> int:
        """Slots without a run, and without a claim under way for them."""
        return self._concurrency - len(self.executor.running) - self._reserved

    @property
    def idle(self) -> bool:
        """Nothing is held and nothing is under way."""
        return not any(lane.held or lane.outcomes or lane.in_flight for lane in self.lanes)

    async def close(self) -> None:
        """Give up what is under way."""
        self._closed = True
        self.stop_claiming()
        tasks = [*self._calls, *(lane.recovering for lane in self.lanes if lane.recovering)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Sending

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self._closed:
            return
        grants = self._grants()
        for lane in self.lanes:
            if lane.recovering is None and lane.in_flight < _MOST_IN_FLIGHT:
                self._send_for(lane, grants.get(lane, 0))
        if self.limits is not None:
            self.limits.tend()
        if self.claiming:
            self._tend_waiters_soon()

    def _grants(self) -> dict[Lane, int]:
        """The free slots, shared among the lanes that may have jobs; if none has, among all that settle."""
        free = self.free if self.limits is None else min(self.free, self.limits.whole())
        if free <= 0 or not self.claiming:
            return {}
        if len(self.lanes) == 1:
            grants = {self.lanes[0]: free}
        else:
            now = time.monotonic()
            ready = [lane for lane in self.lanes if self._may_have_jobs(lane, now)]
            grants = apportion(free, ready or [lane for lane in self.lanes if lane.outcomes])
        return grants if self.limits is None else self.limits.capped(grants)

    def _may_have_jobs(self, lane: Lane, now: float) -> bool:
        if lane.recovering is not None or self._free_for(lane) <= 0:
            return False
        return not lane.dry or (lane.waiter is None and now - lane.dried_at >= _PROBE_AFTER_S)

    def _send_for(self, lane: Lane, granted: int) -> None:
        while lane.in_flight < _MOST_IN_FLIGHT:
            runs = lane.outcomes[: self._most_per_take]
            count = min(granted, self._most_per_take)
            # With outcomes to settle asking costs little, but a lone caller would wait for the needless answer, too.
            wanted = count if (runs and not lane.trickling) or self._should_ask(lane) else 0
            enough = self._most_per_take if lane.in_flight else 1
            if len(runs) < enough and wanted < enough:
                return
            del lane.outcomes[: len(runs)]
            granted -= wanted
            self._send(lane, runs, wanted)

    def _free_for(self, lane: Lane) -> int:
        """Free slots, as far as the worker's limits let them be filled from this lane."""
        return self.free if self.limits is None else min(self.free, self.limits.room(lane.name))

    def _reserve(self, lane: Lane, count: int) -> None:
        """Slots, and room in the limits, for a claim that is sent; given back by a negative count."""
        self._reserved += count
        if self.limits is not None:
            self.limits.reserve(lane.name, count)

    def _should_ask(self, lane: Lane) -> bool:
        if lane.in_flight and not lane.flowing:
            return False  # the answer that is under way will tell whether there is more
        return not lane.dry or (len(self.lanes) > 1 and self._may_have_jobs(lane, time.monotonic()))

    def _send(self, lane: Lane, runs: list[Run], count: int) -> None:
        self._reserve(lane, count)
        self._begin(lane, self._call(lane, runs, count), places=1)

    def _begin(self, lane: Lane, call: Coroutine[Any, Any, None], *, places: int) -> None:
        """Start a call that takes up so many of the lane's places for calls. It must end by ``_ended``."""
        lane.in_flight += places
        self._calls.add(task := self._spawn(call))
        task.add_done_callback(self._calls.discard)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In our own context: what is started from there must not see the variables of a handler that finished."""
        return self._loop.create_task(call, context=self._context.copy())

    async def _call(self, lane: Lane, runs: list[Run], count: int) -> None:
        sent_at = lane.ask()
        try:
            self._take_answer(lane, runs, count, await self._ask(lane, runs, count), sent_at)
        except BaseException as error:
            self._lost_call(lane, runs, error)
        finally:
            self._reserve(lane, -count)
            self._ended(lane, places=1, asked=sent_at)

    def _ended(self, lane: Lane, *, places: int = 0, asked: float | None = None) -> None:
        """A call is over, whichever way: do what was held back because of it."""
        lane.in_flight -= places
        if asked is not None:
            lane.asked.remove(asked)
        self._make_sure_soon(lane)
        self._call_ended()
        self._pump()

    async def _ask(self, lane: Lane, runs: list[Run], count: int) -> SettledBatch:
        take = Take(self._worker_id, count, self._lease_ms) if count else None
        if runs:
            settlements = [Settlement(run.lease.id, run.lease.token, run.outcome) for run in runs]  # type: ignore[arg-type]
            return await self._storage.settle(lane.name, settlements, take=take)
        assert take is not None
        return SettledBatch([], await self._storage.claim(lane.name, take))

    def _take_answer(
        self, lane: Lane, runs: list[Run], count: int, batch: SettledBatch, sent_at: float
    ) -> None:
        held = lane.held
        for run in runs:
            held.pop(run.lease.token, None)
        if batch.claimed is not None:
            self._receive(lane, batch.claimed, count, sent_at)
        elif lane.dry and not held:
            self._dried(lane)
        self._settled(runs, batch.answers)

    def _receive(self, lane: Lane, claimed: Claimed, count: int, sent_at: float) -> None:
        now = self.last_claim_at = time.monotonic()
        leases = claimed.leases
        lane.claims += len(leases)
        lane.progress += max(len(leases), 1) / lane.weight
        if leases:
            if self.hand_back_new or now - sent_at > 0.8 * self._lease_ms / 1000:
                self._hand_back(lane, [Held(lease.id, lease.token) for lease in leases], sent_at)
            else:
                self._start(lane, leases, now)
        dry = len(leases) < count
        if dry:
            lane.dried_at = now
            if claimed.wait_ms is not None and claimed.wait_ms < self.longest_wait_ms:
                lane.set_alarm(now, now + max(claimed.wait_ms, 1) / 1000, self._wake, self._context)
        turned_dry = dry and not lane.dry
        lane.dry = dry
        lane.flowing = not dry
        lane.trickling = dry and len(leases) <= 1
        if turned_dry or (dry and not leases):
            self._dried(lane)

    def _start(self, lane: Lane, leases: Sequence[Lease], now: float) -> None:
        executor = self.executor
        runs = [executor.prepare(lane, lease, now) for lease in leases]
        # All are held before the first begins: it may hog the loop, and the heartbeat must know of the others.
        for run in runs:
            lane.held[run.lease.token] = run
        self._started(runs)
        self._starting = True
        try:
            for run in runs:
                executor.start(run)
        finally:
            self._starting = False
        if self.limits is not None:
            self.limits.note(lane.name, len(runs))

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
        for lane in self.lanes:
            if self._free_for(lane) <= 0 and not lane.spare:
                # Woken now, a full worker would swallow what an idle one could have acted upon.
                self._stop_waiting(lane)
            elif lane.dry and lane.waiter is None and lane.recovering is None:
                self._begin_wait(lane)

    def _stop_waiting(self, lane: Lane) -> None:
        if lane.waiter is not None:
            lane.waiter.cancel()
            # The store may have leased jobs to it before it heard of that.
            lane.unsure = lane.unsure or lane.spare > 0
            self._end_wait(lane)
            self._make_sure_soon(lane)
        lane.drop_alarm()

    async def _wait(self, lane: Lane, count: int) -> None:
        """Sleep until there may be something; with slots to spare, come back with it."""
        began_at = lane.ask()
        try:
            if count:
                take = Take(self._worker_id, count, self._lease_ms)
                # Well within a lease: when the claim was made is not known, only when the wait for it began.
                wait_ms = min(self.longest_wait_ms, 2 * self._lease_ms // 5)
                claimed = await self._storage.claim(lane.name, take, wait_ms=wait_ms)
                self._receive(lane, claimed, count, began_at)
            else:
                await self._storage.wait(lane.name, timeout_ms=self.longest_wait_ms)
                lane.dry = False
        except BaseException as error:
            if lane.waiter is asyncio.current_task():  # else it was given up
                self._lost_call(lane, [], error)
        finally:
            if lane.waiter is asyncio.current_task():
                self._end_wait(lane)
            self._ended(lane, asked=began_at)

    def _begin_wait(self, lane: Lane) -> None:
        # Reserved slots: so it gets few, and none if others would have to go without.
        lane.spare = min(_MOST_PER_WAIT, self._free_for(lane) // (2 * len(self.lanes)))
        self._reserve(lane, lane.spare)
        lane.waiter = self._spawn(self._wait(lane, lane.spare))

    def _end_wait(self, lane: Lane) -> None:
        self._reserve(lane, -lane.spare)
        lane.spare, lane.waiter = 0, None

    def _wake(self, *lanes: Lane) -> None:
        """There may be jobs in these by now."""
        for lane in lanes:
            lane.dry = False
        self._pump()

    def _make_sure_soon(self, lane: Lane) -> None:
        """Look for leases of a claim that was given up, as soon as no call is under way whose leases are to come."""
        if lane.unsure and not lane.in_flight and lane.recovering is None and not self._closed:
            lane.unsure = False
            self._begin(lane, self._make_sure(lane), places=_MOST_IN_FLIGHT)

    async def _make_sure(self, lane: Lane) -> None:
        sent_at = lane.ask()
        try:
            await recovery.hand_back_unknown(self._storage, lane, worker_id=self._worker_id)
        except BaseException as error:
            self._lost_call(lane, [], error)
        finally:
            self._ended(lane, places=_MOST_IN_FLIGHT, asked=sent_at)

    # When the store is away

    def _lost_call(self, lane: Lane, runs: list[Run], error: BaseException) -> None:
        """The outcomes are kept: nobody else can have settled them, and a repeated settle does no harm."""
        if isinstance(error, KeyboardInterrupt | GeneratorExit) or self._closed:
            raise error
        lane.outcomes[:0] = runs
        if lane.recovering is None:
            self._failed(lane, error)
            lane.recovering = self._spawn(self._recover(lane, error))

    async def _recover(self, lane: Lane, error: BaseException) -> None:
        try:
            await recovery.until_it_answers(
                self._storage,
                lane,
                error,
                worker_id=self._worker_id,
                settled=self._settled,
                failed=self._failed,
            )
            lane.dry = False
            self._recovered(lane)
        finally:
            lane.recovering = None
            self._ended(lane)

    def _hand_back(self, lane: Lane, leases: Sequence[Held], sent_at: float) -> None:
        """We are stopping, or the answer came so late that these may be somebody else's: let the store decide."""
        lane.asked.append(sent_at)
        self._begin(lane, self._release(lane, leases, sent_at), places=1)

    async def _release(self, lane: Lane, leases: Sequence[Held], sent_at: float) -> None:
        try:
            await self._storage.settle(lane.name, recovery.releases(leases))
        except BaseException as error:
            # Not repeated here: recovery hands back what nobody knows of, or it expires.
            self._lost_call(lane, [], error)
        finally:
            self._ended(lane, places=1, asked=sent_at)


def _guarded(callback: Callable[P, None]) -> Callable[P, None]:
    """Return ``callback`` so that an error in it is logged: it must not end the call that it is told of."""

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:
            logger.exception("A worker callback failed: %r", callback)

    return guarded
