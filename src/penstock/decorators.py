"""What ``@app.task(...)`` gives: a decorator, typed for coroutine functions and for others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.task import FunctionTask
    from penstock.worker.context import JobContext

__all__ = ["BatchDecorator", "Other", "TaskDecorator"]

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
