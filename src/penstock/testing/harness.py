"""The harness puts an app under test: it runs jobs on demand and asserts which jobs were enqueued."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeAlias, Unpack, get_args
from weakref import WeakSet

from penstock.client.app import App
from penstock.client.loopthread import Face, as_sync, run
from penstock.client.session import Sessions
from penstock.core.lifecycle import OPEN
from penstock.core.names import check_queue, uuid7
from penstock.core.units import MAX_MS, Duration, milliseconds
from penstock.errors import InvalidOption, PenstockError
from penstock.storage import open_storage
from penstock.testing.bench import Bench, StandInSession, stand_in
from penstock.testing.drain import Drain, ManualClock, RaiseFailures
from penstock.testing.record import Drained, Ran, Recorded, Recorder, Stub, matcher
from penstock.worker.middleware import run_start_hooks, run_stop_hooks
from penstock.worker.options import WorkerOptions

if TYPE_CHECKING:
    from penstock.client.task import Task
    from penstock.storage.contract import Storage
    from penstock.storage.values import Counts


Mode: TypeAlias = Literal["manual", "inline", "fake"]

# The worker options that affect runs; the others are about claiming jobs.
_WORKER_OPTIONS: Final = frozenset(
    {"after_execution", "child_processes", "concurrency", "lease", "middleware", "name", "threads"}
)
# One database for all harnesses of a process, with a namespace for each: named databases in memory are never freed.
SHARED_MEMORY: Final = "memory://penstock-testing"


# The apps that are currently in a harness.
_under_test: Final[WeakSet[App]] = WeakSet()


class Harness:
    """An app under test: in the block of ``with harness(app) as h`` or ``async with``, it has a fresh store in memory.

    ``manual``: jobs run when you call ``drain()`` or ``run_all()``. ``inline``: jobs run inside the call that makes
    them ready, so ``enqueue`` returns when its job has run, and the jobs that this one enqueued. Waiting for a result
    moves the clock to the retries and delays of that job, and past rate limits. ``fake``: no job runs, all are
    recorded. Call the methods on any event loop, or use ``sync`` in synchronous code.

    ``raise_failures`` raises what handlers raise, and with ``"final"`` only what ends a job for good. ``hooks=False``
    skips the app's ``on_start`` and ``on_stop`` hooks, ``schedules=False`` leaves schedules out, ``seed`` seeds the
    jitter. ``url`` names another store, which is used in a separate namespace. Further options are those for a worker's
    runs: ``middleware``, ``after_execution``, ``threads`` and so on.
    """

    def __init__(
        self,
        app: App,
        *,
        mode: Mode = "manual",
        raise_failures: RaiseFailures = False,
        hooks: bool = True,
        schedules: bool = True,
        seed: int = 0,
        url: str = SHARED_MEMORY,
        **worker: Unpack[WorkerOptions],
    ) -> None:
        if not isinstance(app, App):
            raise InvalidOption(f"harness needs the App whose tasks you test, got {app!r:.80}.")
        if mode not in get_args(Mode):
            raise InvalidOption(
                f"mode must be 'manual', 'inline' (jobs run immediately) or 'fake', got {mode!r}."
            )
        if raise_failures not in (True, False, "final"):
            raise InvalidOption(f"raise_failures must be True, False or 'final', got {raise_failures!r}.")
        _refuse_unused(worker)
        self.app = app
        self.mode: Mode = mode
        self.clock = ManualClock()
        self.worker = app.worker(**worker)
        """The worker whose options, handlers and listeners the runs use: ``@h.worker.handler("raw")``,
        ``h.worker.on(...)``."""
        self.runs: list[Ran] = []
        """All runs so far."""
        self._raise_failures = raise_failures
        self._hooks = hooks
        self._schedules = schedules
        self._url = url
        self._namespace = f"t-{uuid7()}"
        self._random = random.Random(seed).random
        self._recorder = Recorder(app)
        self._stubs: dict[str, Stub] = {}
        self._benches: dict[asyncio.AbstractEventLoop, tuple[Bench, Storage]] = {}
        session = partial(StandInSession, pass_time=self._pass_time if mode == "inline" else None)
        self._sessions = Sessions(
            self._open, enqueue_chain=app.enqueue_chain, close_storage=True, session=session
        )
        self._before: Sessions | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._started = False
        self._starting = False
        self._scheduled = False

    # Begin and close

    def begin(self) -> Self:
        """Replace the app's store by one in memory. The app's own store stays untouched.

        Raise ``InvalidOption`` if another harness has the app and is not closed yet.
        """
        if self._before is None:
            if self.app in _under_test:
                raise InvalidOption(
                    f"{self.app!r} is already in a harness, and two would not see each other's jobs. "
                    "Use that harness, or close it first."
                )
            self._before = self.app.exchange_sessions(self._sessions)
            _under_test.add(self.app)
        return self

    async def aclose(self) -> None:
        """Restore the app's own store and delete this one."""
        if self._restore():
            try:
                if self._home is not None:
                    await self._finish()
            finally:
                await self._sessions.close()

    def close(self) -> None:
        """Close the harness from synchronous code."""
        if self._restore():
            home = self._home
            if home is not None and _is_idle(home):
                # The test's loop is idle: close what its hooks opened on the same loop.
                home.run_until_complete(self._finish())
            elif home is not None:
                run(self._finish(), may_block_loop=True)
            self._sessions.close_idle()

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self.begin()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def sync(self) -> SyncHarness:
        """Return the same methods for synchronous code."""
        return SyncHarness(self)

    # Run

    async def drain(
        self,
        *queues: str,
        until: Duration | None = None,
        raise_failures: RaiseFailures | None = None,
        max_runs: int = 10_000,
        schedules: bool | None = None,
    ) -> Drained:
        """Run everything that is due, and the jobs this leads to, on these queues or on all.

        With ``until``, let that much time pass and run everything that falls due. Jobs scheduled for later stay.
        ``raise_failures`` raises a handler's exception once its job is settled; ``"final"`` raises only what ends a job
        for good. ``schedules=False`` makes no jobs of schedules: their slots stay due.
        """
        drain = await self._drain(queues, raise_failures, max_runs, schedules)
        return await self._carry_out(
            drain,
            drain.run_due if until is None else lambda: drain.run_through(milliseconds(until, what="until")),
        )

    async def run_all(
        self,
        *queues: str,
        raise_failures: RaiseFailures | None = None,
        max_runs: int = 10_000,
        schedules: bool | None = None,
    ) -> Drained:
        """Run everything, moving the clock to the next due job, until no job is open.

        Jobs that wait for more than time, such as a signal or the end of a pause, stay open. Takes the options of
        ``drain``.
        """
        drain = await self._drain(queues, raise_failures, max_runs, schedules)
        return await self._carry_out(drain, drain.run_to_end)

    async def perform(self, task: Task[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Enqueue one call, run everything, and return its result: the shortest test of a task, retries included.

        Takes the arguments of ``task.enqueue``. Raises the errors of ``result()``.
        """
        handle = await task.enqueue(*args, **kwargs)
        await self.run_all()
        ran = next(
            (ran for ran in reversed(self.runs) if (ran.queue, ran.id) == (handle.queue, handle.id)), None
        )
        if ran is not None and ran.outcome == "completed":
            return ran.result
        info = await handle.get_or_none()
        if info is not None and info.state in OPEN:
            raise PenstockError(f"{info!r} waits for more than time: advancing the clock does not finish it.")
        return await handle.result()

    def stub(
        self,
        task: Task[..., Any] | str,
        *,
        returns: Any = None,
        raises: BaseException | None = None,
        does: Callable[..., Any] | None = None,
    ) -> Stub:
        """Replace the function of a task: its runs return, raise or do what you say. All else stays real."""
        name = task if isinstance(task, str) else task.name
        self.app.task_named(name)
        stub = Stub(returns=returns, raises=raises, does=does, end=lambda: self._unstub(name, stub))
        self._stubs[name] = stub
        return stub

    # Inspect

    async def enqueued(
        self,
        /,
        task: Task[..., Any] | str | None = None,
        *args: Any,
        queue: str | None = None,
        id: str | None = None,
        delay: Duration | None = None,
        priority: int | None = None,
        payload: Any = None,
        **kwargs: Any,
    ) -> list[Recorded]:
        """Return the jobs that were enqueued, in order: those of a task, with these arguments, on a queue …

        Omitted options and arguments match anything. Values are compared with ``==``, so ``unittest.mock.ANY`` works.
        If an argument has the name of an option, pass it by position.
        """
        matches = matcher(
            task, args, kwargs, queue=queue, id=id, delay=delay, priority=priority, payload=payload
        )
        storage = await self._storage()
        for name in await storage.queues():
            await self._recorder.look(storage, name)
        return [job for job in self._recorder.jobs if matches(job)]

    async def assert_enqueued(
        self,
        /,
        task: Task[..., Any] | str | None = None,
        *args: Any,
        count: int | None = None,
        **criteria: Any,
    ) -> list[Recorded]:
        """Fail the test unless a matching job was enqueued, or exactly ``count``. Takes the options of ``enqueued``."""
        __tracebackhide__ = True
        jobs = await self.enqueued(task, *args, **criteria)
        if not jobs if count is None else len(jobs) != count:
            number = "none was" if not jobs else f"{len(jobs)} were"
            raise AssertionError(
                f"{'a job' if count is None else f'{count} jobs'} of {_described(task, args, criteria)} should have "
                f"been enqueued, and {number}. Enqueued were: {self._recorder.jobs or 'no jobs at all'}"
            )
        return jobs

    async def refute_enqueued(
        self, /, task: Task[..., Any] | str | None = None, *args: Any, **criteria: Any
    ) -> None:
        """Fail the test if a matching job was enqueued. Takes the options of ``enqueued``."""
        __tracebackhide__ = True
        await self.assert_enqueued(task, *args, count=0, **criteria)

    async def left(self) -> dict[str, Counts]:
        """Return the counts of the queues with open jobs."""
        storage = await self._storage()
        counts = {queue: await storage.counts(queue) for queue in await storage.queues()}
        return {queue: count for queue, count in counts.items() if count.open}

    async def reset(self) -> None:
        """Delete all jobs, runs and records; the clock stays."""
        storage = await self._storage()
        for queue in await storage.queues():
            await self._recorder.look(storage, queue)
            await storage.obliterate(queue, force=True)
        self._recorder.jobs.clear()
        self.runs.clear()

    # Internals

    async def _drain(
        self,
        queues: tuple[str, ...] = (),
        raise_failures: RaiseFailures | None = None,
        max_runs: int = 10_000,
        schedules: bool | None = None,
    ) -> Drain:
        if self.mode == "fake":
            raise PenstockError("this harness is a fake: it runs no jobs. Create it with mode='manual'.")
        bench, storage = await self._bench()
        if not self._scheduled:
            self._scheduled = True
            await self.app.put_declared(storage)
        if self._hooks and not self._started:
            self._started = self._starting = True
            try:
                await run_start_hooks(self.worker.start_hooks, self.worker)
            finally:
                self._starting = False
        return Drain(
            storage=storage,
            bench=bench,
            clock=self.clock,
            recorder=self._recorder,
            worker=self.worker,
            queues=[check_queue(queue) for queue in queues],
            raise_failures=self._raise_failures if raise_failures is None else raise_failures,
            max_runs=max_runs,
            schedules=self._schedules if schedules is None else schedules,
            ran=self.runs.append,
        )

    async def _carry_out(self, drain: Drain, run_jobs: Callable[[], Any]) -> Drained:
        began_ms = self.clock.moved_ms
        await run_jobs()
        advanced = timedelta(milliseconds=self.clock.moved_ms - began_ms)
        return Drained(drain.runs, await self.left(), advanced)

    async def _run_inline(self) -> None:
        if self._starting:
            return  # The drain that called the hooks runs their jobs afterwards.
        drain = await self._drain()
        await drain.run_due()

    async def _pass_time(self, queue: str, id: str, most_ms: int | None) -> None:
        """Move the clock to the next run of a job that a caller waits for, and of the jobs that it waits for."""
        drain = await self._drain()
        benches = [bench for bench, _ in list(self._benches.values())]
        await drain.until_begun(queue, id, most_ms=MAX_MS if most_ms is None else most_ms, benches=benches)

    async def _bench(self) -> tuple[Bench, Storage]:
        """Return the running loop's bench, and the store for the harness itself."""
        loop = asyncio.get_running_loop()
        if self._before is None:
            raise PenstockError("this harness is not active. Use it in a with block: with harness(app) as h.")
        if loop not in self._benches:
            inner = (await self._sessions.get()).storage._storage  # type: ignore[attr-defined]  # a StandIn
            storage = stand_in(inner, self.clock)
            bench = Bench(self.worker, storage, self.clock, self._stubs, self._random)
            self._benches[loop] = bench, storage
        return self._benches[loop]

    async def _storage(self) -> Storage:
        return (await self._bench())[1]

    async def _open(self) -> Storage:
        self._home = self._home or asyncio.get_running_loop()
        storage = open_storage(self._url, namespace=self._namespace)
        await storage.open()
        inline = self._run_inline if self.mode == "inline" else None
        refuse = (
            "this harness is a fake: it runs no jobs, so no result will come. Use mode='inline', with a stub to "
            "replace the task's own work."
        )
        return stand_in(storage, self.clock, readied=inline, refuse=refuse if self.mode == "fake" else "")

    def _unstub(self, name: str, stub: Stub) -> None:
        if self._stubs.get(name) is stub:
            del self._stubs[name]

    def _restore(self) -> bool:
        before, self._before = self._before, None
        if before is not None:
            self.app.exchange_sessions(before)
            _under_test.discard(self.app)
        return before is not None

    async def _finish(self) -> None:
        if self._started:
            await run_stop_hooks(self.worker.stop_hooks, self.worker)
        for bench, _ in self._benches.values():
            bench.close()
        self._benches.clear()
        storage = (await self._sessions.get()).storage
        for queue in await storage.queues():
            await storage.obliterate(queue, force=True)


class HarnessFactory(Protocol):
    """The type of the fixture ``penstock_harness``, which takes the arguments of ``harness``."""

    def __call__(self, app: App, **options: Any) -> Harness: ...


class SyncHarness(Face[Harness]):
    """See ``Harness``. Handlers that are coroutine functions run on the loop thread of the sync face."""

    __slots__ = ()

    drain = as_sync(Harness.drain)
    run_all = as_sync(Harness.run_all)
    perform = as_sync(Harness.perform)
    enqueued = as_sync(Harness.enqueued)
    assert_enqueued = as_sync(Harness.assert_enqueued)
    refute_enqueued = as_sync(Harness.refute_enqueued)
    left = as_sync(Harness.left)
    reset = as_sync(Harness.reset)


harness = Harness
"""Put an app under test: ``with harness(app) as h`` or ``async with``."""


def _described(task: Task[..., Any] | str | None, args: tuple[Any, ...], criteria: dict[str, Any]) -> str:
    name = "any task" if task is None else task if isinstance(task, str) else task.name
    values = [*map(repr, args), *(f"{key}={value!r}" for key, value in criteria.items() if value is not None)]
    return f"{name}({', '.join(values)})" if values else name


def _refuse_unused(options: Mapping[str, Any]) -> None:
    unused = options.keys() & (WorkerOptions.__annotations__.keys() - _WORKER_OPTIONS)
    if unused:
        raise InvalidOption(
            f"a harness does not take the worker option {min(unused)!r}, because it claims no jobs by itself. "
            f"It takes {', '.join(sorted(_WORKER_OPTIONS))}."
        )


def _is_idle(loop: asyncio.AbstractEventLoop) -> bool:
    return not loop.is_closed() and not loop.is_running() and asyncio._get_running_loop() is None
