"""``@app.dead_letter``: a function for the jobs of a queue that have failed for good."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.core.deadletter import DeadLetter, encode_options
from penstock.core.display import get_logger, shown
from penstock.errors import InvalidOption
from penstock.options import PLACEMENT

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.task import Task
    from penstock.worker.worker import Worker

__all__ = ["DeadLetter", "handle_dead_letters"]

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
