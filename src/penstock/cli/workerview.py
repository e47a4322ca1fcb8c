"""The output of a worker in the foreground: a live view at a terminal, log lines elsewhere.

The processes of a pool have their own listeners, but all write to the event log, so this process reads that.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.structs import replace

from penstock.cli.connect import run_on_loop
from penstock.cli.jobview import short_ids
from penstock.cli.output import at_terminal, console, fitted, in_one_line, rich_table, span
from penstock.client.session import shown_store
from penstock.core.command import COMMAND_TASK, command_text
from penstock.core.text import LogFormat, StderrLog, get_logger, log_to_stderr
from penstock.errors import EventsLost, StorageError
from penstock.worker.recovery import connected

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.core.event import Event
    from penstock.worker.events import WorkerEvent
    from penstock.worker.worker import Worker


_RETRY_AFTER_S: Final = 1.0
_FINAL_READ_S: Final = 3.0


@contextmanager
def _followed(
    worker: Worker, on_event: Callable[[Event], None], *, with_commands: bool = False
) -> Iterator[None]:
    """Call ``on_event`` in a thread with every event of the worker's processes, until the block ends.

    ``with_commands``: the claim of a command job has the command instead of the task's name, read from the store.

    Raise ``StorageError`` if the store cannot be reached at the start: the processes would fail, too.
    """
    follower = _Follower(worker, on_event, run_on_loop(_last_offsets(worker)), with_commands=with_commands)
    follower.start()
    try:
        yield
    finally:
        follower.stop()


async def _last_offsets(worker: Worker) -> dict[str, int]:
    storage = await connected(worker.app, stopped=worker.is_stopping)
    async with worker.app:
        pages = {queue: await storage.read_events(queue, after=0, limit=1) for queue in worker.options.queues}
        return {queue: page.last for queue, page in pages.items()}


class _Follower(threading.Thread):
    def __init__(
        self,
        worker: Worker,
        on_event: Callable[[Event], None],
        offsets: dict[str, int],
        *,
        with_commands: bool,
    ) -> None:
        super().__init__(name="penstock-poolwatch", daemon=True)
        self._app = worker.app
        self._names = f"{worker.options.name}-"
        self._on_event = on_event
        self._offsets = offsets
        self._with_commands = with_commands
        self._began = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def run(self) -> None:
        asyncio.run(self._follow())

    def stop(self) -> None:
        """Stop when the last event has been read, or after a few seconds."""
        self._began.wait()
        if self._loop is not None and self._task is not None and self.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self.join(2 * _FINAL_READ_S)

    async def _follow(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.create_task(self._read_until_cancelled())
        self._began.set()
        async with self._app:
            await asyncio.gather(self._task, return_exceptions=True)
            try:
                async with asyncio.timeout(_FINAL_READ_S):
                    await self._read(follow=False)
            except (EventsLost, StorageError, TimeoutError):
                # The worker is done, so its last events do not matter.
                pass

    async def _read_until_cancelled(self) -> None:
        while True:
            try:
                await self._read(follow=True)
            except EventsLost as lost:
                self._offsets = dict.fromkeys(self._offsets, lost.last)
            except StorageError:
                await asyncio.sleep(_RETRY_AFTER_S)

    async def _read(self, *, follow: bool) -> None:
        events = self._app.events(*self._offsets, after=dict(self._offsets), follow=follow)
        async for event in events:
            self._offsets[event.queue] = event.seq
            if event.worker.startswith(self._names):
                self._on_event(await self._described(event))

    async def _described(self, event: Event) -> Event:
        if not self._with_commands or event.type != "claimed" or event.task != COMMAND_TASK:
            return event
        job = await self._app.job(event.ref).get_or_none()
        return event if job is None else replace(event, task=command_text(job.raw.payload))


# Views and log lines


logger = get_logger("penstock.worker")

_COUNTED: Final = ("completed", "failed", "retrying", "cancelled", "stalled", "released")
_ENDS: Final = (*_COUNTED, "stuck")
_SHOWN_AS: Final = {"released": "handed back"}
_WHY: Final = {"stuck": "it does not stop; its slot is busy until it ends"}
# After these events, no process has the job.
_GONE: Final = frozenset({*_COUNTED, "snoozed", "suspended", "limited", "expired", "removed"})
_KEYS: Final = {"stopping": "Ctrl-C hands the running jobs back.", "stopped": ""}
"""The effect of Ctrl-C in these states of a worker."""
_STOPS: Final = "Ctrl-C stops it: running jobs finish first; twice hands them back."
_MOST_RUNNING: Final = 12
_MOST_RECENT: Final = 8
_PER_SECOND: Final = 4


@contextmanager
def shown(worker: Worker, *, live: bool, log_format: LogFormat, verbose: bool) -> Iterator[None]:
    """Show the jobs of ``worker`` and its processes while the block runs it."""
    is_pool = worker.options.processes > 1
    if live and at_terminal() and log_format == "text":
        view = _PoolView(worker) if is_pool else _OneView(worker)
        with _live(view):
            if not isinstance(view, _PoolView):
                yield
                return
            with _followed(worker, view.on_event, with_commands=True):
                yield
        return
    log_to_stderr(StderrLog(log_format, worker=worker.id))
    if is_pool:
        with _followed(worker, lambda event: _log_event(event, verbose=verbose)):
            yield
        return
    for name in ("completed", "cancelled") if verbose else ("cancelled",):
        worker.on(name, lambda event: logger.info("%s", _line(event), extra=_about(event)))
    yield


@contextmanager
def _live(view: _View) -> Iterator[None]:
    from rich.live import Live

    with Live(get_renderable=view.render, console=console(), refresh_per_second=_PER_SECOND, transient=False):
        # The view shows the ends of runs, so the log leaves them out.
        log_to_stderr(StderrLog(runs=False))
        yield


def _line(event: WorkerEvent) -> str:
    what = f" {event.task}" if event.task else ""
    return f"{event.type} {event.queue}/{event.id}{what} after {span(event.run_ms)}"


def _about(event: WorkerEvent | Event) -> dict[str, Any]:
    return {"queue": event.queue, "id": event.id, "task": event.task, "run": event.run}


def _log_event(event: Event, *, verbose: bool) -> None:
    """Log the events that the worker processes do not log themselves: they log warnings and errors."""
    match event.type:
        case "completed":
            is_logged = verbose
        case "failed":
            is_logged = event.error_type == "Stalled"
        case "retrying":
            is_logged = event.error_type == "Retry"
        case _:
            is_logged = event.type in ("cancelled", "stalled")
    if is_logged:
        why = f": {event.error_type}: {event.error}" if event.error_type else ""
        what = f" {event.task}" if event.task else ""
        logger.info(
            "%s %s/%s%s after %s by %s%s",
            *(event.type, event.queue, event.id, what, span(event.run_ms), event.worker, why),
            extra=_about(event),
        )


class _Running(NamedTuple):
    queue: str
    id: str
    what: str
    age_s: float
    note: str = ""


class _View:
    """A live view. Rich draws it in a thread of its own, so it reads only values that are safe in any thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._began = time.monotonic()
        self._recent: deque[tuple[str, ...]] = deque(maxlen=_MOST_RECENT)
        self._ended: deque[float] = deque(maxlen=10_000)

    def _state(self) -> str:
        raise NotImplementedError

    def _counts(self) -> Mapping[str, int]:
        raise NotImplementedError

    def _running(self) -> list[_Running]:
        raise NotImplementedError

    def _note(self, end: str, id: str, what: str, run_ms: int, why: str) -> None:
        self._ended.append(time.monotonic())
        self._recent.appendleft(
            (
                time.strftime("%H:%M:%S"),
                _SHOWN_AS.get(end, end),
                id,
                in_one_line(what),
                span(run_ms),
                why[:60],
            )
        )

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        options, now, running = self._worker.options, time.monotonic(), self._running()
        rate = sum(1 for at in list(self._ended) if at > now - 10) / min(max(now - self._began, 1), 10)
        counts = self._counts()
        slots = options.concurrency * options.processes
        head = Text.assemble(
            ("penstock worker ", "bold"),
            f"{self._worker.id}  {self._state()}\n",
            f"store {shown_store(self._worker.app.url, self._worker.app.namespace)}\n"
            f"queues {', '.join(options.queues)}   running {len(running)}/{slots}   "
            f"{rate:.1f}/s   up {span((now - self._began) * 1000)}\n",
            "   ".join(f"{_SHOWN_AS.get(name, name)} {counts[name]}" for name in _COUNTED),
            (f"\n{_KEYS.get(self._worker.state, _STOPS)}\n", "dim"),
        )
        recent = list(self._recent)
        shorts = short_ids([*(job.id for job in running), *(row[2] for row in recent)])
        rows = [
            (job.queue, shorts[job.id], in_one_line(job.what), span(job.age_s * 1000), job.note)
            for job in running
        ]
        ended = [(at, end, shorts[id], *rest) for at, end, id, *rest in recent]
        return Group(
            head,
            _table(("queue", "id", "what", "for", ""), rows[:_MOST_RUNNING], title="running"),
            "",
            _table(("at", "state", "id", "what", "took", "why"), ended, title="ended"),
        )


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]], *, title: str) -> RenderableType:
    width = console().width
    spare = ("queue", "at", "why") if rows else ()
    return rich_table(*fitted(columns, rows, width=width, spare=spare), title=title, width=width)


class _OneView(_View):
    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._commands: dict[tuple[str, str], str] = {}
        worker.on("started", self._on_start)
        for name in _ENDS:
            worker.on(name, self._on_end)

    def _on_start(self, event: WorkerEvent) -> None:
        """Keep the command: the worker no longer has it when the run has ended."""
        if event.task == COMMAND_TASK:
            job = event.queue, event.id
            self._commands[job] = self._worker.commands().get(job, event.task)

    def _on_end(self, event: WorkerEvent) -> None:
        why = event.failure.message if event.failure is not None else _WHY.get(event.type, "")
        what = self._commands.get((event.queue, event.id), event.task)
        if event.type != "stuck":
            self._commands.pop((event.queue, event.id), None)
        self._note(event.type, event.id, what, event.run_ms, why)

    def _state(self) -> str:
        health = self._worker.health()
        is_hindered = health.state == "running" and not health.consuming
        return f"{health.state}{f' ({health.reason})' * is_hindered}"

    def _counts(self) -> Mapping[str, int]:
        stats, handed_back = self._worker.stats, self._worker.recorder.handed_back
        return {name: getattr(stats, name) for name in _COUNTED} | {"released": handed_back}

    def _running(self) -> list[_Running]:
        active, commands = self._worker.health().active, self._worker.commands()
        return [
            _Running(
                job.queue,
                job.id,
                commands.get((job.queue, job.id), job.task),
                job.age_s,
                "stuck" if job.stuck else "",
            )
            for job in active
        ]


class _PoolView(_View):
    """The view of several processes, from their event log."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._counted: Counter[str] = Counter()
        self._active: dict[tuple[str, str], tuple[Event, float]] = {}

    def on_event(self, event: Event) -> None:
        job = event.queue, event.id
        what = self._active[job][0].task if job in self._active else event.task
        if event.type == "claimed":
            self._active[job] = event, time.monotonic()
        elif event.type in _GONE:
            self._active.pop(job, None)
        if event.type in _COUNTED:
            self._counted[event.type] += 1
            self._note(event.type, event.id, what, event.run_ms, event.error)

    def _state(self) -> str:
        return f"{self._worker.state}, {self._worker.options.processes} processes"

    def _counts(self) -> Mapping[str, int]:
        return self._counted

    def _running(self) -> list[_Running]:
        now = time.monotonic()
        return [
            _Running(event.queue, event.id, event.task, now - since, event.worker)
            for event, since in list(self._active.values())
        ]
