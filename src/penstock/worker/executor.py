"""The executor runs the job of a lease and decides on the outcome, which the fetcher then settles.

In a flow, it passes the results of earlier jobs to the next one as its first argument.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, assert_never, cast

from msgspec.structs import replace

from penstock.client.codec import Serde, resolve_serde
from penstock.client.info import read_dependencies
from penstock.core.command import COMMAND_TASK
from penstock.core.flow import DependencyRecord
from penstock.core.job import Lease
from penstock.core.outcome import (
    Abort,
    Cancel,
    Complete,
    Fail,
    Outcome,
    Undecodable,
    aborted,
    failed,
    final_failure,
    retry_rule,
    undecided,
)
from penstock.core.step import NewStep
from penstock.core.text import get_logger
from penstock.errors import PayloadTooLarge, SerializationError, StorageError, Unrecoverable, WaitForChildren
from penstock.worker.context import current_run
from penstock.worker.events import warn_if_it_blocked
from penstock.worker.handlers import Handlers
from penstock.worker.health import LoopBlocked
from penstock.worker.middleware import AfterHooks
from penstock.worker.reporter import Reporter
from penstock.worker.run import Deadlines, EncodedResult, Run
from penstock.worker.slots import ServedQueue

if TYPE_CHECKING:
    from penstock.client.task import Task
    from penstock.storage.contract import Storage
    from penstock.worker.worker import Worker


logger = get_logger("penstock.worker")

# From Python 3.12 a task can start eagerly: a run that never waits finishes without a turn of the loop.
_new_task: Final[Callable[..., asyncio.Task[None]]] = (
    partial(cast(Any, asyncio.Task), eager_start=True) if sys.version_info >= (3, 12) else asyncio.Task
)


async def _with_results(storage: Storage, queue: str, lease: Lease, task: Task[..., Any]) -> Lease:
    """Return the lease with the results of earlier jobs as the first argument in its payload.

    Raise ``SerializationError`` if the results cannot be read: no run of the job can succeed.
    """
    assert lease.extras is not None
    mode, count, names = lease.extras.passes.split(":")
    serdes = [resolve_serde(name) for name in names.split(",")]
    records = (await read_dependencies(storage, queue, lease.id))[: int(count)]
    values = [_result(record, serdes[n % len(serdes)]) for n, record in enumerate(records)]
    arguments = task.serde.decode(lease.payload)
    if not isinstance(arguments, dict):
        raise SerializationError(f"the payload of job {lease.id!r} cannot take results.")
    first = task.signature.parameters[0]
    value = values if mode == "list" else values[0]
    return replace(lease, payload=task.serde.encode({first: value, **arguments}))


def _blame_result(lease: Lease, task: Task[..., Any], error: Undecodable) -> None:
    """If the function cannot take the passed result, make ``error`` say so."""
    assert lease.extras is not None
    first = task.signature.parameters[0]
    is_list = lease.extras.passes.startswith("list:")
    what = "the list of results of the jobs" if is_list else "the result of the job"
    with suppress(SerializationError):
        arguments = task.serde.decode(lease.payload)
        origin = f"It is {what} before it in the flow. "
        if first in arguments and (
            misfit := task.signature.misfit(first, arguments[first], task.serde, origin=origin)
        ):
            error.__cause__ = SerializationError(misfit)


def _result(record: DependencyRecord, serde: Serde) -> Any:
    return serde.decode(record.result) if record.result else None


class Executor:
    """Runs leases, and calls ``finished`` with each run that has its outcome.

    ``running`` has the runs that occupy a slot. If a handler ignores its abort, its run is settled without it, and
    stays in ``running`` and in ``stuck`` until the handler ends. ``freed`` is called then, and when a run without a
    lease ends. With ``interrupts`` a ``KeyboardInterrupt`` ends the loop; without, it fails its run.
    """

    def __init__(
        self,
        worker: Worker,
        handlers: Handlers,
        *,
        reporter: Reporter,
        finished: Callable[[Run], None],
        freed: Callable[[], None],
        interrupts: bool = True,
    ) -> None:
        self._backoffs = worker.app.backoffs
        self._tasks = worker.app.tasks
        self._handlers = handlers
        self._by_task = handlers.by_task
        self._reporter = reporter
        hooks, recorder = worker.options.after_execution, worker.recorder
        # None without hooks, so that runs skip them.
        self._after = (
            AfterHooks(hooks, lambda e, run: recorder.error(e, queue=run.served.name)) if hooks else None
        )
        self._late_settles: set[asyncio.Task[None]] = set()
        self._finished = finished
        self._freed = freed
        self._got_stuck = recorder.stuck
        self._deadlines = Deadlines(self._overdue)
        self._loop = asyncio.get_running_loop()
        self._largest = worker.app.max_payload
        self._interrupts = interrupts
        self.running: set[Run] = set()
        self.stuck: set[Run] = set()

    def prepare(self, served: ServedQueue, lease: Lease, now: float) -> Run:
        """Return a run for a lease, without starting it."""
        task = lease.options.task
        return Run(lease, served, self._by_task.get(task) or self._handlers.make(served.name, task), now, now)

    def start(self, run: Run) -> None:
        """Start a run; a slot must be free. The run may have finished when this returns."""
        lease = run.lease
        self.running.add(run)
        if lease.options.timeout_ms:
            self._deadlines.watch(run)
        # loop.create_task costs 50% more, and so does a generated name.
        run.aio_task = _new_task(self._run(run), loop=self._loop, name=lease.id)

    def abort(self, run: Run, reason: Abort) -> None:
        """Stop a run as far as its runner can. Keep the first reason; ignore a run that has its outcome."""
        if run.outcome is not None or run.abort is not None:
            return
        run.abort = reason
        match run.handler.runner:
            case "async":
                assert run.aio_task is not None
                # A task cancelled before its first step would end without an outcome.
                self._loop.call_soon(run.aio_task.cancel)
            case "process" | "sandbox":
                # Read once: the run's thread resets it when the process has answered.
                if (kill := run.kill) is not None:
                    kill()
            case "thread":
                # The handler sees context.cancelled. Only a cancel can wait until the handler checks that.
                if reason is not Abort.CANCEL:
                    self.give_up(run)
            case _ as never:
                assert_never(never)

    def give_up(self, run: Run) -> None:
        """Settle an aborted run whose handler continues. Its slot stays busy until the handler ends."""
        if run.outcome is None and run.abort is not None and run in self.running:
            run.stuck = True
            self.stuck.add(run)
            self._got_stuck(run)
            run.outcome = self._aborted(run)
            if run.outcome is not None and self._after is not None:
                self._settle_late(run, run.outcome, self._after)
            elif run.outcome is not None:
                self._finished(run)

    def close(self) -> None:
        """Close the threads and processes of the handlers."""
        self._deadlines.close()
        self._handlers.close()

    async def _run(self, run: Run) -> None:
        current_run.set(run)
        outcome: Outcome | None = None
        try:
            if run.lease.cancelling:
                outcome = Cancel("cancelled before it ran")
            else:
                if run.lease.extras is not None and run.lease.extras.passes:
                    await self._pass_results(run)
                result = await run.handler.call(run)
                if run.context is not None and run.context.suspension is not None:
                    raise run.context.suspension  # The handler swallowed it.
                if self._after is None or run.stuck:
                    outcome = self._returned(run, result)
                else:
                    outcome = await self._reviewed(run, result, self._after)
        except BaseException as raised:
            if self._ends_the_loop(raised):
                raise
            outcome = await self._raised(run, raised)
        if run.lease.options.timeout_ms:
            warn_if_it_blocked(run)
        if run.context is not None:
            if isinstance(outcome, Complete) and (unused := run.context.unused_steps()):
                await _sent(
                    run, self._note_unused(run, unused), "the unused steps of job %r could not be logged"
                )
            await _sent(run, self._reporter.flush(), "the last reports of job %r could not be sent")
        self._end(run, outcome)

    async def _raised(self, run: Run, raised: BaseException) -> Outcome | None:
        """Return the outcome of a run that raised. Hooks and backoffs, which take part in it, may raise as well."""
        if run.stuck:
            return None  # The run was settled without its handler.
        if isinstance(raised, LoopBlocked):
            run.abort = run.abort or Abort.RELEASE
        if run.context is not None and run.context.suspension is not None:
            raised = run.context.suspension.directive
        try:
            task, extras = self._tasks.get(run.lease.options.task), run.lease.extras
            if isinstance(raised, Undecodable) and task is not None and extras is not None and extras.passes:
                _blame_result(run.lease, task, raised)
            error = await _wait_or_error(run) if isinstance(raised, WaitForChildren) else raised
            outcome = self._failed(run, error)
            if isinstance(outcome, Fail):
                run.error = _error_to_log(run, error, outcome)
            if self._after is not None:
                outcome = await self._after.review(run, error, outcome)
        except BaseException as broken:
            if self._ends_the_loop(broken):
                raise
            logger.exception("could not decide the outcome of job %r; it counts as failed", run.lease.id)
            run.error = raised
            return self._aborted(run) if run.abort is not None else undecided(raised, broken)
        return outcome

    def _ends_the_loop(self, raised: BaseException) -> bool:
        """Return whether ``raised`` ends this process or its loop, and not just its run."""
        if isinstance(raised, KeyboardInterrupt):
            # A worker handles signals itself, so in a worker the handler raised this.
            return self._interrupts
        return isinstance(raised, GeneratorExit) and not self._loop.is_running()

    def _end(self, run: Run, outcome: Outcome | None) -> None:
        self.running.discard(run)
        if run.lease.options.timeout_ms:
            self._deadlines.forget(run)
        if run.outcome is None and outcome is not None:
            run.outcome = outcome
            self._finished(run)
        else:
            self.stuck.discard(run)
            self._freed()

    async def _pass_results(self, run: Run) -> None:
        """Pass the results of the jobs that the job waited for to its function, as the first argument."""
        task, app = self._tasks.get(run.lease.options.task), run.served.app
        if task is None or app is None:
            return
        try:
            run.lease = await _with_results(await app.connect(), run.served.name, run.lease, task)
        except SerializationError as error:
            raise Undecodable from error

    def _returned(self, run: Run, result: Any) -> Outcome | None:
        if run.abort is not None and (run.saw_abort or run.abort is Abort.LOST):
            return self._aborted(run)
        try:
            data = result.data if type(result) is EncodedResult else run.handler.encode(result)
        except SerializationError as error:
            run.error = error
            return final_failure(error)
        if len(data) > self._largest:
            run.error = too_large = _too_large(run, len(data), self._largest)
            return final_failure(too_large)
        return Complete(data)

    async def _reviewed(self, run: Run, result: Any, after: AfterHooks) -> Outcome | None:
        """Return the outcome of a run that returned ``result``, which hooks may change."""
        if run.abort is not None and (run.saw_abort or run.abort is Abort.LOST):
            return await after.review(run, TimeoutError(), self._aborted(run))
        execution = await after.completed(run, lambda: self._result_of(run, result))
        outcome = self._returned(run, execution.result if execution.is_read else result)
        return Complete(outcome.result, execution.ttl_ms) if isinstance(outcome, Complete) else outcome

    def _settle_late(self, run: Run, outcome: Outcome, after: AfterHooks) -> None:
        """Settle a run whose handler continues, after the hooks have seen its failure."""

        async def settle() -> None:
            try:
                run.outcome = await after.review(run, TimeoutError(), outcome)
            finally:
                self._finished(run)

        task = self._loop.create_task(settle())
        self._late_settles.add(task)
        task.add_done_callback(self._late_settles.discard)

    def _result_of(self, run: Run, result: Any) -> Any:
        """Return the result as the handler returned it, even from another process."""
        if type(result) is not EncodedResult:
            return result
        assert run.handler.definition is not None, "only tasks and handlers of an app run in other processes"
        return run.handler.definition.source.decode_result(result.data)

    def _failed(self, run: Run, error: BaseException) -> Outcome | None:
        if run.abort is not None:
            return self._aborted(run)
        task = run.handler.definition
        if task is None or task.retries is None:
            return failed(error, run.lease, discarded=run.discarded, backoffs=self._backoffs)
        rule = retry_rule(error, task.retries)
        return failed(
            error,
            run.lease,
            discarded=run.discarded or rule is None,
            backoffs=self._backoffs,
            backoff=rule.backoff if rule is not None else None,
        )

    def _aborted(self, run: Run) -> Outcome | None:
        assert run.abort is not None
        return aborted(run.abort, run.lease, discarded=run.discarded, backoffs=self._backoffs)

    async def _note_unused(self, run: Run, unused: list[NewStep]) -> None:
        """Log the recorded steps that a completed job no longer asks for."""
        if run.served.app is not None:
            storage = await run.served.app.connect()
            await storage.record_steps(run.served.name, unused)

    def _overdue(self, run: Run) -> None:
        if run.abort is None:
            self.abort(run, Abort.TIMEOUT)
        else:
            self.give_up(run)


async def _sent(run: Run, call: Awaitable[object], message: str) -> None:
    """Await a call after the handler has ended; log its failure. The outcome stands, also if the run is aborted now."""
    try:
        await call
    except asyncio.CancelledError:
        pass
    except Exception:
        logger.exception(message, run.lease.id)


def _error_to_log(run: Run, error: BaseException, outcome: Fail) -> BaseException:
    """Return the exception to log for a run that raised ``error``: a timeout if the run was aborted."""
    if run.abort is not None:
        return TimeoutError(outcome.failure.message).with_traceback(error.__traceback__)
    if isinstance(error, Undecodable) and error.__cause__ is not None:
        return error.__cause__
    # The traceback of a command shows only Penstock's own code.
    return error.with_traceback(None) if run.handler.task == COMMAND_TASK else error


async def _wait_or_error(run: Run) -> BaseException:
    """Return ``WaitForChildren``, or an error if the job has no children: it would run again and again."""
    app = run.served.app
    assert app is not None, "the queues of a running worker have an app"
    try:
        if await (await app.connect()).dependencies(run.served.name, run.lease.id, limit=1):
            return WaitForChildren()
    except (StorageError, asyncio.CancelledError):
        return WaitForChildren()
    return Unrecoverable(
        "the handler raised WaitForChildren, but the job has no children to wait for. "
        "Add children first: await context.add_children([...])."
    )


def _too_large(run: Run, size: int, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the result of job {run.lease.id!r} has {size} bytes; the limit is {limit}. "
        "Store large results elsewhere and return their location, or raise the app's max_payload."
    )
