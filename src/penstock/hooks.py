"""What an app lets its user put around its work: around enqueues and runs, and at both ends of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.intake import EnqueueMiddleware, Intake

if TYPE_CHECKING:
    from penstock.worker.after import AfterExecution
    from penstock.worker.hooks import Hook
    from penstock.worker.middleware import Middleware

__all__ = ["AppHooks"]


class AppHooks:
    """``App`` has all of this. Each method gives back what it was given, so that it may be a decorator."""

    def __init__(self, *, max_payload: int) -> None:
        self.start_hooks: list[Hook] = []
        self.stop_hooks: list[Hook] = []
        self.middlewares: list[Middleware] = []
        self.after_hooks: list[AfterExecution] = []
        self.intake = Intake(max_payload=max_payload)
        """What jobs go through on their way in: for the parts of Penstock, not for its users."""

    def on_start(self, hook: Hook) -> Hook:
        """Call ``hook`` (with the worker, if it takes one argument) when a worker of this app starts, before its
        first claim. What it raises keeps the worker from starting."""
        self.start_hooks.append(hook)
        return hook

    def on_stop(self, hook: Hook) -> Hook:
        """Call ``hook`` when a worker of this app has stopped, after its last settle; last registered, first called."""
        self.stop_hooks.append(hook)
        return hook

    def middleware(self, layer: Middleware) -> Middleware:
        """Put ``async def layer(context, call_next) -> result`` around every run of every worker of this app.

        The first registered is the outermost; those given to a worker are inside.
        """
        self.middlewares.append(layer)
        return layer

    def enqueue_middleware(self, layer: EnqueueMiddleware) -> EnqueueMiddleware:
        """Put ``async def layer(call, call_next) -> answers`` around every enqueue of this app, in async and sync code.

        The first registered is the outermost. See ``penstock.intake``.
        """
        self.intake.add(layer)
        return layer

    def after_execution(self, hook: AfterExecution) -> AfterExecution:
        """Call ``hook(execution)`` after every run that completed or failed, before the store has its end.

        It may set ``execution.result``, ``error`` and ``ttl``; see ``penstock.worker.after``. In the order they were
        registered; those given to a worker come last.
        """
        self.after_hooks.append(hook)
        return hook
