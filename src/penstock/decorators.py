"""What ``@app.task(...)`` gives: a decorator, typed for coroutine functions and for others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.task import Task

__all__ = ["BatchDecorator", "TaskDecorator"]

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


class TaskDecorator(_Decorator):
    """For a function of one job's arguments."""

    @overload
    def __call__(self, func: Callable[P, Coroutine[Any, Any, R]]) -> Task[P, R]: ...
    @overload
    def __call__(self, func: Callable[P, R]) -> Task[P, R]: ...
    def __call__(self, func: Callable[..., Any]) -> Any:
        return self._make(func)


class BatchDecorator(_Decorator):
    """For a function of lists: its jobs take one item, and give one result."""

    @overload
    def __call__(self, func: Callable[[list[T]], Coroutine[Any, Any, Sequence[R]]]) -> Task[[T], R]: ...
    @overload
    def __call__(self, func: Callable[[list[T]], Sequence[R]]) -> Task[[T], R]: ...
    @overload
    def __call__(self, func: Callable[[list[T]], Any]) -> Task[[T], Any]: ...
    @overload
    def __call__(self, func: Callable[..., Any]) -> Task[..., Any]: ...
    def __call__(self, func: Callable[..., Any]) -> Any:
        return self._make(func)
