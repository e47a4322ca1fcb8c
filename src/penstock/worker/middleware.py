"""Hooks and middleware of a worker: at its start and stop, around every run, and after every run.

Middleware wraps every run::

    async def timed(context, call_next):
        started = time.perf_counter()
        try:
            return await call_next()
        finally:
            histogram.observe(time.perf_counter() - started)

The first one in the list is the outermost. It returns the job's result; an exception in it counts as one of the
handler. A result from another process arrives as ``EncodedResult``.

After-execution hooks see how a run ended, and may change what the store keeps of it::

    @app.after_execution
    async def keep_while_fresh(execution: Execution) -> None:
        if execution.status == "completed":
            execution.ttl = execution.result["max_age"]

They run once for every run that completed, failed or was stopped because its ttl had passed, before the outcome is
settled. They do not run for runs that were snoozed, cancelled or handed back. They cannot change the outcome itself.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Literal

from penstock.core.outcome import FAILURE_TEXTS, Abort, Fail, Outcome, Undecodable, failure_of, is_last
from penstock.core.text import get_logger
from penstock.core.units import Duration, describe, milliseconds
from penstock.errors import InvalidOption, JobExpired
from penstock.worker.context import JobContext, context_of
from penstock.worker.run import Call, Run

if TYPE_CHECKING:
    from penstock.worker.worker import Worker


Hook = Callable[..., Any]
"""Takes the worker or no argument; may be a coroutine function."""

logger = get_logger("penstock.worker")


async def run_start_hooks(hooks: Sequence[Hook], worker: Worker) -> None:
    """Call the hooks in order, before the first claim. An exception keeps the worker from starting."""
    for hook in hooks:
        await _call(hook, worker)


async def run_stop_hooks(hooks: Sequence[Hook], worker: Worker) -> None:
    """Call the hooks in reverse order, after the last settle. Log exceptions, so that all hooks run."""
    for hook in reversed(hooks):
        try:
            await _call(hook, worker)
        except Exception:
            logger.exception("the stop hook %r failed", hook)


async def _call(hook: Hook, worker: Worker) -> None:
    answer = hook(worker) if inspect.signature(hook).parameters else hook()
    if inspect.isawaitable(answer):
        await answer


CallNext = Callable[[], Awaitable[Any]]
Middleware = Callable[[JobContext, CallNext], Awaitable[Any]]


def compose(middleware: Sequence[Middleware], call: Call) -> Call:
    """Return ``call`` wrapped in all of ``middleware``."""
    for layer in reversed(middleware):
        call = _wrapped(layer, call)
    return call


def _wrapped(layer: Middleware, inner: Call) -> Call:
    def call(run: Run) -> Awaitable[Any]:
        return layer(context_of(run), lambda: inner(run))

    return call


Status = Literal["completed", "retrying", "failed"]


class Execution:
    """A finished run. Hooks may set ``result``, ``error`` and ``ttl``; the rest is read-only.

    ``status`` is ``completed``, ``failed`` (for good) or ``retrying`` (failed, with attempts left). The store decides
    in the end: it does not retry a job that is being cancelled.
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
        # Called on first use, because a result from another process is encoded.
        self._read_result = read_result
        self._result: Any = None
        self._error = error
        self._ttl_ms: int | None = None

    def __repr__(self) -> str:
        return f"<Execution {self.job!r} {self.status}>"

    @property
    def result(self) -> Any:
        """Return the handler's result; ``None`` if it failed. Set it to store something else."""
        if self._read_result is not None:
            self._result, self._read_result = self._read_result(), None
        return self._result

    @result.setter
    def result(self, value: Any) -> None:
        if self.status != "completed":
            raise InvalidOption(
                f"job {self.job.id!r} has failed, so it has no result. Set its error instead."
            )
        self._result, self._read_result = value, None

    @property
    def error(self) -> BaseException | None:
        """Return the handler's error, a ``TimeoutError`` or a ``JobExpired``. Set it to store another error.

        Its class does not affect whether the job is retried. The error of an expired job cannot be changed.
        """
        return self._error

    @error.setter
    def error(self, value: BaseException) -> None:
        if self.status == "completed":
            raise InvalidOption(
                f"job {self.job.id!r} has completed, so it has no error. Set its result instead."
            )
        if not isinstance(value, BaseException):
            raise InvalidOption(f"error must be an exception, such as ValueError('...'), got {value!r:.80}.")
        self._error = value

    @property
    def ttl(self) -> str | None:
        """Return how long the result or failure is kept, if a hook set it; ``None`` means as the job's options say.

        Set it to any duration. It has no effect on a failure that is retried.
        """
        return None if self._ttl_ms is None else describe(self._ttl_ms)

    @ttl.setter
    def ttl(self, value: Duration | None) -> None:
        self._ttl_ms = None if value is None else milliseconds(value, what="ttl")

    @property
    def ttl_ms(self) -> int | None:
        """Return ``ttl`` in milliseconds."""
        return self._ttl_ms

    def restore(self, before: Execution) -> None:
        """Take over the state of ``before``, a copy."""
        for name in self.__slots__:
            setattr(self, name, getattr(before, name))

    @property
    def is_read(self) -> bool:
        """Return whether a hook read or changed the result."""
        return self._read_result is None


AfterExecution = Callable[[Execution], Awaitable[None] | None]
"""Takes the execution. Runs on the worker's loop: a coroutine function, or a function that returns quickly."""


class AfterHooks:
    """Calls the hooks in order.

    If a hook raises, its changes are undone, and the error goes to ``failed``. The outcome is settled anyway: to repeat
    the run because of a hook would be worse.
    """

    def __init__(self, hooks: Sequence[AfterExecution], failed: Callable[[BaseException, Run], None]) -> None:
        self._hooks = tuple(hooks)
        self._failed = failed

    async def completed(self, run: Run, read_result: Callable[[], Any]) -> Execution:
        """Call the hooks after a handler returned. The run ends after them; cancelling it stops them."""
        return await self._call(run, Execution(context_of(run), "completed", read_result=read_result))

    async def review(self, run: Run, error: BaseException, outcome: Outcome | None) -> Outcome | None:
        """Return ``outcome`` with the changes of the hooks. They see failures, which they may change, and expiries."""
        if isinstance(outcome, Fail):
            return await self._review_failure(run, error, outcome)
        if run.abort is Abort.EXPIRED:
            execution = Execution(context_of(run), "failed", error=_expiry(run))
            with suppress(asyncio.CancelledError):
                await self._call(run, execution)
        return outcome

    async def _review_failure(self, run: Run, error: BaseException, outcome: Fail) -> Fail:
        """Call the hooks for a failure or timeout. If the run is stopped meanwhile, the failure stays unchanged."""
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
            before = copy(execution)
            try:
                answer = hook(execution)
                if inspect.isawaitable(answer):
                    await answer
            except (Exception, SystemExit) as error:
                logger.exception("the after-execution hook %r failed for job %r", hook, run.lease.id)
                execution.restore(before)
                self._failed(error, run)
        return execution


def _expiry(run: Run) -> JobExpired:
    return JobExpired(FAILURE_TEXTS["Expired"], job_id=run.lease.id)
