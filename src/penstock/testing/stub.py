"""Stubs: replacements for the work of a task in a test."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class Stub:
    """Replaces the work of a task; made by ``Harness.stub``. ``calls`` has the arguments by name of each run.

    It lasts until ``remove()`` or the end of its ``with`` block.
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
        """Return or raise the stubbed outcome of a run."""
        self.calls.append(arguments)
        if self._raises is not None:
            raise self._raises.with_traceback(None)
        if self._does is None:
            return self._returns
        answer = self._does(**arguments)
        return await answer if inspect.isawaitable(answer) else answer

    def remove(self) -> None:
        """Let the task do its own work again."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
