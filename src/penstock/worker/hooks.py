"""Lifecycle hooks: functions called when a worker starts and when it stops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.core.display import get_logger

if TYPE_CHECKING:
    from penstock.worker.worker import Worker

__all__ = ["Hook", "run_start_hooks", "run_stop_hooks"]

Hook = Callable[..., Any]
"""Takes the worker, or nothing; may be a coroutine function."""

logger = get_logger("penstock.worker")


async def run_start_hooks(hooks: Sequence[Hook], worker: Worker) -> None:
    """In order, before the first claim. What one raises keeps the worker from starting."""
    for hook in hooks:
        await _call(hook, worker)


async def run_stop_hooks(hooks: Sequence[Hook], worker: Worker) -> None:
    """In reverse order, after the last settle. What one raises is logged: the others have to run."""
    for hook in reversed(hooks):
        try:
            await _call(hook, worker)
        except Exception:
            logger.exception("the stop hook %r failed", hook)


async def _call(hook: Hook, worker: Worker) -> None:
    answer = hook(worker) if inspect.signature(hook).parameters else hook()
    if inspect.isawaitable(answer):
        await answer
