"""Handlers of queues whose jobs have no task: ``@worker.handler("queue")``."""

from __future__ import annotations

import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, assert_never

from penstock.client.batching import Batching
from penstock.core.command import COMMAND_TASK
from penstock.core.names import check_queue
from penstock.core.text import get_logger
from penstock.core.verdict import HandedBack
from penstock.errors import InvalidOption, SerializationError, UnknownTask
from penstock.worker.batch import Batch, Batcher
from penstock.worker.context import JobContext, context_of
from penstock.worker.middleware import Middleware, compose
from penstock.worker.run import Call, Plan, Run
from penstock.worker.runners import batched, thread
from penstock.worker.runners.command import CommandRunner
from penstock.worker.runners.process import ProcessRunner
from penstock.worker.runners.sandbox import SandboxRunner
from penstock.worker.runners.thread import ThreadRunner

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.task import Task


Handler = Callable[[JobContext], Any]
"""Gets the job, whose ``payload`` are the bytes as enqueued; what it returns is encoded by the app's result serde.
A coroutine function runs on the loop, any other in a thread."""

BatchHandler = Callable[[list[JobContext]], Any]
"""The same for several jobs at once; what it returns is told apart as ``worker.batch`` says."""

AnyHandler: TypeAlias = Handler | BatchHandler


class Bound(NamedTuple):
    """A handler, and how its jobs are gathered if it takes several."""

    handler: Callable[[Any], Any]
    batching: Batching | None = None


class MakeBatcher(Protocol):
    """Makes the one that gathers the runs of a handler."""

    def __call__(self, batching: Batching, handle: Callable[[Batch], Any], *, is_async: bool) -> Batcher: ...


class Handlers:
    """Handlers by queue."""

    def __init__(self) -> None:
        self.by_queue: dict[str, Bound] = {}

    def add(self, queue: str, handler: AnyHandler, batching: Batching | None = None) -> None:
        """Raises ``InvalidOption`` if the queue has one already."""
        if check_queue(queue) in self.by_queue:
            raise InvalidOption(f"queue {queue!r} has a handler already. Remove one of the two.")
        self.by_queue[queue] = Bound(handler, batching)

    def plan(
        self,
        queue: str,
        *,
        threads: ThreadRunner,
        batcher: MakeBatcher,
        wrap: Callable[[Call], Call],
        encode: Callable[[Any], bytes],
    ) -> Plan:
        """Return how jobs without a task of this queue are run. The queue must have a handler."""
        handler, batching = self.by_queue[queue]
        is_async = inspect.iscoroutinefunction(handler)
        if batching is not None:
            call = _joining(batcher(batching, lambda batch: handler(batch.items), is_async=is_async))
        else:
            call = _calling(handler, None if is_async else threads)
        return Plan("", "async" if is_async else "thread", wrap(call), encode, _pack)


def _calling(handler: Callable[[Any], Any], threads: ThreadRunner | None) -> Call:
    if threads is None:
        return lambda run: handler(context_of(run))
    return lambda run: threads.run(lambda run: handler(context_of(run)), run)


def _joining(batcher: Batcher) -> Call:
    return lambda run: batcher.join(run, context_of(run))


def no_handler(queue: str) -> UnknownTask:
    """Return the error of a job without a task in a queue that has no handler here."""
    return UnknownTask(
        f"the job has no task, and this worker has no handler for jobs of queue {queue!r} without one. "
        f'Add one by @worker.handler("{queue}"), or let another process work on this queue.'
    )


def _pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if len(args) == 1 and isinstance(args[0], bytes) and not kwargs:
        return args[0]
    raise SerializationError("a job without a task takes its payload as one argument of type bytes.")


# Plans: how the runs of each task are made, bound when its first job comes.
#
# A job that this worker cannot run, because its task is not registered here, is handed back: during a
# rolling deploy another worker knows it. It comes back after a delay that grows to 10 s and counts
# towards no limit. A strict group keeps its order meanwhile. The job fails once this worker has seen it
# for ``unknown_after``.


logger = get_logger("penstock.worker")

_FIRST_DELAY_MS: Final = 250
_LONGEST_DELAY_MS: Final = 10_000
# Of more jobs than this the oldest are forgotten, and wait for longer.
_MOST_WATCHED: Final = 10_000
_MOST_NAMES: Final = 100
# A task that has not come up for this long is no longer listed.
_LISTED_S: Final = 600.0


class Unknown:
    """The jobs that came here and that this worker cannot run. Changed on the worker's loop."""

    def __init__(self, after_ms: int) -> None:
        self._after_s = after_ms / 1000
        self._seen_at: OrderedDict[tuple[str, str, int], float] = OrderedDict()
        self._names: dict[str, float] = {}

    def hand_back(self, run: Run, error: UnknownTask) -> Exception:
        """Return what the run is to raise: ``HandedBack``, or ``error`` if the job has waited long enough."""
        if not self._after_s:
            return error
        now = time.monotonic()
        self._note(run.lease.options.task or f"(no task, queue {run.served.name})", now, error)
        first_seen_at = self._seen_at.setdefault((run.served.name, run.lease.id, run.lease.incarnation), now)
        if now - first_seen_at >= self._after_s:
            run.discarded = True
            return error
        while len(self._seen_at) > _MOST_WATCHED:
            self._seen_at.popitem(last=False)
        delay_ms = min(_FIRST_DELAY_MS << min(run.lease.run - 1, 10), _LONGEST_DELAY_MS)
        return HandedBack(delay_ms / 1000)

    def names(self) -> tuple[str, ...]:
        """Return the tasks that came up lately. May be called from any thread."""
        soonest = time.monotonic() - _LISTED_S
        return tuple(sorted(name for name, at in list(self._names.items()) if at >= soonest))

    def _note(self, name: str, now: float, error: UnknownTask) -> None:
        if name not in self._names:
            logger.warning("%s Jobs of this task are handed back until another worker takes them.", error)
        if name in self._names or len(self._names) < _MOST_NAMES:
            self._names[name] = now


class Plans:
    """``by_task`` are those that were made so far. ``concurrency`` bounds the size of a batch."""

    def __init__(
        self,
        app: App,
        *,
        handlers: Handlers,
        middleware: Sequence[Middleware],
        threads: ThreadRunner,
        processes: ProcessRunner,
        sandboxes: SandboxRunner,
        concurrency: int,
        commands: CommandRunner | None = None,
        unknown_after_ms: int = 0,
    ) -> None:
        self._tasks = app.tasks
        self._encode_untyped = app.result_serde.encode
        self._handlers = handlers
        self._middleware = tuple(middleware)
        self._threads = threads
        self._processes = processes
        self._sandboxes = sandboxes
        self._concurrency = concurrency
        self._commands = commands
        self.unknown = Unknown(unknown_after_ms)
        self.by_task: dict[str, Plan] = {}
        self._untasked: dict[str, Plan] = {}
        self._batchers: list[Batcher] = []

    def make(self, queue: str, name: str) -> Plan:
        """The plan of a task, or of a queue's jobs without one. Kept, unless it is to refuse."""
        task = self._tasks.get(name)
        if task is not None:
            try:
                plan = self.by_task[name] = self._bound(task)
            except Exception as error:
                refused = error
                return _refusing(name, lambda _: refused)
            return plan
        if name == COMMAND_TASK:
            return self._plan_command()
        if not name:
            return self._untasked.get(queue) or self._plan_untasked(queue)
        # Not kept: the task may be registered later.
        return self._handing_back(name, _unknown(name))

    def _plan_command(self) -> Plan:
        if self._commands is None:
            return self._handing_back(COMMAND_TASK, _no_commands())
        call = self._wrap(self._commands.call)
        plan = self.by_task[COMMAND_TASK] = Plan(
            COMMAND_TASK, "async", call, self._encode_untyped, _pack_command
        )
        return plan

    def _handing_back(self, name: str, error: UnknownTask) -> Plan:
        return _refusing(name, lambda run: self.unknown.hand_back(run, error))

    def _plan_untasked(self, queue: str) -> Plan:
        if queue not in self._handlers.by_queue:  # one may be added later
            return self._handing_back("", no_handler(queue))
        plan = self._handlers.plan(
            queue, threads=self._threads, batcher=self._batcher, wrap=self._wrap, encode=self._encode_untyped
        )
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
                return thread.bind(task)
            case "thread":
                return self._threads.bind(task)
            case "process":
                return self._processes.bind(task)
            case "sandbox":
                return self._sandboxes.bind(task)
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

    def hurry(self) -> None:
        """No more jobs will come: begin with batches that are not full."""
        for batcher in self._batchers:
            batcher.flush()

    def close(self) -> None:
        """Let go of threads and processes."""
        self._threads.close()
        self._processes.close()
        self._sandboxes.close()


def _pack_command(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    raise InvalidOption("the payload of a command job is not changed by its run.")


def _no_commands() -> UnknownTask:
    return UnknownTask(
        "this worker does not run commands. Start one by `penstock worker --commands`, or app.worker(commands=True); "
        "give them a queue of their own if other workers are not to take them."
    )


def _unknown(name: str) -> UnknownTask:
    return UnknownTask(
        f"no task {name!r} is registered in this worker's app. "
        "Import the module that defines it before the worker starts, or deploy it here."
    )


def _refusing(name: str, error_for: Callable[[Run], Exception]) -> Plan:
    """Runs of this task raise what ``error_for`` returns."""

    async def call(run: Run) -> Any:
        raise error_for(run).with_traceback(None)

    def pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        raise UnknownTask(f"no task {name!r} is registered in this worker's app.")

    return Plan(name, "async", call, bytes, pack)
