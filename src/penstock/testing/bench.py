"""The bench of a harness runs jobs with the executor of workers, on a store that it wraps for the test."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, TypeVar, cast

from penstock.client.decorators import Batching
from penstock.client.session import Session
from penstock.client.waiter import ResultWait, Waiter
from penstock.core.job import EMPTY_EXTRAS, Lease
from penstock.core.outcome import Abort, Complete, Fail, chance, wall_clock
from penstock.core.units import MAX_MS
from penstock.errors import PenstockError
from penstock.storage.coalesce import Coalescer
from penstock.storage.values import Held, Settlement
from penstock.testing.drain import ManualClock
from penstock.testing.record import Ran, RunOutcome, Stub, arguments_of
from penstock.worker.events import event_name
from penstock.worker.executor import Executor
from penstock.worker.handlers import Handlers
from penstock.worker.reporter import Reporter
from penstock.worker.run import Run
from penstock.worker.slots import ServedQueue

if TYPE_CHECKING:
    from penstock.client.middleware import EnqueueChain
    from penstock.core.job import Enqueued, NewJob
    from penstock.storage.contract import Storage
    from penstock.worker.context import JobContext
    from penstock.worker.middleware import CallNext
    from penstock.worker.worker import Worker


Item = TypeVar("Item")
Answer = TypeVar("Answer")

# Verbs that may make a job ready. One that does not only costs a check.
_READYING: Final = frozenset(
    {
        *("enqueue", "enqueue_flows", "attach", "fire", "put_scheduler", "resume_scheduler"),
        *("cancel", "change", "promote", "retry", "retry_all", "signal"),
        *("limit", "remove_budget", "reset_usage", "resume", "set_budget"),
    }
)
# The pause between heartbeats.
_BEAT_S: Final = 0.02


class StandIn:
    """Passes every verb on to ``storage``, after setting the time of its queue.

    It awaits ``readied`` after verbs that may have made a job ready. Unless ``refuse`` is empty, waiting for a result
    raises ``PenstockError`` with that text.
    """

    def __init__(
        self,
        storage: Storage,
        clock: ManualClock,
        *,
        readied: Callable[[], Awaitable[None]] | None = None,
        refuse: str = "",
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._readied = readied
        self._refuse = refuse
        self.url = storage.url
        self.capabilities = storage.capabilities

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._storage, name)
        if not inspect.iscoroutinefunction(verb):
            return verb

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._refuse and _waits_for_results(name, args):
                raise PenstockError(self._refuse)
            if args and name != "shift_clock":
                await self._clock.apply(self._storage, args[0])
            answer = await verb(*args, **kwargs)
            if self._readied is not None and name in _READYING:
                await self._readied()
            return answer

        return call


PassTime: TypeAlias = Callable[[str, str, int | None], Awaitable[None]]
"""Takes a queue, a job id, and the milliseconds that the caller waits at most."""


class StandInSession(Session):
    """Sends each enqueue separately, because a task that runs inside the call may enqueue to the same queue.

    ``pass_time`` is awaited before a caller waits for the end of a job.
    """

    __slots__ = ("_pass_time",)
    remedy: ClassVar[str] = "In a harness, run jobs with h.drain() or h.run_all() before you wait for one."

    def __init__(
        self, storage: Storage, enqueue_chain: EnqueueChain, pass_time: PassTime | None = None
    ) -> None:
        super().__init__(storage, enqueue_chain)
        self._pass_time = pass_time

    def waiter(self, queue: str) -> Waiter:
        if self._pass_time is not None and queue not in self._waiters:
            self._waiters[queue] = _TimePassingWaiter(self.storage, queue, self._pass_time)
        return super().waiter(queue)

    def _enqueues_to(self, queue: str) -> Coalescer[NewJob, Enqueued]:
        enqueue = self.storage.enqueue
        return _OneByOne(lambda jobs: enqueue(queue, jobs), size=lambda _: 1)


class _TimePassingWaiter(Waiter):
    """Moves the clock as far as the awaited job needs."""

    __slots__ = ("_pass_time",)

    def __init__(self, storage: Storage, queue: str, pass_time: PassTime) -> None:
        super().__init__(storage, queue)
        self._pass_time = pass_time

    async def begin(self, expected: ResultWait, since: int) -> None:
        await super().begin(expected, since)
        await self._pass_time(self._queue, expected.id, expected.within_ms)

    async def watch(self, expected: ResultWait) -> None:
        await self._pass_time(self._queue, expected.id, expected.within_ms)
        await super().watch(expected)


class _OneByOne(Coalescer[Item, Answer]):
    """Sends calls without waiting for others."""

    __slots__ = ()

    async def call(self, item: Item) -> Answer:
        return (await self._send([item]))[0]


def stand_in(storage: Storage, clock: ManualClock, **options: Any) -> Storage:
    """Return a ``StandIn`` typed as a storage, because it forwards all verbs."""
    return cast("Storage", StandIn(storage, clock, **options))


def _waits_for_results(verb: str, args: tuple[Any, ...]) -> bool:
    return verb == "watch" or (verb == "enqueue" and any(job.notify for job in args[1]))


@dataclass(eq=False)
class Bench:
    """Runs and settles jobs on one event loop, with the options, handlers, middleware and listeners of ``worker``."""

    worker: Worker
    storage: Storage
    clock: ManualClock
    stubs: dict[str, Stub]
    random: Callable[[], float]

    def __post_init__(self) -> None:
        self._ends: dict[Run, asyncio.Future[None]] = {}
        self._errors: dict[int, BaseException] = {}
        self._served_queues: dict[str, ServedQueue] = {}
        self._reporter = Reporter(self.storage, asyncio.get_running_loop())
        layers = (self._note_errors, *self.worker.options.middleware, self._use_stubs)
        self._handlers = Handlers(self.worker, layers)
        self._executor = Executor(
            self.worker, self._handlers, reporter=self._reporter, finished=self._end, freed=self._end_lost
        )

    def batch_size(self, queue: str) -> int:
        """Return how many jobs of a queue to claim at a time: one, unless a handler takes several."""
        app, batching = self.worker.app, self._batching_of_handler(queue)
        batchings = [*(task.batching for task in app.tasks.values()), batching]
        sizes = [batching.size for batching in batchings if batching is not None]
        return min(max(sizes, default=1), self.worker.options.concurrency)

    def grouped(self, queue: str, leases: Sequence[Lease]) -> list[list[Lease]]:
        """Return the leases in the order of their runs, those of a batch in one list."""
        groups: dict[str | int, list[Lease]] = {}
        for lease in leases:
            task = self.worker.app.tasks.get(lease.options.task)
            batching = task.batching if task else self._batching_of_handler(queue)
            groups.setdefault(lease.token if batching is None else lease.options.task, []).append(lease)
        return list(groups.values())

    def _batching_of_handler(self, queue: str) -> Batching | None:
        own, handler = self.worker.handlers.by_queue.get(queue), self.worker.app.handlers.get(queue)
        return own.batching if own is not None else None if handler is None else handler.batching

    async def run(self, queue: str, leases: Sequence[Lease]) -> list[Ran]:
        """Run leases concurrently, settle them in order, and return the runs."""
        now, served = time.monotonic(), self._served(queue)
        runs = [self._executor.prepare(served, lease, now) for lease in leases]
        self.worker.recorder.started(runs)
        for run in runs:
            self._ends[run] = asyncio.get_running_loop().create_future()
        try:
            for run in runs:
                self._start(run)
            await self._until_ended(runs)
        finally:
            for run in runs:
                del self._ends[run]
        return [await self._settle(run) for run in runs]

    async def hold_leases(self, storage: Storage, ms: int) -> None:
        """Extend the leases of the current runs, so that none expires while ``ms`` pass."""
        options = self.worker.options
        for run in list(self._ends):
            held = [Held(run.lease.id, run.lease.token)]
            lease_ms = min(options.lease_ms + ms, MAX_MS)
            await storage.extend(run.served.name, held, worker=options.id, lease_ms=lease_ms)

    def close(self) -> None:
        """Close the threads and processes."""
        self._executor.close()

    def _start(self, run: Run) -> None:
        # The task of the run copies both. No other code must see a predictable random source.
        random_token, clock_token = chance.set(self.random), wall_clock.set(self.clock.now)
        try:
            self._executor.start(run)
        finally:
            chance.reset(random_token)
            wall_clock.reset(clock_token)

    async def _until_ended(self, runs: Sequence[Run]) -> None:
        await asyncio.sleep(0)
        while running := [run for run in runs if not self._ends[run].done()]:
            self._handlers.hurry()  # No more jobs will come, so start the batches as they are.
            await asyncio.wait([self._ends[run] for run in running], timeout=_BEAT_S)
            await self._beat([run for run in running if not self._ends[run].done()])

    async def _beat(self, runs: Sequence[Run]) -> None:
        if not runs:
            return
        options, held = self.worker.options, [Held(run.lease.id, run.lease.token) for run in runs]
        answers = await self.storage.extend(
            runs[0].served.name, held, worker=options.id, lease_ms=options.lease_ms
        )
        aborts = {"cancel": Abort.CANCEL, "expired": Abort.EXPIRED, "lost": Abort.LOST}
        for run, answer in zip(runs, answers, strict=True):
            if answer != "extended":
                self._executor.abort(run, aborts[answer])

    async def _settle(self, run: Run) -> Ran:
        outcome, lease = run.outcome, run.lease
        error = self._errors.pop(lease.token, None)
        if outcome is None:
            self.worker.recorder.stalled(run)
            return self._ran(run, "stalled", None, error)
        settlement = Settlement(lease.id, lease.token, outcome)
        [answer] = (await self.storage.settle(run.served.name, [settlement])).answers
        self.worker.recorder.settled([run], [answer])
        name = event_name(run, answer.state) if answer.applied else "stalled"
        return self._ran(run, cast(RunOutcome, name), answer.state, error)

    def _ran(self, run: Run, outcome: RunOutcome, state: Any, error: BaseException | None) -> Ran:
        lease, settled = run.lease, run.outcome
        return Ran(
            queue=run.served.name,
            id=lease.id,
            task=lease.options.task,
            run=lease.run,
            outcome=outcome,
            state=state,
            at=self.clock.now(),
            result=self._result(run, settled) if isinstance(settled, Complete) else None,
            error=error,
            failure=settled.failure if isinstance(settled, Fail) else None,
            scheduler=(lease.extras or EMPTY_EXTRAS).scheduler,
        )

    def _result(self, run: Run, outcome: Complete) -> Any:
        app = self.worker.app
        task = run.handler.definition
        source = app.queue(run.served.name)._source if task is None else task.source
        return source.decode_result(outcome.result)

    def _end(self, run: Run) -> None:
        end = self._ends.get(run)
        if end is not None and not end.done():
            end.set_result(None)

    def _end_lost(self) -> None:
        """End the runs whose lease is lost, which have no outcome."""
        for run in self._ends.keys() - self._executor.running:
            self._end(run)

    async def _note_errors(self, context: JobContext, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except BaseException as error:
            self._errors[context.token] = error
            raise

    async def _use_stubs(self, context: JobContext, call_next: CallNext) -> Any:
        stub = self.stubs.get(context.task)
        if stub is None:
            return await call_next()
        return await stub.answer(arguments_of(self.worker.app.tasks[context.task], context.payload))

    def _served(self, queue: str) -> ServedQueue:
        served = self._served_queues.get(queue)
        if served is None:
            served = self._served_queues[queue] = ServedQueue(queue)
            served.reporter, served.app = self._reporter, self.worker.app
        return served
