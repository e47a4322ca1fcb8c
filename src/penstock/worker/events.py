"""What happens inside a worker, for whoever listens in the same process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import msgspec

from penstock.core.display import get_logger
from penstock.core.outcome import Failure
from penstock.errors import InvalidOption

__all__ = ["EventName", "Listener", "Listeners", "WorkerEvent"]

EventName = Literal[
    "ready",
    "started",
    "completed",
    "failed",
    "retrying",
    "snoozed",
    "suspended",
    "released",
    "limited",
    "cancelled",
    "stalled",
    "stuck",
    "drained",
    "error",
    "reconnected",
    "stopping",
    "stopped",
]
_NAMES: Final = frozenset(get_args(EventName))

logger = get_logger("penstock.worker")


class WorkerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. ``queue``, ``id`` and ``task`` are empty where no queue or job is concerned.

    ``completed``, ``failed``, ``retrying``, ``snoozed``, ``suspended``, ``released`` and ``cancelled`` come after
    the store has accepted the outcome; ``stalled`` when the lease was lost, and with it the run. ``error`` is an
    exception of the worker's own (no connection, say), never of a handler: that is ``failure``.
    """

    type: EventName
    worker: str
    queue: str = ""
    id: str = ""
    task: str = ""
    run: int = 0
    run_ms: int = 0
    failure: Failure | None = None
    error: BaseException | None = None


Listener = Callable[[WorkerEvent], Any]


class Listeners:
    """Functions by event. Called on the worker's loop; what they raise is logged, and stops nobody."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Listener]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()

    def __contains__(self, name: EventName) -> bool:
        return name in self._by_name

    def add(self, name: str, listener: Listener) -> None:
        """Call ``listener`` at every event ``name``; a coroutine function is run as a task of its own.

        Raises:
            InvalidOption: there is no such event.
        """
        self.check(name)
        self._by_name.setdefault(name, []).append(listener)

    @staticmethod
    def check(name: str) -> None:
        """Raises ``InvalidOption`` if there is no such event."""
        if name not in _NAMES:
            raise InvalidOption(
                f"no worker event is called {name!r}. There are: {', '.join(sorted(_NAMES))}."
            )

    def emit(self, event: WorkerEvent) -> None:
        for listener in self._by_name.get(event.type, ()):
            try:
                answer = listener(event)
                if inspect.isawaitable(answer):
                    task = asyncio.ensure_future(answer)
                    self._tasks.add(task)
                    task.add_done_callback(self._ended)
            except (
                BaseException
            ):  # the worker handles Ctrl-C itself, so even an interrupt is the listener's own
                logger.exception("a listener of %r failed", event.type)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a listener failed", exc_info=task.exception())
