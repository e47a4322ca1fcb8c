"""What a worker in the foreground shows: a live view at a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.cli.output import at_terminal, console, rich_table, span

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.worker.events import WorkerEvent
    from penstock.worker.worker import Worker

__all__ = ["shown"]

logger = logging.getLogger("penstock.worker")

_ENDS: Final = ("completed", "failed", "retrying", "cancelled", "stalled", "stuck")
_MOST_RUNNING: Final = 12
_MOST_RECENT: Final = 8
_PER_SECOND: Final = 4


@contextmanager
def shown(worker: Worker, *, live: bool, verbose: bool) -> Iterator[None]:
    """Show ``worker`` while the block runs it. Of one with several processes, only what watches over them is shown."""
    if live and at_terminal() and worker.options.processes == 1:
        with _live(worker):
            yield
        return
    _log_to_stderr()
    for name in _ENDS:
        if verbose or name != "completed":
            worker.on(name, lambda event: logger.info("%s", _line(event)))
    yield


@contextmanager
def _live(worker: Worker) -> Iterator[None]:
    from rich.live import Live

    view = _View(worker)
    out = console()
    with Live(get_renderable=view.render, console=out, refresh_per_second=_PER_SECOND, transient=False):
        _log_to_stderr()
        yield


def _log_to_stderr() -> None:
    """Unless the app has set up a log of its own."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def _line(event: WorkerEvent) -> str:
    why = f": {event.failure.type}: {event.failure.message}" if event.failure is not None else ""
    what = f" {event.task}" if event.task else ""
    return f"{event.type} {event.queue}/{event.id}{what} after {span(event.run_ms)}{why}"


class _View:
    """Drawn by a thread of rich's, from what may be read in any thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._began = time.monotonic()
        self._recent: deque[tuple[str, ...]] = deque(maxlen=_MOST_RECENT)
        self._ended: deque[float] = deque(maxlen=10_000)
        for name in _ENDS:
            worker.on(name, self._note)

    def _note(self, event: WorkerEvent) -> None:
        self._ended.append(time.monotonic())
        why = event.failure.message if event.failure is not None else ""
        self._recent.appendleft(
            (time.strftime("%H:%M:%S"), event.type, event.id, span(event.run_ms), why[:60])
        )

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        worker, health = self._worker, self._worker.health()
        stats, now = worker.stats, time.monotonic()
        rate = sum(1 for at in list(self._ended) if at > now - 10) / min(max(now - self._began, 1), 10)
        head = Text.assemble(
            ("penstock worker ", "bold"),
            f"{worker.id}  {health.state}{'' if health.consuming else f' ({health.reason})'}\n",
            f"queues {', '.join(worker.options.queues)}   running {len(health.active)}/{health.concurrency}   "
            f"{rate:.1f}/s   up {span((now - self._began) * 1000)}\n",
            f"completed {stats.completed}   failed {stats.failed}   retrying {stats.retrying}   "
            f"cancelled {stats.cancelled}   stalled {stats.stalled}\n",
            ("Ctrl-C stops it: running jobs finish first; twice hands them back.", "dim"),
        )
        running = [
            (job.queue, job.id, job.task, span(job.age_s * 1000), "stuck" if job.stuck else "")
            for job in health.active[:_MOST_RUNNING]
        ]
        return Group(
            head,
            rich_table(("queue", "id", "task", "for", ""), running, title="running"),
            rich_table(("at", "what", "id", "took", "why"), list(self._recent), title="ended"),
        )
