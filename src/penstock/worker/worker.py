"""The worker: wires fetcher, executor, heartbeat and sweeper together, and knows how to begin and end.

::

    fetcher ──lease──> executor ──run──> runner (loop, thread, process)
       ^  │               │
       │  └──settle+claim─┘ outcome            heartbeat, sweeper: a thread and a connection of their own
     storage
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from penstock.client.batching import parse_batching
from penstock.client.session import shown_store
from penstock.core.text import get_logger
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption, PenstockError, StorageUnavailable
from penstock.worker import pool, recovery, signals
from penstock.worker.deadlines import PATIENCE_S
from penstock.worker.events import Listener, Listeners, Tally
from penstock.worker.handlers import BatchHandler, Handler, Handlers
from penstock.worker.health import Health, WorkerState, WorkerStats, running_commands
from penstock.worker.middleware import Hook, run_start_hooks, run_stop_hooks
from penstock.worker.options import WorkerOptions, WorkerSettings, read_options
from penstock.worker.session import WorkerSession

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.observe.probe import Probe


logger = get_logger("penstock.worker")

H = TypeVar("H", bound=Handler | BatchHandler)
S = TypeVar("S", bound=Hook)
L = TypeVar("L", bound=Listener)


class Worker:
    """Works on the queues of an app until it is stopped; made by ``app.worker(...)``. Runs once.

    Making a worker imports the modules that the app's ``include`` names.

    ``queues`` are names, or weights by name; without them the queues of all tasks. ``concurrency`` jobs run at
    a time, sync handlers in up to ``threads`` threads, those with ``runner="process"`` in up to
    ``child_processes`` processes, those with ``runner="sandbox"`` in as many again. ``processes`` > 1 runs so
    many workers like this one, and restarts those that die. Its ``name`` is what its ``id`` begins with; by
    default host and process. ``lease`` is how long the jobs of a dead worker
    stay with it, ``heartbeat`` how often it says that it lives, and so how soon a cancel reaches a running job.
    ``grace`` is how long a stopping worker lets its jobs finish before it hands them back. ``stuck_after`` is how
    long its event loop may stand still before it gives its jobs up, and ``unknown_after`` how long a job whose task
    no worker knows waits before it fails. ``limit``
    (``"100/s"``), and ``limits`` by queue, say how many jobs it starts in any stretch of that long, each of its
    ``processes`` for itself. ``burst`` ends it when its queues are drained or paused.
    ``commands``, true or the path of a shell, has it run shell commands, such as ``penstock enqueue`` adds: then
    anyone who can write to the store can run arbitrary commands here. ``probe`` is where
    health, readiness and metrics are served over HTTP, such as ``"9100"``; on the loopback, or anywhere with a
    ``probe_token``. Worker processes take the ports that follow.

    All methods are for the loop it runs in, except ``health()`` and ``stats``.
    """

    def __init__(self, app: App, **options: Unpack[WorkerOptions]) -> None:
        app.load()
        self.app = app
        self.given = dict(options)
        self.options: WorkerSettings = read_options(app, **options)
        self.handlers = Handlers()
        self.listeners = Listeners()
        self.tally = Tally(self.options.id, self.listeners)
        self.start_hooks: list[Hook] = list(app.start_hooks)
        self.stop_hooks: list[Hook] = list(app.stop_hooks)
        self._state: WorkerState = "new"
        self._paused = False
        self._session: WorkerSession | None = None
        self._probe: Probe | None = None
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._grace_ms = self.options.grace_ms
        self.interrupt_at = float("inf")
        """The time at which a handler that blocks the loop is ended, because a signal asked the worker to stop."""

    def __repr__(self) -> str:
        return f"<Worker {self.id} {self.state}, queues {', '.join(self.options.queues)}>"

    @property
    def id(self) -> str:
        return self.options.id

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def state(self) -> WorkerState:
        return "paused" if self._state == "running" and self._paused else self._state

    @property
    def stats(self) -> WorkerStats:
        """Counts of what the store has accepted from this worker."""
        return self.tally.stats

    def health(self) -> Health:
        """How the worker is just now; may be called from any thread."""
        if self._session is not None:
            return self._session.health()
        if self.options.processes > 1 and self._state == "running":
            return Health(
                state="running", consuming=True, reason="each of its processes has a health of its own"
            )
        return Health(state=self.state, consuming=False, reason=f"the worker is {self.state}")

    def commands(self) -> dict[tuple[str, str], str]:
        """Return the shell commands that run now, by queue and id; may be called from any thread."""
        return {} if self._session is None else running_commands(self._session)

    @property
    def probe_url(self) -> str | None:
        """Where the probe listens, once it does."""
        return None if self._probe is None else self._probe.url

    @overload
    def on(self, event: str, listener: Listener) -> None: ...
    @overload
    def on(self, event: str) -> Callable[[L], L]: ...
    def on(self, event: str, listener: Listener | None = None) -> Callable[[L], L] | None:
        """Call ``listener(WorkerEvent)`` at every ``event`` in this process. See ``worker.events`` for the names.

        Without a listener it is a decorator: ``@worker.on("failed")``.
        """
        if listener is not None:
            self.listeners.add(event, listener)
            return None
        self.listeners.check(event)

        def register(function: L) -> L:
            self.listeners.add(event, function)
            return function

        return register

    def on_start(self, hook: S) -> S:
        """A function to call before the first claim. What it raises keeps the worker from starting."""
        self.start_hooks.append(hook)
        return hook

    def on_stop(self, hook: S) -> S:
        """A function to call after the last settle."""
        self.stop_hooks.append(hook)
        return hook

    def handler(
        self, queue: str, *, batch: int | None = None, batch_wait: Duration | None = None
    ) -> Callable[[H], H]:
        """Decorates the function that gets jobs of ``queue`` without a task, as a ``JobContext``.

        With ``batch`` it gets a list of up to so many, ``batch_wait`` (100 ms) after the first came at the latest.
        """
        batching = parse_batching(batch, batch_wait, where=f"the handler of queue {queue!r}")

        def register(function: H) -> H:
            self.handlers.add(queue, function, batching)
            return function

        return register

    async def ready(self) -> None:
        """Returns when the worker is connected and claims jobs."""
        await self._ready.wait()

    def pause(self) -> None:
        """This worker claims no more jobs until ``resume``; those it has go on. Other workers are not touched.

        A claim that is under way may still bring some: ``await worker.idle()`` waits until all it has are settled.
        Raises ``InvalidOption`` with ``processes`` > 1, whose workers cannot be told: pause the queue.
        """
        if self.options.processes > 1:
            raise InvalidOption(
                f"{self!r} has {self.options.processes} processes, which cannot be paused from here. "
                "Pause the queue instead: queue.pause() stops claims everywhere."
            )
        self._paused = True
        if self._session is not None:
            self._session.fetcher.stop_claiming()

    def resume(self) -> None:
        """Claim again after ``pause``."""
        self._paused = False
        if self._session is not None and self._state == "running":
            self._session.fetcher.begin()

    async def idle(self, timeout: Duration | None = None) -> bool:
        """Returns true when the worker has no job: none runs, and what became of them is in the store.

        For a paused worker that is the end of it; another may claim the next at once. False after ``timeout``.
        """
        if self._session is None:
            return True
        rest_s = float("inf") if timeout is None else milliseconds(timeout, what="timeout") / 1000
        return await self._session.until_idle(time.monotonic() + rest_s)

    def stop(self, grace: Duration | None = None) -> None:
        """Stop claiming, let running jobs finish for ``grace``, hand back the others. ``run()`` returns after that.

        A second call with a shorter grace shortens it; ``stop(0)`` hands back now.
        """
        given_ms = self.options.grace_ms if grace is None else milliseconds(grace, what="grace")
        self._grace_ms = min(given_ms, self._grace_ms) if self._stop.is_set() else given_ms
        self._stop.set()
        if self._session is not None:
            self._session.hurry(self._grace_ms)

    def is_stopping(self) -> bool:
        """Return whether it was told to stop. May be called from any thread."""
        return self._stop.is_set()

    async def run(self) -> None:
        """Work until stopped. SIGTERM and SIGINT stop it (in the main thread); the second one at once.

        Raises:
            InvalidOption: there is nothing that this worker could run: no tasks, no handlers and no commands.
            StorageError: the store refused us at the start, or could not be reached for 30 s. Later the worker
                waits for it.
        """
        if self._state != "new":
            raise InvalidOption(f"{self!r} has been run already. Make another by app.worker(...).")
        if not self.start_hooks or self.options.processes > 1:
            # A start hook may register tasks and handlers; the check follows those hooks then.
            self._refuse_to_idle()
        self._state = "starting"
        queues = ", ".join(self.options.queues)
        logger.info(
            "worker %s starts: store %s, queues %s",
            self.id,
            shown_store(self.app.url, self.app.namespace),
            queues,
        )
        try:
            with signals.handled(self._on_signal, received=self._on_receipt):
                if self.options.processes > 1:
                    await self._run_pool()
                else:
                    await self._run_shift()
        finally:
            self._state = "stopped"
            self.tally.tell("stopped")

    def _refuse_to_idle(self) -> None:
        """Raise ``InvalidOption`` if there is nothing that this worker could run."""
        if not self.app.tasks and not self.handlers.by_queue and self.options.commands is None:
            raise InvalidOption(_nothing_to_run(self.app))

    def run_sync(self) -> None:
        """``run()`` for synchronous code, on uvloop if it is installed."""
        if asyncio._get_running_loop() is not None:
            raise PenstockError(
                "run_sync() cannot be used in a thread that runs an event loop. Use `await worker.run()`."
            )
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self.run())

    def _on_receipt(self) -> None:
        """Note a signal even while a handler blocks the loop; raise in that handler once its time is over."""
        if self._session is not None and self._session.watchdog.interrupting:
            raise signals.LoopBlocked
        grace_s = self._grace_ms / 1000 if self.interrupt_at == float("inf") else 0.0
        self.interrupt_at = min(self.interrupt_at, time.monotonic() + grace_s + PATIENCE_S)

    def _on_signal(self) -> None:
        again = self._stop.is_set()
        logger.info("worker %s: %s", self.id, "handing back all jobs now" if again else "stopping")
        self.stop(0 if again else None)

    async def _run_shift(self) -> None:
        try:
            storage = await recovery.connected(self.app, stopped=self.is_stopping)
        except StorageUnavailable:
            if self._stop.is_set():
                return
            raise
        session = self._session = WorkerSession(self, storage)
        try:
            self._start_probe()
            await self._begin(session)
            await self._stop.wait()
            await self._wind_up(session, self._grace_ms)
        except asyncio.CancelledError:
            # Whoever cancels run() does not want to wait, but its jobs must not be left lying about.
            await self._wind_up(session, 0)
            raise
        finally:
            await session.close()
            if self._probe is not None:
                await asyncio.to_thread(self._probe.close)
        logger.info("worker %s has stopped", self.id)

    def _start_probe(self) -> None:
        if self.options.probe is not None:
            from penstock.observe.probe import Probe

            self._probe = Probe(self, self.options.probe)
            self._probe.start()

    async def _begin(self, session: WorkerSession) -> None:
        await session.start()
        await run_start_hooks(self.start_hooks, self)
        self._refuse_to_idle()
        await self.app.put_declared(session.storage, self.options.queues)
        self._state = "running"
        if session.heartbeat is not None:
            session.heartbeat.beat_soon()
        if not self._paused and not self._stop.is_set():
            session.fetcher.begin()
        self._ready.set()
        self.tally.tell("ready")
        self._log_queues("")

    async def _wind_up(self, session: WorkerSession, grace_ms: int) -> None:
        if self._state == "running":
            self._state = "stopping"
            self.tally.tell("stopping")
        await session.finish(grace_ms)
        await run_stop_hooks(self.stop_hooks, self)

    async def _run_pool(self) -> None:
        supervisor = pool.Supervisor(self)
        self._state = "running"
        await supervisor.start()
        await supervisor.run(self._stop, lambda: self._grace_ms, ready=self._pool_is_ready)

        logger.info("worker %s has stopped", self.id)

    def _pool_is_ready(self) -> None:
        self._ready.set()
        self.tally.tell("ready")
        self._log_queues(f", in {self.options.processes} processes")

    def _log_queues(self, how: str) -> None:
        logger.info("worker %s works on %s%s", self.id, ", ".join(self.options.queues), how)
        known = {task.queue for task in self.app.tasks.values()}
        for queue in self.options.queues.keys() - known:
            if close := get_close_matches(queue, known, n=1):
                logger.warning(
                    "worker %s: no task of the app goes to queue %r. Did you mean %r?",
                    self.id,
                    queue,
                    close[0],
                )

    def end_burst(self, message: str) -> None:
        """There is nothing left to do: what the shift tells a burst worker."""
        if not self._stop.is_set():
            logger.info("worker %s: %s", self.id, message)
            self.stop()


def _nothing_to_run(app: App) -> str:
    """Return why a worker of ``app`` has nothing to run, and what to do about it."""
    begin = "this worker has nothing to run: its app has no tasks"
    if not app.included:
        return (
            f"{begin}. Name the modules that define them: App(include=['myproject.mail']), or "
            "`penstock worker -i myproject.mail`. For jobs without a task, add a handler: @worker.handler('queue')."
        )
    modules = ", ".join(app.included)
    if any(value is app for value in vars(sys.modules["__main__"]).values()):
        return (
            f"{begin}, because it is made in the script that runs, and {modules} imports that script again, with "
            "another app in it. Move the app into a module of its own."
        )
    return f"{begin}, although it includes {modules}. See that the tasks there are registered with this app."


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Any = uvloop.new_event_loop
    return factory  # type: ignore[no-any-return]
