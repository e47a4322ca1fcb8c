"""What ``@app.task(...)`` gives: a decorator, typed for coroutine functions and for others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from msgspec.structs import replace

from penstock.client.options import PLACEMENT
from penstock.core.deadletter import DeadLetter, encode_options
from penstock.core.text import get_logger, shown
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.task import FunctionTask, Task
    from penstock.worker.context import JobContext
    from penstock.worker.worker import Worker


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Decorator:
    """Makes a function a task of ``app``."""

    def __init__(self, app: App, name: str | None, queue: str, given: Mapping[str, Any]) -> None:
        self._arguments = (name, queue, given)
        self._app = app

    def _make(self, func: Callable[..., Any]) -> Any:
        return self._app.add_task(func, *self._arguments)


class Other:
    """A class that nobody uses: a first parameter that accepts it accepts anything, so it is not for the context."""


class TaskDecorator(_Decorator):
    """For a function of one job's arguments.

    A first parameter for the ``JobContext`` is not one of the job's arguments. A function whose first parameter
    accepts anything keeps its result type, but its arguments are not checked: a type checker cannot tell ``Any`` from
    the context.
    """

    @overload
    def __call__(
        self, func: Callable[Concatenate[Other, ...], Coroutine[Any, Any, R]]
    ) -> FunctionTask[..., R, ..., Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]]
    ) -> FunctionTask[P, R, Concatenate[JobContext, P], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine is also an R; the first overload wins
        self, func: Callable[P, Coroutine[Any, Any, R]]
    ) -> FunctionTask[P, R, P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[Other, ...], R]) -> FunctionTask[..., R, ..., R]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[JobContext, P], R]
    ) -> FunctionTask[P, R, Concatenate[JobContext, P], R]: ...
    @overload
    def __call__(self, func: Callable[P, R]) -> FunctionTask[P, R, P, R]: ...
    def __call__(self, func: Callable[..., Any]) -> Any:
        return self._make(func)


class BatchDecorator(_Decorator):
    """For a function of lists: its jobs take one item, and give one result."""

    @overload
    def __call__(
        self, func: Callable[[list[T]], Coroutine[Any, Any, Sequence[R]]]
    ) -> FunctionTask[[T], R, [list[T]], Coroutine[Any, Any, Sequence[R]]]: ...
    @overload
    def __call__(
        self, func: Callable[[list[T]], Sequence[R]]
    ) -> FunctionTask[[T], R, [list[T]], Sequence[R]]: ...
    @overload
    def __call__(self, func: Callable[[list[T]], R]) -> FunctionTask[[T], Any, [list[T]], R]: ...
    @overload
    def __call__(self, func: Callable[P, R]) -> FunctionTask[..., Any, P, R]: ...
    def __call__(self, func: Callable[..., Any]) -> Any:
        return self._make(func)


# ``@app.dead_letter``: a function for the jobs of a queue that have failed for good.


logger = get_logger("penstock.worker")


def handle_dead_letters(
    app: App, queue: str, func: Callable[[DeadLetter], Any], *, into: str, options: Mapping[str, Any]
) -> Task[..., Any]:
    """Make ``func`` the task for dead letters of ``queue``, which go ``into`` another one.

    Workers of the app see to the queue's settings when they start.
    """
    _refuse_placement(options)
    task = app.add_task(_by_parts(func), f"{queue}.dead_letter", into, options)

    async def set_up(worker: Worker) -> None:
        consumed = worker.options.queues
        if queue in consumed and into not in consumed:
            logger.info(
                "This worker consumes queue %s, but not %s, where the dead letters of %s wait for their task: add -q "
                "%s here, or start a worker for it",
                *(queue, into, queue, into),
            )
        storage = await app.connect()
        found = await storage.settings(queue)
        wanted = replace(
            found,
            dead_letter=into,
            dead_letter_task=task.name,
            dead_letter_options=encode_options(task.defaults),
        )
        if wanted != found:
            await storage.configure(queue, wanted)

    app.on_start(set_up)
    return task


def _refuse_placement(options: Mapping[str, Any]) -> None:
    """Raise ``InvalidOption`` for an option that a job has from its enqueue: the store enqueues letters."""
    for name in sorted(PLACEMENT & options.keys()):
        raise InvalidOption(f"{name}={shown(options[name])} cannot be given to a dead letter. Leave it out.")


def _by_parts(func: Callable[[DeadLetter], Any]) -> Callable[..., Any]:
    """A task's payload is an object by parameter name; the function takes it as a whole."""

    # Keyword-only, because a task's arguments are known by their names.
    async def handle(
        *, queue: str, id: str, task: str, payload: Any, error: dict[str, str], failures: int, failed_at: int
    ) -> Any:
        return await func(_letter(locals()))

    def handle_in_thread(
        *, queue: str, id: str, task: str, payload: Any, error: dict[str, str], failures: int, failed_at: int
    ) -> Any:
        return func(_letter(locals()))

    handler = handle if inspect.iscoroutinefunction(func) else handle_in_thread
    name = getattr(func, "__name__", "dead_letter")
    handler.__name__ = handler.__qualname__ = name
    return handler


def _letter(parts: dict[str, Any]) -> DeadLetter:
    return DeadLetter(**{name: parts[name] for name in DeadLetter.__struct_fields__})
