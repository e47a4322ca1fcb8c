"""Handlers: the code that runs the jobs of each task, and of queues whose jobs have no task.

A job whose task is not registered here is handed back, because during a rolling deploy another worker may know the
task. The job returns after a delay that grows to 10 s, and no attempt is used up. A strict group keeps its order
meanwhile. It fails once ``unknown_after`` has passed since this worker first saw it.
"""

from __future__ import annotations

import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NamedTuple, assert_never

from penstock.client.causes import ALIKE
from penstock.client.decorators import Batching
from penstock.core.command import COMMAND_TASK
from penstock.core.names import check_queue
from penstock.core.outcome import HandedBack
from penstock.core.text import get_logger
from penstock.errors import InvalidOption, SerializationError, UnknownTask
from penstock.worker.context import JobContext, context_of
from penstock.worker.middleware import Middleware, compose
from penstock.worker.run import Call, Handler, Run
from penstock.worker.runners import batched, thread
from penstock.worker.runners.batched import Batch, Batcher
from penstock.worker.runners.command import CommandRunner
from penstock.worker.runners.process import ProcessRunner
from penstock.worker.runners.sandbox import SandboxRunner
from penstock.worker.runners.thread import ThreadRunner

if TYPE_CHECKING:
    from penstock.client.task import Task
    from penstock.worker.worker import Worker


HandlerFunction = Callable[[JobContext], Any]
"""Takes the job, whose ``payload`` holds the bytes as enqueued. The app's result serde encodes what it returns.
A coroutine function runs on the loop, any other function in a thread."""

BatchFunction = Callable[[list[JobContext]], Any]
"""Takes several jobs. ``runners.batched`` describes how its return value is divided among them."""

logger = get_logger("penstock.worker")

_FIRST_DELAY_MS: Final = 250
_LONGEST_DELAY_MS: Final = 10_000
# Of more jobs, the oldest are forgotten: they wait longer before they fail.
_MOST_WATCHED: Final = 10_000
_MOST_NAMES: Final = 100
# A task is listed until this time has passed since its last job.
_LISTED_S: Final = 600.0


class QueueHandler(NamedTuple):
    """A function for the jobs of a queue; ``batching`` says how jobs are gathered if it takes several."""

    function: Callable[[Any], Any]
    batching: Batching | None = None


class QueueHandlers:
    """The functions for jobs without a task, by queue."""

    def __init__(self) -> None:
        self.by_queue: dict[str, QueueHandler] = {}

    def add(
        self, queue: str, function: HandlerFunction | BatchFunction, batching: Batching | None = None
    ) -> None:
        """Add the function of a queue. Raise ``InvalidOption`` if the queue already has one."""
        if check_queue(queue) in self.by_queue:
            raise InvalidOption(f"queue {queue!r} already has a handler. Remove one of the two.")
        self.by_queue[queue] = QueueHandler(function, batching)


def _calling(function: Callable[[Any], Any], threads: ThreadRunner | None) -> Call:
    if threads is None:
        return lambda run: function(context_of(run))
    return lambda run: threads.run(lambda run: function(context_of(run)), run)


def _joining(batcher: Batcher) -> Call:
    return lambda run: batcher.join(run, context_of(run))


def _pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if len(args) == 1 and isinstance(args[0], bytes) and not kwargs:
        return args[0]
    raise SerializationError("a job without a task takes its payload as one argument of type bytes.")


class UnknownTasks:
    """The jobs that this worker received and cannot run. Only its loop changes this."""

    def __init__(self, after_ms: int, known: Collection[str] = ()) -> None:
        self._after_s = after_ms / 1000
        self._known = known
        self._seen_at: OrderedDict[tuple[str, str, int], float] = OrderedDict()
        self._names: dict[str, float] = {}

    def hand_back(self, run: Run, error: UnknownTask) -> Exception:
        """Return the exception for the run: ``HandedBack``, or ``error`` if the job has waited long enough."""
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
        """Return the unknown tasks seen lately. Any thread may call this."""
        listed_since = time.monotonic() - _LISTED_S
        return tuple(sorted(name for name, at in list(self._names.items()) if at >= listed_since))

    def _note(self, name: str, now: float, error: UnknownTask) -> None:
        if name not in self._names:
            close = get_close_matches(name, self._known, n=1, cutoff=ALIKE)
            logger.warning(
                "%s%s Jobs of this task are handed back until another worker takes them.",
                error,
                f" Did you mean {close[0]!r}?" if close else "",
            )
        if name in self._names or len(self._names) < _MOST_NAMES:
            self._names[name] = now


class Handlers:
    """Makes the handlers of ``worker``, with their own threads and processes. ``by_task`` has those made so far."""

    def __init__(
        self, worker: Worker, middleware: Sequence[Middleware], *, unknown_after_ms: int = 0
    ) -> None:
        app, options = worker.app, worker.options
        self._app = app
        self._tasks = app.tasks
        self._encode_untyped = app.result_serde.encode
        self._queue_handlers = worker.handlers
        self._middleware = tuple(middleware)
        self._threads = ThreadRunner(options.threads, app.sync_middlewares)
        self._processes = ProcessRunner(options.child_processes)
        self._sandboxes = SandboxRunner(options.child_processes)
        self._concurrency = options.concurrency
        self._commands = None if options.commands is None else CommandRunner(options.commands)
        self.unknown = UnknownTasks(unknown_after_ms, self._tasks)
        self.by_task: dict[str, Handler] = {}
        self._without_task: dict[str, Handler] = {}
        self._batchers: list[Batcher] = []

    def make(self, queue: str, name: str) -> Handler:
        """Return the handler of a task, or of a queue's jobs without one. Keep it, unless it can only refuse jobs."""
        task = self._tasks.get(name)
        if task is not None:
            try:
                handler = self.by_task[name] = self._for_task(task)
            except Exception as error:
                refusal = error
                return _refusing(name, lambda _: refusal)
            return handler
        if name == COMMAND_TASK:
            return self._for_commands()
        if not name:
            return self._without_task.get(queue) or self._for_queue(queue)
        # Another time the task may be registered.
        return self._handing_back(name, _unknown_task(name))

    def _for_commands(self) -> Handler:
        if self._commands is None:
            return self._handing_back(COMMAND_TASK, _no_commands())
        call = self._wrap(self._commands.call)
        handler = self.by_task[COMMAND_TASK] = Handler(
            COMMAND_TASK, "async", call, self._encode_untyped, _pack_command
        )
        return handler

    def _handing_back(self, name: str, error: UnknownTask) -> Handler:
        return _refusing(name, lambda run: self.unknown.hand_back(run, error))

    def _for_queue(self, queue: str) -> Handler:
        if queue not in self._queue_handlers.by_queue:
            return self._for_app_handler(queue)
        function, batching = self._queue_handlers.by_queue[queue]
        is_async = inspect.iscoroutinefunction(function)
        if batching is not None:
            call = _joining(self._batcher(batching, lambda batch: function(batch.items), is_async=is_async))
        else:
            call = _calling(function, None if is_async else self._threads)
        handler = self._without_task[queue] = Handler(
            "",
            "async" if is_async else "thread",
            self._wrap(call),
            self._encode_untyped,
            _pack,
            is_batched=batching is not None,
        )
        return handler

    def _for_app_handler(self, queue: str) -> Handler:
        definition = self._app.handlers.get(queue)
        if definition is None:  # Another time the app may have one.
            return self._handing_back("", _no_handler(queue))
        handler = self._without_task[queue] = self._for_task(definition)._replace(task="")
        return handler

    def _for_task(self, task: Task[..., Any]) -> Handler:
        return Handler(
            task.name,
            task.runner,
            self._wrap(self._call_of(task)),
            task.result_serde.encode,
            lambda args, kwargs: task.signature.encode(args, kwargs, serde=task.serde),
            task,
            is_batched=task.batching is not None,
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
        """Start the batches as they are, because no more jobs will come."""
        for batcher in self._batchers:
            batcher.flush()

    def close(self) -> None:
        """Close the threads and processes."""
        self._threads.close()
        self._processes.close()
        self._sandboxes.close()


def _pack_command(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    raise InvalidOption("a command job cannot change its payload.")


def _no_handler(queue: str) -> UnknownTask:
    return UnknownTask(
        f"the job has no task, and this worker has no handler for jobs without a task in queue {queue!r}. "
        f'Add one with @app.handler("{queue}"), or let another process work on this queue.'
    )


def _no_commands() -> UnknownTask:
    return UnknownTask(
        "this worker does not run commands. Start one with `penstock worker --commands` or app.worker(commands=True); "
        "use a separate queue for commands if other workers must not take them."
    )


def _unknown_task(name: str) -> UnknownTask:
    return UnknownTask(
        f"no task {name!r} is registered in this worker's app. "
        "Import the module that defines it before the worker starts, or deploy it here."
    )


def _refusing(name: str, error_for: Callable[[Run], Exception]) -> Handler:
    """Return a handler whose runs raise the error that ``error_for`` returns."""

    async def call(run: Run) -> Any:
        raise error_for(run).with_traceback(None)

    def pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        raise UnknownTask(f"no task {name!r} is registered in this worker's app.")

    return Handler(name, "async", call, bytes, pack)
