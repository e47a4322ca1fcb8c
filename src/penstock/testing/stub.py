"""Stubs: what a task does in a test instead of its work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class Stub:
    """Made by ``Harness.stub``; ``calls`` are the arguments by name of the runs it stood in for.

    In force until ``remove()``, or until a ``with`` block around it is left.
    """

    def __init__(
        self,
        *,
        returns: Any,
        raises: BaseException | None,
        does: Callable[..., Any] | None,
        end: Callable[[], None],
    ) -> None:
        self.calls: list[dict[str, Any]] = []
        self._returns = returns
        self._raises = raises
        self._does = does
        self._end = end

    async def answer(self, arguments: dict[str, Any]) -> Any:
        """What the task returns, or raises, this time."""
        self.calls.append(arguments)
        if self._raises is not None:
            raise self._raises.with_traceback(None)
        if self._does is None:
            return self._returns
        answer = self._does(**arguments)
        return await answer if inspect.isawaitable(answer) else answer

    def remove(self) -> None:
        """The task does its own work again."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
