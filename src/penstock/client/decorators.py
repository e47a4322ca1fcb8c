"""The decorators that ``@app.task(...)`` and ``@app.dead_letter(...)`` return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from msgspec.structs import replace

from penstock.client.options import PLACEMENT
from penstock.core.flow import DeadLetter, encode_options
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
    """A decorator that makes a function a task of ``app``."""

    def __init__(self, app: App, name: str | None, queue: str, given: Mapping[str, Any]) -> None:
        self._arguments = (name, queue, given)
        self._app = app

    def _make(self, func: Callable[..., Any]) -> Any:
        return self._app.add_task(func, *self._arguments)


class Other:
    """A marker for type checkers: a parameter that accepts it accepts anything, so it is not for the context."""


class TaskDecorator(_Decorator):
    """The decorator for a function that takes the arguments of one job.

    A first parameter for the ``JobContext`` is not an argument of the job. If the first parameter accepts
    anything, type checkers cannot tell it from the context: they know the result type, but do not check arguments.
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
    """The decorator for a function that takes a list. Each job has one item and one result."""

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


# ``@app.dead_letter``

logger = get_logger("penstock.worker")


def handle_dead_letters(
    app: App, queue: str, func: Callable[[DeadLetter], Any], *, into: str, options: Mapping[str, Any]
) -> Task[..., Any]:
    """Make ``func`` the task for the dead letters of ``queue``, which go to the queue ``into``.

    Workers of the app configure the queue when they start.
    """
    _refuse_placement(options)
    task = app.add_task(_by_parts(func), f"{queue}.dead_letter", into, options)

    async def set_up(worker: Worker) -> None:
        consumed = worker.options.queues
        if queue in consumed and into not in consumed:
            logger.info(
                "This worker consumes queue %s, but not %s, which has its dead letters. Add -q %s, or start "
                "another worker for it",
                *(queue, into, into),
            )
        storage = await app.connect()
        current = await storage.settings(queue)
        settings = replace(
            current,
            dead_letter=into,
            dead_letter_task=task.name,
            dead_letter_options=encode_options(task.defaults),
        )
        if settings != current:
            await storage.configure(queue, settings)

    app.on_start(set_up)
    return task


def _refuse_placement(options: Mapping[str, Any]) -> None:
    """Raise ``InvalidOption`` for a placement option: the store enqueues dead letters, and ignores them."""
    for name in sorted(PLACEMENT & options.keys()):
        raise InvalidOption(f"{name}={shown(options[name])} does not apply to dead letters. Leave it out.")


def _by_parts(func: Callable[[DeadLetter], Any]) -> Callable[..., Any]:
    """Return a function with the fields of a ``DeadLetter`` as parameters: payloads are objects by parameter name."""

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
