"""The executor: a lease in, an outcome out. It applies nothing; what becomes of outcomes is the fetcher's part."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, assert_never, cast

from penstock.batching import Batching
from penstock.core.job import Lease
from penstock.core.outcome import Cancel, Complete, Outcome
from penstock.errors import InvalidOption, PayloadTooLarge, PenstockError, SerializationError, UnknownTask
from penstock.worker.batch import Batch, Batcher
from penstock.worker.context import current_run
from penstock.worker.deadlines import Deadlines
from penstock.worker.lane import Lane
from penstock.worker.middleware import Middleware, compose
from penstock.worker.reporter import Reporter
from penstock.worker.run import Abort, Call, EncodedResult, Plan, Run
from penstock.worker.runners import batched, inline
from penstock.worker.runners.process import ProcessRunner
from penstock.worker.runners.thread import ThreadRunner
from penstock.worker.verdict import aborted, failed, final_failure

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.task import Task
    from penstock.worker.handlers import Handlers

__all__ = ["Executor"]

# Where Python can, a run begins at once: one that never waits is then over without a turn of the loop.
_new_task: Final[Callable[..., asyncio.Task[None]]] = (
    partial(cast(Any, asyncio.Task), eager_start=True) if sys.version_info >= (3, 12) else asyncio.Task
)


class Executor:
    """Runs leases and hands each run to ``finished`` when it has its outcome.

    ``running`` are the runs that take up a slot. A handler that ignores its abort is finished without it, and
    stays in ``running`` and in ``stuck`` until it ends; ``freed`` tells of that, and of the end of a run that is
    no longer ours to settle.
    """

    def __init__(
        self,
        app: App,
        *,
        handlers: Handlers,
        middleware: Sequence[Middleware],
        threads: ThreadRunner,
        processes: ProcessRunner,
        concurrency: int,
        reporter: Reporter,
        finished: Callable[[Run], None],
        freed: Callable[[], None],
        stuck: Callable[[Run], None],
    ) -> None:
        self._backoffs = app.backoffs
        self._tasks = app.tasks
        self._encode_untyped = app.result_serde.encode
        self._handlers = handlers
        self._middleware = tuple(middleware)
        self._threads = threads
        self._processes = processes
        self._concurrency = concurrency
        self._reporter = reporter
        self._finished = finished
        self._freed = freed
        self._got_stuck = stuck
        self._plans: dict[str, Plan] = {}
        self._untasked: dict[str, Plan] = {}
        self._batchers: list[Batcher] = []
        self._deadlines = Deadlines(self._overdue)
        self._loop = asyncio.get_running_loop()
        self._largest = app.max_payload
        self.running: set[Run] = set()
        self.stuck: set[Run] = set()

    def prepare(self, lane: Lane, lease: Lease, now: float) -> Run:
        """The run of a lease, not yet begun."""
        task = lease.options.task
        return Run(lease, lane, self._plans.get(task) or self._plan(lane.name, task), now)

    def start(self, run: Run) -> None:
        """Begin a run; there must be a free slot. The handler may be over, and ``finished`` called, on return."""
        lease = run.lease
        self.running.add(run)
        if lease.options.timeout_ms:
            self._deadlines.watch(run)
        # Not by loop.create_task, which costs half as much again; a name given is a name not made.
        run.aio_task = _new_task(self._run(run), loop=self._loop, name=lease.id)

    def abort(self, run: Run, reason: Abort) -> None:
        """Stop a run as far as its runner can. A first reason stays; a run that has its outcome is left alone."""
        if run.outcome is not None or run.abort is not None:
            return
        run.abort = reason
        match run.plan.runner:
            case "async":
                assert run.aio_task is not None
                # Not at once: a task cancelled before its first step would end without a word.
                self._loop.call_soon(run.aio_task.cancel)
            case "process":
                if run.kill is not None:
                    run.kill()
            case "thread":
                # Told by context.cancelled. A cancel can wait for it to look; whatever else there is cannot.
                if reason is not Abort.CANCEL:
                    self.give_up(run)
            case _ as never:
                assert_never(never)

    def give_up(self, run: Run) -> None:
        """Settle an aborted run whose handler goes on. Its slot stays busy until that ends."""
        if run.outcome is None and run.abort is not None and run in self.running:
            run.stuck = True
            self.stuck.add(run)
            self._got_stuck(run)
            run.outcome = self._aborted(run)
            if run.outcome is not None:
                self._finished(run)

    def hurry(self) -> None:
        """No more jobs will come: begin with batches that are not full."""
        for batcher in self._batchers:
            batcher.flush()

    def close(self) -> None:
        """Let go of threads and processes."""
        self._deadlines.close()
        self._threads.close()
        self._processes.close()

    async def _run(self, run: Run) -> None:
        current_run.set(run)
        outcome: Outcome | None
        try:
            if run.lease.cancelling:
                outcome = Cancel("cancelled before it ran")
            else:
                outcome = self._returned(run, await run.plan.call(run))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            outcome = self._failed(run, error)
        if run.context is not None:
            await self._last_words(run)
        self.running.discard(run)
        if run.lease.options.timeout_ms:
            self._deadlines.forget(run)
        if run.outcome is None and outcome is not None:
            run.outcome = outcome
            self._finished(run)
        else:
            self.stuck.discard(run)
            self._freed()

    def _returned(self, run: Run, result: Any) -> Outcome | None:
        if run.abort is not None and (run.saw_abort or run.abort is Abort.LOST):
            return self._aborted(run)
        try:
            data = result.data if type(result) is EncodedResult else run.plan.encode(result)
        except SerializationError as error:
            return final_failure(error)
        if len(data) > self._largest:
            return final_failure(_too_large(run, len(data), self._largest))
        return Complete(data)

    def _failed(self, run: Run, error: BaseException) -> Outcome | None:
        if run.abort is not None:
            return self._aborted(run)
        return failed(error, run.lease, discarded=run.discarded, backoffs=self._backoffs)

    def _aborted(self, run: Run) -> Outcome | None:
        assert run.abort is not None
        return aborted(run.abort, run.lease, discarded=run.discarded, backoffs=self._backoffs)

    async def _last_words(self, run: Run) -> None:
        try:
            await self._reporter.flush()
        except asyncio.CancelledError:
            # Aborted while the job was done already: the outcome stands, whatever was to be said with it.
            pass

    def _overdue(self, run: Run) -> None:
        if run.abort is None:
            self.abort(run, Abort.TIMEOUT)
        else:
            self.give_up(run)

    def _plan(self, queue: str, name: str) -> Plan:
        task = self._tasks.get(name)
        if task is not None:
            try:
                plan = self._plans[name] = self._bound(task)
            except InvalidOption as error:
                return _refusing(name, error)
            return plan
        if not name:
            return self._untasked.get(queue) or self._plan_untasked(queue)
        # Not kept: the task may be registered later.
        return _refusing(name, _unknown(name))

    def _plan_untasked(self, queue: str) -> Plan:
        plan = self._handlers.plan(
            queue, threads=self._threads, batcher=self._batcher, wrap=self._wrap, encode=self._encode_untyped
        )
        if queue in self._handlers.by_queue:  # else one may be added later
            self._untasked[queue] = plan
        return plan

    def _bound(self, task: Task[..., Any]) -> Plan:
        return Plan(
            task.name,
            task.runner,
            self._wrap(self._call_of(task)),
            task.result_serde.encode,
            lambda args, kwargs: task.signature.encode(args, kwargs, serde=task.serde),
        )

    def _call_of(self, task: Task[..., Any]) -> Call:
        if task.batching is not None:
            handle = batched.calling(task)
            return batched.bind(task, self._batcher(task.batching, handle, is_async=task.runner == "async"))
        match task.runner:
            case "async":
                return inline.bind(task)
            case "thread":
                return self._threads.bind(task)
            case "process":
                return self._processes.bind(task)
            case _ as never:
                assert_never(never)

    def _batcher(self, batching: Batching, handle: Callable[[Batch], Any], *, is_async: bool) -> Batcher:
        batcher = Batcher(
            batching,
            most=self._concurrency,
            handle=handle if is_async else lambda batch: self._threads.run(handle, batch),
        )
        self._batchers.append(batcher)
        return batcher

    def _wrap(self, call: Call) -> Call:
        return compose(self._middleware, call)


def _unknown(name: str) -> UnknownTask:
    return UnknownTask(
        f"no task {name!r} is registered in this worker's app. "
        "Import the module that defines it before the worker starts, or deploy it here."
    )


def _refusing(name: str, error: PenstockError) -> Plan:
    """Runs of this task fail; retries may reach a worker that can run it."""

    async def call(_: Run) -> Any:
        raise error.with_traceback(None)

    def pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        raise error

    return Plan(name, "async", call, bytes, pack)


def _too_large(run: Run, size: int, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the result of job {run.lease.id!r} has {size} bytes, and the limit is {limit}. "
        "Store large results elsewhere and return where they are, or raise the app's max_payload."
    )
