"""Plans: how the runs of each task are made, bound when its first job comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, assert_never

from penstock.batching import Batching
from penstock.core.command import COMMAND_TASK
from penstock.errors import InvalidOption, UnknownTask
from penstock.worker.batch import Batch, Batcher
from penstock.worker.middleware import Middleware, compose
from penstock.worker.run import Call, Plan, Run
from penstock.worker.runners import batched, inline
from penstock.worker.runners.command import CommandRunner
from penstock.worker.runners.process import ProcessRunner
from penstock.worker.runners.sandbox import SandboxRunner
from penstock.worker.runners.thread import ThreadRunner

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.task import Task
    from penstock.worker.handlers import Handlers

__all__ = ["Plans"]


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
                return _refusing(name, error)
            return plan
        if name == COMMAND_TASK:
            return self._plan_command()
        if not name:
            return self._untasked.get(queue) or self._plan_untasked(queue)
        # Not kept: the task may be registered later.
        return _refusing(name, _unknown(name))

    def _plan_command(self) -> Plan:
        if self._commands is None:
            return _refusing(COMMAND_TASK, _no_commands())
        call = self._wrap(self._commands.call)
        plan = self.by_task[COMMAND_TASK] = Plan(
            COMMAND_TASK, "async", call, self._encode_untyped, _pack_command
        )
        return plan

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


def _refusing(name: str, error: Exception) -> Plan:
    """Runs of this task fail; retries may reach a worker that can run it."""

    async def call(_: Run) -> Any:
        raise error.with_traceback(None)

    def pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        raise error

    return Plan(name, "async", call, bytes, pack)
