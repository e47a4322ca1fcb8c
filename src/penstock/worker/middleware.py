"""Lifecycle hooks: functions called when a worker starts and when it stops."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from penstock.core.outcome import FAILURE_TEXTS, Fail, Outcome
from penstock.core.text import get_logger
from penstock.core.units import Duration, describe, milliseconds
from penstock.core.verdict import Abort, Undecodable, failure_of, is_last
from penstock.errors import InvalidOption, JobExpired
from penstock.worker.context import JobContext, context_of
from penstock.worker.run import Call, Run

if TYPE_CHECKING:
    from penstock.worker.worker import Worker


Hook = Callable[..., Any]
"""Takes the worker, or nothing; may be a coroutine function."""

logger = get_logger("penstock.worker")


async def run_start_hooks(hooks: Sequence[Hook], worker: Worker) -> None:
    """In order, before the first claim. What one raises keeps the worker from starting."""
    for hook in hooks:
        await _call(hook, worker)


async def run_stop_hooks(hooks: Sequence[Hook], worker: Worker) -> None:
    """In reverse order, after the last settle. What one raises is logged: the others have to run."""
    for hook in reversed(hooks):
        try:
            await _call(hook, worker)
        except Exception:
            logger.exception("the stop hook %r failed", hook)


async def _call(hook: Hook, worker: Worker) -> None:
    answer = hook(worker) if inspect.signature(hook).parameters else hook()
    if inspect.isawaitable(answer):
        await answer


# Middleware: code around every run. ``async def middleware(context, call_next) -> result``.
#
# ::
#
#     async def timed(context, call_next):
#         started = time.perf_counter()
#         try:
#             return await call_next()
#         finally:
#             histogram.observe(time.perf_counter() - started)
#
# The first in the list is the outermost. What it returns is the job's result; what it raises decides the
# job's fate as if the handler had raised it. A process runner's result arrives as ``EncodedResult``.


CallNext = Callable[[], Awaitable[Any]]
Middleware = Callable[[JobContext, CallNext], Awaitable[Any]]


def compose(middleware: Sequence[Middleware], call: Call) -> Call:
    """``call`` wrapped in all of ``middleware``; ``call`` itself if there is none."""
    for layer in reversed(middleware):
        call = _wrapped(layer, call)
    return call


def _wrapped(layer: Middleware, inner: Call) -> Call:
    def call(run: Run) -> Awaitable[Any]:
        return layer(context_of(run), lambda: inner(run))

    return call


# After-execution hooks: a look at how a run ended, and a say in what is stored of it.
#
# ::
#
#     @app.after_execution
#     async def keep_as_long_as_it_is_fresh(execution: Execution) -> None:
#         if execution.status == "completed":
#             execution.ttl = execution.result["max_age"]
#
# Called once for every run that completed, failed or was stopped because its ttl passed, before the store
# has its outcome; not for runs that were snoozed, cancelled or handed back. A hook changes what is stored
# of the end, never the end itself.


Status = Literal["completed", "retrying", "failed"]


class Execution:
    """One run that is over. ``result``, ``error`` and ``ttl`` may be set; the rest is to be read.

    ``status``: ``completed``, ``failed`` for good, or ``retrying``: failed, with attempts left. The store has the
    last word on that (a job that is to be cancelled is not retried).
    """

    __slots__ = ("_error", "_read_result", "_result", "_ttl_ms", "job", "status")

    def __init__(
        self,
        job: JobContext,
        status: Status,
        *,
        read_result: Callable[[], Any] | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.job = job
        self.status = status
        # Called when asked for: a result from another process is there in bytes.
        self._read_result = read_result
        self._result: Any = None
        self._error = error
        self._ttl_ms: int | None = None

    def __repr__(self) -> str:
        return f"<Execution {self.job!r} {self.status}>"

    @property
    def result(self) -> Any:
        """What the handler returned; ``None`` if it failed. Set it to store something else."""
        if self._read_result is not None:
            self._result, self._read_result = self._read_result(), None
        return self._result

    @result.setter
    def result(self, value: Any) -> None:
        if self.status != "completed":
            raise InvalidOption(f"job {self.job.id!r} has failed: it has no result to change, but an error.")
        self._result, self._read_result = value, None

    @property
    def error(self) -> BaseException | None:
        """The handler's error, a ``TimeoutError``, or a ``JobExpired``; set it to store another error. Its class is
        only shown: it does not decide whether the job is retried. Of an expired job nothing can be changed."""
        return self._error

    @error.setter
    def error(self, value: BaseException) -> None:
        if self.status == "completed":
            raise InvalidOption(
                f"job {self.job.id!r} has completed: it has no error to change, but a result."
            )
        if not isinstance(value, BaseException):
            raise InvalidOption(
                f"error={value!r:.80} is not an exception. Give one, such as ValueError('...')."
            )
        self._error = value

    @property
    def ttl(self) -> str | None:
        """How long the result, or the failure, is kept, if a hook has said so; ``None`` is as the job's options say.

        Set it to any duration. It counts where the job ends; a failure that is retried is not kept.
        """
        return None if self._ttl_ms is None else describe(self._ttl_ms)

    @ttl.setter
    def ttl(self, value: Duration | None) -> None:
        self._ttl_ms = None if value is None else milliseconds(value, what="ttl")

    @property
    def ttl_ms(self) -> int | None:
        """``ttl`` in milliseconds."""
        return self._ttl_ms

    def take_back(self, before: Execution) -> None:
        """Be as ``before`` was."""
        self._read_result, self._result = before._read_result, before._result
        self._error, self._ttl_ms = before._error, before._ttl_ms

    def copy(self) -> Execution:
        twin = Execution(self.job, self.status)
        twin.take_back(self)
        return twin

    @property
    def is_read(self) -> bool:
        """Whether the result was looked at, or changed."""
        return self._read_result is None


AfterExecution = Callable[[Execution], Awaitable[None] | None]
"""Takes the execution; a coroutine function, or a short function, which runs on the worker's loop."""


class AfterHooks:
    """Calls the hooks in order. One that raises is undone and told to ``failed``; the outcome is stored all the same:
    the work is done, and to do it again for a hook's sake would be worse."""

    def __init__(self, hooks: Sequence[AfterExecution], failed: Callable[[BaseException, Run], None]) -> None:
        self._hooks = tuple(hooks)
        self._failed = failed

    async def completed(self, run: Run, read_result: Callable[[], Any]) -> Execution:
        """The handler returned. Cancelling stops the hooks; the run is not over before them."""
        return await self._call(run, Execution(context_of(run), "completed", read_result=read_result))

    async def review(self, run: Run, error: BaseException, outcome: Outcome | None) -> Outcome | None:
        """Return ``outcome`` as the hooks leave it. They see failures only, and cannot change an expiry."""
        if isinstance(outcome, Fail):
            return await self._review_failure(run, error, outcome)
        if run.abort is Abort.EXPIRED:
            execution = Execution(context_of(run), "failed", error=_expiry(run))
            with suppress(asyncio.CancelledError):
                await self._call(run, execution)
        return outcome

    async def _review_failure(self, run: Run, error: BaseException, outcome: Fail) -> Fail:
        """The handler raised, or was stopped at its timeout. If the run is stopped now, the failure stays as it is."""
        if run.abort is not None:
            error = TimeoutError(outcome.failure.message)
        elif isinstance(error, Undecodable) and error.__cause__ is not None:
            error = error.__cause__
        status: Status = "failed" if is_last(outcome, run.lease) else "retrying"
        try:
            execution = await self._call(run, Execution(context_of(run), status, error=error))
        except asyncio.CancelledError:
            return outcome
        failure = outcome.failure
        if execution.error is not None and execution.error is not error:
            failure = failure_of(execution.error)
            run.error = execution.error
        return Fail(failure, outcome.retry_in_ms, outcome.final, execution.ttl_ms)

    async def _call(self, run: Run, execution: Execution) -> Execution:
        for hook in self._hooks:
            before = execution.copy()
            try:
                answer = hook(execution)
                if inspect.isawaitable(answer):
                    await answer
            except (Exception, SystemExit) as error:
                logger.exception("the after-execution hook %r failed for job %r", hook, run.lease.id)
                execution.take_back(before)
                self._failed(error, run)
        return execution


def _expiry(run: Run) -> JobExpired:
    return JobExpired(FAILURE_TEXTS["Expired"], job_id=run.lease.id)
