"""Batches: the runs of one handler, gathered until the batch is full or its first run has waited long enough.

Every job keeps its own run, with lease, heartbeat, timeout, middleware and outcome; only the call of the handler is
shared. A run decodes its payload, so that only a bad job fails, joins a batch and waits for its part of the answer:

======================================  ==========================================================================
the handler returns a list              item i is the result of job i, or its exception
the handler returns a mapping           results by job id; a job that is missing fails
the handler returns ``None``            all jobs complete, without a result
the handler raises                      every job of the batch raises the same
a job waits (``sleep``, ``wait_for``)   it fails for good with ``StepError``; the others run again
a job is cancelled, expires or is lost  it leaves; the handler continues for the others, and stops after the last
a job times out                         the handler is stopped for all jobs: the shortest timeout counts
======================================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import Parameter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.client.decorators import Batching
from penstock.core.outcome import Abort, Undecodable
from penstock.errors import InvalidInput, Snooze, StepError
from penstock.worker.context import context_of
from penstock.worker.run import Call, Run

if TYPE_CHECKING:
    from penstock.client.task import Task


class BatchMismatch(Exception):
    """The return value of a batch handler cannot be divided into one result for each job."""


class Timeout(Exception):
    """The batch was stopped because another of its jobs timed out."""


class Member(NamedTuple):
    """A run in a batch. ``part`` becomes its result, or a ``_Raised``."""

    run: Run
    item: Any
    part: asyncio.Future[Any]


class _Raised(NamedTuple):
    error: BaseException
    # Kept separately: every member raises the same object, and each raise would extend its traceback.
    traceback: TracebackType | None


class Batch:
    """The members of one call of the handler. ``call`` is set once it has started."""

    __slots__ = ("call", "members", "overdue", "timer")

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.timer: asyncio.TimerHandle | None = None
        self.call: asyncio.Task[None] | None = None
        self.overdue: Run | None = None

    @property
    def items(self) -> list[Any]:
        return [member.item for member in self.members]

    @property
    def started_at(self) -> float:
        return self.members[0].run.started_at

    @started_at.setter
    def started_at(self, value: float) -> None:
        for member in self.members:
            member.run.started_at = value


class Batcher:
    """Gathers the runs of one handler, on the worker's loop.

    ``handle(batch)`` calls the handler and returns its result. ``most`` is the highest number of runs at a time, so a
    batch does not wait for more.
    """

    def __init__(self, batching: Batching, *, most: int, handle: Callable[[Batch], Awaitable[Any]]) -> None:
        self._size = min(batching.size, most)
        self._wait_s = batching.wait_ms / 1000
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        # The handler's context, copied here, where no job's variables are set.
        self._context = contextvars.copy_context()
        self._filling: Batch | None = None

    async def join(self, run: Run, item: Any) -> Any:
        """Wait for the run's part of a batch; return its result or raise its exception."""
        run.started_at = 0.0  # the timeout starts with the batch
        member = Member(run, item, self._loop.create_future())
        batch = self._add(member)
        try:
            part = await member.part
        except asyncio.CancelledError:
            await self._leave(batch, member)
            raise
        if type(part) is _Raised:
            raise part.error.with_traceback(part.traceback)
        return part

    def flush(self) -> None:
        """Start the current batch, because no more runs will join."""
        if self._filling is not None:
            self._begin(self._filling)

    def _add(self, member: Member) -> Batch:
        batch = self._filling
        if batch is None:
            batch = self._filling = Batch()
            batch.timer = self._loop.call_later(self._wait_s, self._begin, batch, context=self._context)
        batch.members.append(member)
        if len(batch.members) >= self._size:
            self._begin(batch)
        return batch

    def _begin(self, batch: Batch) -> None:
        self._close(batch)
        for member in batch.members:
            if member.run.abort is not None:  # a run that waits for a thread is not woken to leave
                member.run.saw_abort = True
                _tell(member, None)
        batch.members = [member for member in batch.members if not member.part.done()]
        if batch.members:
            batch.started_at = time.monotonic()
            batch.call = self._loop.create_task(self._run(batch), context=self._context.copy())

    def _close(self, batch: Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        if self._filling is batch:
            self._filling = None

    async def _leave(self, batch: Batch, member: Member) -> None:
        """Take a run that must stop out of its batch. Return when the handler no longer works for it."""
        if batch.call is None:
            batch.members.remove(member)
            if not batch.members:
                self._close(batch)
            return
        if member.run.abort is Abort.TIMEOUT:
            batch.overdue = batch.overdue or member.run
        elif member.run.abort is not Abort.RELEASE and not all(m.part.done() for m in batch.members):
            return
        if not batch.call.done():
            batch.call.cancel()
            await asyncio.wait([batch.call])

    async def _run(self, batch: Batch) -> None:
        try:
            answer = await self._handle(batch)
            parts = _parts(batch.members, answer)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raised = _overdue(batch.overdue) if batch.overdue is not None else error
            parts = _raised_parts(batch.members, raised)
        for member, part in zip(batch.members, parts, strict=True):
            _tell(member, part)


def _tell(member: Member, part: Any) -> None:
    if not member.part.done():
        member.part.set_result(part)


def _raised_parts(members: Sequence[Member], error: BaseException) -> list[Any]:
    """Return the parts of a call that raised: all raise the same, unless it was the wait of one of them.

    Then the others run again, and lose no attempt.
    """
    refusals = [_refusal(member.run) for member in members]
    if not any(refusal is not None and _is_in(refusal, error) for refusal in refusals):
        return [_Raised(error, error.__traceback__)] * len(members)
    again = Snooze(0)
    return [_Raised(refusal or again, None) for refusal in refusals]


def _refusal(run: Run) -> StepError | None:
    return None if run.context is None else run.context.refusal


def _is_in(part: Exception, error: BaseException) -> bool:
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return error is part or any(_is_in(part, each) for each in inner)


def _parts(members: Sequence[Member], answer: Any) -> Sequence[Any]:
    if answer is None:
        return [None] * len(members)
    if isinstance(answer, Mapping):
        return _parts_by_id(members, answer)
    if not isinstance(answer, list | tuple):
        raise BatchMismatch(
            f"the handler returned a {type(answer).__qualname__} for a batch of {len(members)} jobs. "
            "Return a list with one result for each job, a dict by job id, or None."
        )
    if len(answer) != len(members):
        raise BatchMismatch(
            f"the handler returned {len(answer)} results for a batch of {len(members)} jobs. Return one for each job, "
            "in the order of the items; an exception in place of a result fails only that job."
        )
    return [_part(item) for item in answer]


def _parts_by_id(members: Sequence[Member], answer: Mapping[Any, Any]) -> list[Any]:
    ids = [member.run.lease.id for member in members]
    unknown = answer.keys() - set(ids)
    if unknown:
        raise BatchMismatch(
            f"the handler returned a result for {min(map(str, unknown))!r}, which is not a job of its batch. "
            "The keys are job ids: job.id of a parameter annotated with list[JobContext]."
        )
    missing = BatchMismatch(
        "the handler returned results for other jobs of its batch, but none for this one."
    )
    return [_part(answer[id]) if id in answer else _Raised(missing, None) for id in ids]


def _part(item: Any) -> Any:
    if not isinstance(item, BaseException):
        return item
    # Raised as it is, a SystemExit or CancelledError would end the process or the task.
    error = (
        item if isinstance(item, Exception) else RuntimeError(f"the handler returned {item!r} for this job")
    )
    return _Raised(error, error.__traceback__)


def _overdue(run: Run) -> Timeout:
    return Timeout(
        f"the batch was stopped: its job {run.lease.id!r} had a timeout of {run.lease.options.timeout_ms} ms"
    )


def table_of(kind: str) -> Callable[[Sequence[dict[str, Any]]], Any]:
    """Return a function that makes a ``Table`` or ``RecordBatch`` of rows. Missing columns of a row become null."""
    import pyarrow as pa

    of = pa.Table.from_arrays if kind == "Table" else pa.RecordBatch.from_arrays

    def make(rows: Sequence[dict[str, Any]]) -> Any:
        names = list(dict.fromkeys(name for row in rows for name in row))
        return of([pa.array([row.get(name) for row in rows]) for name in names], names)

    return make


def by_row(answer: Any) -> Any:
    """Return the rows of a table as dicts or the items of an array; anything else unchanged, awaitables awaited."""
    if inspect.isawaitable(answer):
        return _awaited(answer)
    return answer.to_pylist() if hasattr(answer, "to_pylist") else answer


async def _awaited(answer: Any) -> Any:
    return by_row(await answer)


def bind(task: Task[..., Any], batcher: Batcher) -> Call:
    """Return a call that decodes the payload, so that only a bad job fails, and joins a batch."""
    unpack, serde = task.signature.unpack, task.serde

    def call(run: Run) -> Any:
        try:
            (item,), _ = unpack(run.lease.payload, serde)
        except InvalidInput as error:
            raise Undecodable from error
        return batcher.join(run, item)

    return call


def calling(task: Task[..., Any]) -> Callable[[Batch], Any]:
    """Return a function that calls the task's function with the items of a batch, and contexts if it takes them."""
    func = task.func
    assert task.batching is not None
    contexts = task.batching.contexts
    make = table_of(task.batching.table) if task.batching.table else None
    if make is None and not contexts:
        return lambda batch: func(batch.items)
    arguments = _arguments(func, contexts)

    def call(batch: Batch) -> Any:
        args, kwargs = arguments(batch, batch.items if make is None else make(batch.items))
        answer = func(*args, **kwargs)
        return answer if make is None else by_row(answer)

    return call


def _arguments(
    func: Callable[..., Any], contexts: str
) -> Callable[[Batch, Any], tuple[list[Any], dict[str, Any]]]:
    """Return a function that arranges the items of a batch as arguments for ``func``."""
    kinds = {p.name: p.kind for p in inspect.signature(func).parameters.values()}
    by_name = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    by_order = [name for name in kinds if name not in by_name]

    def arrange(batch: Batch, items: Any) -> tuple[list[Any], dict[str, Any]]:
        values = dict.fromkeys(kinds, items)
        if contexts:
            values[contexts] = [context_of(member.run) for member in batch.members]
        return [values[name] for name in by_order], {name: values[name] for name in by_name}

    return arrange
