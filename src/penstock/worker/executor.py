"""Results on their way from one job of a flow to the next: they become its first argument."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, assert_never, cast

from msgspec.structs import replace

from penstock.client.codec import Serde, resolve_serde
from penstock.client.flow.handle import read_dependencies
from penstock.core.command import COMMAND_TASK
from penstock.core.flow import DependencyRecord
from penstock.core.job import Lease
from penstock.core.outcome import Cancel, Complete, Fail, Outcome
from penstock.core.text import get_logger
from penstock.core.verdict import Abort, Undecodable, aborted, failed, final_failure, is_retried, undecided
from penstock.errors import PayloadTooLarge, SerializationError, StorageError, Unrecoverable, WaitForChildren
from penstock.worker.context import current_run
from penstock.worker.deadlines import Deadlines
from penstock.worker.handlers import Handlers
from penstock.worker.middleware import AfterHooks
from penstock.worker.reporter import Reporter
from penstock.worker.run import EncodedResult, Run
from penstock.worker.signals import LoopBlocked
from penstock.worker.slots import ServedQueue

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.task import Task
    from penstock.storage.contract import Storage


async def with_results(storage: Storage, queue: str, lease: Lease, task: Task[..., Any]) -> Lease:
    """The lease with a payload that has the results of the jobs it waited for as its first argument.

    Raises ``SerializationError`` if they cannot be read: no run of the job can succeed.
    """
    assert lease.extras is not None
    mode, count, names = lease.extras.passes.split(":")
    serdes = [resolve_serde(name) for name in names.split(",")]
    records = (await read_dependencies(storage, queue, lease.id))[: int(count)]
    values = [_result(record, serdes[n % len(serdes)]) for n, record in enumerate(records)]
    arguments = task.serde.decode(lease.payload)
    if not isinstance(arguments, dict):
        raise SerializationError(f"the payload of job {lease.id!r} has no place for results.")
    first = task.signature.parameters[0]
    value = values if mode == "list" else values[0]
    return replace(lease, payload=task.serde.encode({first: value, **arguments}))


def name_the_result(lease: Lease, task: Task[..., Any], error: Undecodable) -> None:
    """Have ``error`` name the result that was passed, if that is what the function cannot take."""
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


# The executor: a lease in, an outcome out. It applies nothing; what becomes of outcomes is the fetcher's
# part.


logger = get_logger("penstock.worker")

# Where Python can, a run begins at once: one that never waits is then over without a turn of the loop.
_new_task: Final[Callable[..., asyncio.Task[None]]] = (
    partial(cast(Any, asyncio.Task), eager_start=True) if sys.version_info >= (3, 12) else asyncio.Task
)


class Executor:
    """Runs leases and hands each run to ``finished`` when it has its outcome.

    ``running`` are the runs that take up a slot. A handler that ignores its abort is finished without it, and
    stays in ``running`` and in ``stuck`` until it ends; ``freed`` tells of that, and of the end of a run that is
    no longer ours to settle. With ``interrupts`` a ``KeyboardInterrupt`` ends the loop; without, it fails its run.
    """

    def __init__(
        self,
        app: App,
        *,
        handlers: Handlers,
        after: AfterHooks | None,
        reporter: Reporter,
        finished: Callable[[Run], None],
        freed: Callable[[], None],
        stuck: Callable[[Run], None],
        interrupts: bool = True,
    ) -> None:
        self._backoffs = app.backoffs
        self._tasks = app.tasks
        self._handlers = handlers
        self._by_task = handlers.by_task
        self._reporter = reporter
        self._after = after
        self._late: set[asyncio.Task[None]] = set()
        self._finished = finished
        self._freed = freed
        self._got_stuck = stuck
        self._deadlines = Deadlines(self._overdue)
        self._loop = asyncio.get_running_loop()
        self._largest = app.max_payload
        self._interrupts = interrupts
        self.running: set[Run] = set()
        self.stuck: set[Run] = set()

    def prepare(self, served: ServedQueue, lease: Lease, now: float) -> Run:
        """The run of a lease, not yet begun."""
        task = lease.options.task
        return Run(lease, served, self._by_task.get(task) or self._handlers.make(served.name, task), now)

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
        match run.handler.runner:
            case "async":
                assert run.aio_task is not None
                # Not at once: a task cancelled before its first step would end without a word.
                self._loop.call_soon(run.aio_task.cancel)
            case "process" | "sandbox":
                # Read once: the run's thread takes it back when the process has answered.
                if (kill := run.kill) is not None:
                    kill()
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
            if run.outcome is not None and self._after is not None:
                self._settle_late(run, run.outcome, self._after)
            elif run.outcome is not None:
                self._finished(run)

    def close(self) -> None:
        """Let go of threads and processes."""
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
                if self._after is None or run.stuck:
                    outcome = self._returned(run, result)
                else:
                    outcome = await self._reviewed(run, result, self._after)
        except BaseException as raised:
            if self._is_the_end(raised):
                raise
            outcome = await self._raised(run, raised)
        if run.context is not None:
            await self._last_words(run)
        self._end(run, outcome)

    async def _raised(self, run: Run, raised: BaseException) -> Outcome | None:
        """Return the outcome of a run that raised. Code of the user's that decides about it may raise as well."""
        if run.stuck:
            return None  # It was settled without its handler.
        if isinstance(raised, LoopBlocked):
            run.abort = run.abort or Abort.RELEASE
        try:
            if isinstance(raised, Undecodable) and run.lease.extras is not None and run.lease.extras.passes:
                self._name_the_result(run, raised)
            error = await _checked_wait(run) if isinstance(raised, WaitForChildren) else raised
            outcome = self._failed(run, error)
            if isinstance(outcome, Fail):
                run.error = _logged(run, error, outcome)
            if self._after is not None:
                outcome = await self._after.review(run, error, outcome)
        except BaseException as broken:
            if self._is_the_end(broken):
                raise
            logger.exception("The outcome of job %r could not be decided; it counts as failed", run.lease.id)
            run.error = raised
            return self._aborted(run) if run.abort is not None else undecided(raised, broken)
        return outcome

    def _is_the_end(self, raised: BaseException) -> bool:
        """Return whether ``raised`` ends this process or its loop, rather than only the run that raised it."""
        if isinstance(raised, KeyboardInterrupt):
            # A worker handles the signals itself, so there it is one that the handler raised.
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
        """The results of the jobs it waited for become its first argument."""
        pass

        task, app = self._tasks.get(run.lease.options.task), run.served.app
        if task is None or app is None:
            return
        try:
            run.lease = await with_results(await app.connect(), run.served.name, run.lease, task)
        except SerializationError as error:
            raise Undecodable from error

    def _name_the_result(self, run: Run, error: Undecodable) -> None:
        """Have the error say so if it is about a result that another job passed."""
        pass

        if (task := self._tasks.get(run.lease.options.task)) is not None:
            name_the_result(run.lease, task, error)

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
        """What ``_returned`` gives of a result that hooks may have changed."""
        if run.abort is not None and (run.saw_abort or run.abort is Abort.LOST):
            return await after.review(run, TimeoutError(), self._aborted(run))
        execution = await after.completed(run, lambda: self._result_of(run, result))
        outcome = self._returned(run, execution.result if execution.is_read else result)
        return Complete(outcome.result, execution.ttl_ms) if isinstance(outcome, Complete) else outcome

    def _settle_late(self, run: Run, outcome: Outcome, after: AfterHooks) -> None:
        """Settle a run whose handler goes on, after the hooks have seen its failure."""

        async def settle() -> None:
            try:
                run.outcome = await after.review(run, TimeoutError(), outcome)
            finally:
                self._finished(run)

        task = self._loop.create_task(settle())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def _result_of(self, run: Run, result: Any) -> Any:
        """The result as the handler returned it, even if it did so in another process."""
        if type(result) is not EncodedResult:
            return result
        return self._tasks[run.handler.task].source.decode_result(result.data)

    def _failed(self, run: Run, error: BaseException) -> Outcome | None:
        if run.abort is not None:
            return self._aborted(run)
        task = self._tasks.get(run.handler.task)
        final = run.discarded or (task is not None and not is_retried(error, task.retry_on))
        return failed(error, run.lease, discarded=final, backoffs=self._backoffs)

    def _aborted(self, run: Run) -> Outcome | None:
        assert run.abort is not None
        return aborted(run.abort, run.lease, discarded=run.discarded, backoffs=self._backoffs)

    async def _last_words(self, run: Run) -> None:
        try:
            await self._reporter.flush()
        except asyncio.CancelledError:
            # Aborted while the job was done already: the outcome stands, whatever was to be said with it.
            pass
        except Exception:
            logger.exception("The last reports of job %r were not sent", run.lease.id)

    def _overdue(self, run: Run) -> None:
        if run.abort is None:
            self.abort(run, Abort.TIMEOUT)
        else:
            self.give_up(run)


def _logged(run: Run, error: BaseException, outcome: Fail) -> BaseException:
    """Return the exception to log for a run that raised ``error``. A run that was stopped has timed out."""
    if run.abort is not None:
        return TimeoutError(outcome.failure.message).with_traceback(error.__traceback__)
    if isinstance(error, Undecodable) and error.__cause__ is not None:
        return error.__cause__
    # Of a command, the traceback shows only how the worker runs commands.
    return error.with_traceback(None) if run.handler.task == COMMAND_TASK else error


async def _checked_wait(run: Run) -> BaseException:
    """``WaitForChildren``, unless there are none: the job would run again at once, for ever."""
    app = run.served.app
    assert app is not None, "lanes of a running worker have one"
    try:
        if await (await app.connect()).dependencies(run.served.name, run.lease.id, limit=1):
            return WaitForChildren()
    except (StorageError, asyncio.CancelledError):
        return WaitForChildren()
    return Unrecoverable(
        "the handler raised WaitForChildren, and the job has no children to wait for. "
        "Add some before: await context.add_children([...])."
    )


def _too_large(run: Run, size: int, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the result of job {run.lease.id!r} has {size} bytes, and the limit is {limit}. "
        "Store large results elsewhere and return where they are, or raise the app's max_payload."
    )
