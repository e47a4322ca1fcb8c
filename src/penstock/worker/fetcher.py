"""The fetcher keeps the slots full and settles outcomes, in as few round trips as possible.

An outcome and the claim of the next job travel together. Up to two calls per queue are in flight: while the store
works on one half of the slots, Python works on the other. A single outcome is sent immediately, so that a quiet queue
answers fast; under load, outcomes gather while calls are in flight.

A queue that returned less than requested is *dry*: the fetcher claims nothing from it until a wait ends. If slots are
free, the wait is a blocking claim, so that a job for an idle worker needs no further round trip.

Some calls must wait until a call in flight has ended: outcomes gather meanwhile, and the leases of an abandoned claim
are recovered only then. So every call, however it ends, calls ``_ended``, which sends what can be sent by then.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.core.job import Lease
from penstock.storage.contract import Storage
from penstock.storage.values import Claimed, Held, SettledBatch, Settlement, Take
from penstock.worker import recovery
from penstock.worker.events import guarded
from penstock.worker.run import Run
from penstock.worker.slots import Limits, Reservation, ServedQueue, apportion

if TYPE_CHECKING:
    from penstock.worker.executor import Executor
    from penstock.worker.worker import Worker


# If a worker is woken for a job and dies, the job is found this late.
LONGEST_WAIT_MS: Final = 1_000
_BURST_WAIT_MS: Final = 250
_MOST_IN_FLIGHT: Final = 2
_MOST_PER_WAIT: Final = 10
# A full worker has no waiters, so a dry queue beside a busy one is claimed from again after this long.
_PROBE_AFTER_S: Final = 0.05
_SETTLE_FIRST_S: Final = 0.001
# A call that takes longer lends its slots to other queues: the store of its queue may be out of reach.
_LATE_S: Final = 2.0


class Fetcher:
    """Claims and settles for the served queues, on the worker's loop.

    ``dried(served)`` is called when a queue turns dry, ``failed(served, error)`` and ``recovered(served)`` at the start
    and end of an outage, ``ended()`` after every call. An exception in a callback is logged and has no other effect.
    """

    def __init__(
        self,
        worker: Worker,
        storage: Storage,
        served_queues: Sequence[ServedQueue],
        *,
        dried: Callable[[ServedQueue], None],
        failed: Callable[[ServedQueue, BaseException], None],
        recovered: Callable[[ServedQueue], None],
        ended: Callable[[], None],
    ) -> None:
        options = worker.options
        self._storage = storage
        self.served_queues = tuple(served_queues)
        self._worker_id = options.id
        self._lease_ms = options.lease_ms
        self._concurrency = options.concurrency
        self._most_per_take = (options.concurrency + 1) // 2
        # None without limits, so that claims skip them.
        self.limits = Limits(options.limit, options.limits) if options.limit or options.limits else None
        if self.limits is not None:
            self.limits.on_room = lambda: self._wake(*self.served_queues)
        self._settled = guarded(worker.recorder.settled)
        self._started = guarded(worker.recorder.started)
        self._dried = guarded(dried)
        self._failed = guarded(failed)
        self._recovered = guarded(recovered)
        self._call_ended = guarded(ended)
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._reserved = 0
        self._pump_scheduled = False
        self._waiters_timer: asyncio.TimerHandle | None = None
        self._starting = False
        self._closed = False
        self._calls: set[asyncio.Task[None]] = set()
        self.claiming = False
        self.hand_back_new = False
        self.longest_wait_ms = _BURST_WAIT_MS if options.burst else LONGEST_WAIT_MS
        self.last_claim_at = time.monotonic()
        self.executor: Executor

    # Called by other parts

    def begin(self) -> None:
        """Start or resume claiming."""
        self.claiming = True
        self.pump_soon()

    def stop_claiming(self) -> None:
        """Send no more claims. Calls in flight continue, and outcomes are settled as before."""
        self.claiming = False
        for served in self.served_queues:
            self._stop_waiting(served)

    def finished(self, run: Run) -> None:
        """Settle a run that has its outcome."""
        run.served.outcomes.append(run)
        if not self.executor.running and not self._starting:
            self._pump()  # no other run can join this outcome, so do not delay it
        else:
            self.pump_soon()

    def pump_soon(self) -> None:
        """Send whatever can be sent, after this turn of the loop."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def forget(self, run: Run) -> None:
        """Drop a run whose lease is lost: it cannot be settled."""
        run.served.held.pop(run.lease.token, None)

    @property
    def free(self) -> int:
        """Return the number of slots without a run and without a pending claim."""
        return self._concurrency - len(self.executor.running) - self._reserved

    @property
    def idle(self) -> bool:
        """Return whether nothing is held and nothing in flight."""
        return not any(served.held or served.outcomes or served.in_flight for served in self.served_queues)

    async def close(self) -> None:
        """Cancel all calls."""
        self._closed = True
        self.stop_claiming()
        tasks = [*self._calls, *(served.recovering for served in self.served_queues if served.recovering)]
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
            self.limits.set_timer()
        if self.claiming:
            self._update_waiters_soon()

    def _grants(self) -> dict[ServedQueue, int]:
        """Share the free slots among the queues that may have jobs; if none, among those with outcomes to settle."""
        free = self.free if self.limits is None else min(self.free, self.limits.room_of_worker())
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
        if served.recovering is not None or served.late or self._free_for(served) <= 0:
            return False
        return not served.dry or (served.waiter is None and now - served.dried_at >= _PROBE_AFTER_S)

    def _send_for(self, served: ServedQueue, granted: int) -> None:
        while served.in_flight < _MOST_IN_FLIGHT:
            runs = served.outcomes[: self._most_per_take]
            count = min(granted, self._most_per_take)
            # Claiming along with outcomes costs little, but it would delay the answer for a single caller.
            claims = count if (runs and not served.trickling) or self._should_ask(served) else 0
            enough = self._most_per_take if served.in_flight else 1
            if len(runs) < enough and claims < enough:
                return
            del served.outcomes[: len(runs)]
            granted -= claims
            self._send(served, runs, claims)

    def _free_for(self, served: ServedQueue) -> int:
        """Return the free slots that the worker's limits allow for this queue."""
        return self.free if self.limits is None else min(self.free, self.limits.room(served.name))

    def _reserve(self, served: ServedQueue, count: int) -> None:
        """Reserve slots, and room in the limits, for a claim; a negative count frees them."""
        self._reserved += count
        if self.limits is not None:
            self.limits.reserve(served.name, count)

    def _should_ask(self, served: ServedQueue) -> bool:
        if served.in_flight and not served.flowing:
            return False  # the pending answer will show whether there is more
        return not served.dry or (
            len(self.served_queues) > 1 and self._may_have_jobs(served, time.monotonic())
        )

    def _send(self, served: ServedQueue, runs: list[Run], count: int) -> None:
        slots = Reservation(served, count, reserve=self._reserve, free=self._free_for)
        self._begin(served, self._call(served, runs, slots), places=1)

    def _begin(self, served: ServedQueue, call: Coroutine[Any, Any, None], *, places: int) -> None:
        """Start a call that occupies ``places`` of the queue's calls in flight. It must end with ``_ended``."""
        served.in_flight += places
        self._calls.add(task := self._spawn(call))
        task.add_done_callback(self._calls.discard)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task in a clean context, because it must not see the variables of a finished handler."""
        return self._loop.create_task(call, context=self._context.copy())

    async def _call(self, served: ServedQueue, runs: list[Run], slots: Reservation) -> None:
        sent_at, count = served.note_call(), slots.count
        may_lend = count > 0 and len(self.served_queues) > 1
        timer = self._loop.call_later(_LATE_S, self._lend, slots, context=self._context) if may_lend else None
        try:
            batch = await self._ask(served, runs, count)
            slots.take_back()
            self._take_answer(served, runs, count, batch, sent_at, room=slots.count)
        except BaseException as error:
            self._lost_call(served, runs, error)
        finally:
            if timer is not None:
                timer.cancel()
            slots.end()
            self._ended(served, places=1, began_at=sent_at)

    def _lend(self, slots: Reservation) -> None:
        """Let other queues use the slots of a late call."""
        slots.lend()
        self._pump()

    def _ended(self, served: ServedQueue, *, places: int = 0, began_at: float | None = None) -> None:
        """End a call, and send what had to wait for it."""
        served.in_flight -= places
        if began_at is not None:
            served.call_starts.remove(began_at)
        self._recover_abandoned_soon(served)
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
        self,
        served: ServedQueue,
        runs: list[Run],
        count: int,
        batch: SettledBatch,
        sent_at: float,
        *,
        room: int,
    ) -> None:
        held = served.held
        for run in runs:
            held.pop(run.lease.token, None)
        if batch.claimed is not None:
            self._receive(served, batch.claimed, count, sent_at, room=room)
        elif served.dry and not held:
            self._dried(served)
        self._settled(runs, batch.answers)

    def _receive(
        self, served: ServedQueue, claimed: Claimed, count: int, sent_at: float, *, room: int
    ) -> None:
        """Start up to ``room`` jobs of the answer to a claim of ``count``, and hand the others back."""
        now = self.last_claim_at = time.monotonic()
        leases = claimed.leases
        served.claims += len(leases)
        served.progress += max(len(leases), 1) / served.weight
        if leases:
            if self.hand_back_new or now - sent_at > 0.8 * self._lease_ms / 1000:
                room = 0
            if surplus := leases[room:]:
                self._hand_back(served, [Held(lease.id, lease.token) for lease in surplus], sent_at)
            if room:
                self._start(served, leases[:room], now)
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
        # Hold all runs before the first starts: it may block the loop, and the heartbeat must know the others.
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

    def _update_waiters_soon(self) -> None:
        """Begin and end waits, immediately if nothing runs; otherwise let short jobs finish first."""
        if not self.executor.running:
            self._update_waiters()
        elif self._waiters_timer is None:
            self._waiters_timer = self._loop.call_later(
                _SETTLE_FIRST_S, self._update_waiters, context=self._context
            )

    def _update_waiters(self) -> None:
        self._waiters_timer = None
        if not self.claiming:
            return
        for served in self.served_queues:
            if self._free_for(served) <= 0 and not served.spare:
                # A full worker would take a wake-up away from an idle worker.
                self._stop_waiting(served)
            elif served.dry and served.waiter is None and served.recovering is None:
                self._begin_wait(served)

    def _stop_waiting(self, served: ServedQueue) -> None:
        if served.waiter is not None:
            served.waiter.cancel()
            # The store may have leased jobs to this claim before the cancel arrived.
            served.unsure = served.unsure or served.spare > 0
            self._end_wait(served)
            self._recover_abandoned_soon(served)
        served.drop_alarm()

    async def _wait(self, served: ServedQueue, count: int) -> None:
        """Wait until there may be jobs; with ``count`` slots to spare, claim them."""
        began_at = served.note_call()
        try:
            if count:
                take = Take(self._worker_id, count, self._lease_ms)
                # Well within a lease: only the start of the wait is known, not the time of the claim.
                wait_ms = min(self.longest_wait_ms, 2 * self._lease_ms // 5)
                claimed = await self._storage.claim(served.name, take, wait_ms=wait_ms)
                self._receive(served, claimed, count, began_at, room=count)
            else:
                await self._storage.wait(served.name, timeout_ms=self.longest_wait_ms)
                served.dry = False
        except BaseException as error:
            if served.waiter is asyncio.current_task():  # otherwise it was abandoned
                self._lost_call(served, [], error)
        finally:
            if served.waiter is asyncio.current_task():
                self._end_wait(served)
            self._ended(served, began_at=began_at)

    def _begin_wait(self, served: ServedQueue) -> None:
        # A wait reserves its slots, so it gets few of them, or none if other queues need them.
        served.spare = min(_MOST_PER_WAIT, self._free_for(served) // (2 * len(self.served_queues)))
        self._reserve(served, served.spare)
        served.waiter = self._spawn(self._wait(served, served.spare))

    def _end_wait(self, served: ServedQueue) -> None:
        self._reserve(served, -served.spare)
        served.spare, served.waiter = 0, None

    def _wake(self, *served_queues: ServedQueue) -> None:
        """Claim from queues that may have jobs by now."""
        for served in served_queues:
            served.dry = False
        self._pump()

    def _recover_abandoned_soon(self, served: ServedQueue) -> None:
        """Recover the leases of an abandoned claim, as soon as no call in flight can bring leases."""
        if served.unsure and not served.in_flight and served.recovering is None and not self._closed:
            served.unsure = False
            self._begin(served, self._recover_abandoned(served), places=_MOST_IN_FLIGHT)

    async def _recover_abandoned(self, served: ServedQueue) -> None:
        sent_at = served.note_call()
        try:
            await recovery.hand_back_unknown(self._storage, served, worker_id=self._worker_id)
        except BaseException as error:
            self._lost_call(served, [], error)
        finally:
            self._ended(served, places=_MOST_IN_FLIGHT, began_at=sent_at)

    # Outages of the store

    def _lost_call(self, served: ServedQueue, runs: list[Run], error: BaseException) -> None:
        """Keep the outcomes of a failed call and start recovery. Repeating a settle is safe."""
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
        """Release leases, because the worker stops, or because their claim was answered too late."""
        served.call_starts.append(sent_at)
        self._begin(served, self._release(served, leases, sent_at), places=1)

    async def _release(self, served: ServedQueue, leases: Sequence[Held], sent_at: float) -> None:
        try:
            await self._storage.settle(served.name, recovery.releases(leases))
        except BaseException as error:
            # Not repeated here: recovery hands back unknown leases, or they expire.
            self._lost_call(served, [], error)
        finally:
            self._ended(served, places=1, began_at=sent_at)
