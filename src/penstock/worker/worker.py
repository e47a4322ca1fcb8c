"""The worker: wires fetcher, executor, heartbeat and sweeper together, starts and stops them.

::

    fetcher ──lease──> executor ──run──> runner (loop, thread, process)
       ^  │               │
       │  └──settle+claim─┘ outcome            heartbeat, sweeper: their own thread and connection
     storage
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from penstock.client.decorators import parse_batching
from penstock.client.session import shown_store
from penstock.core.text import get_logger
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption, PenstockError, StorageUnavailable
from penstock.observe.probe import Probe
from penstock.worker import pool, recovery
from penstock.worker.events import Listener, Listeners, Recorder
from penstock.worker.handlers import BatchFunction, HandlerFunction, QueueHandlers
from penstock.worker.health import (
    Health,
    LoopBlocked,
    WorkerState,
    WorkerStats,
    handle_signals,
    running_commands,
    sigint_is_ignored,
)
from penstock.worker.middleware import Hook, run_start_hooks, run_stop_hooks
from penstock.worker.options import WorkerOptions, WorkerSettings, read_options
from penstock.worker.run import PATIENCE_S
from penstock.worker.session import WorkerSession

if TYPE_CHECKING:
    from penstock.client.app import App


logger = get_logger("penstock.worker")

H = TypeVar("H", bound=HandlerFunction | BatchFunction)
S = TypeVar("S", bound=Hook)
L = TypeVar("L", bound=Listener)


class Worker:
    """Works on the queues of an app until it is stopped. Made by ``app.worker(...)``; can run once.

    Creating a worker imports the modules in the app's ``include``.

    - ``queues``: names, or weights by name; by default the queues of all tasks.
    - ``concurrency``: how many jobs run at a time. Sync handlers run in up to ``threads`` threads, tasks with
      ``runner="process"`` in up to ``child_processes`` processes, tasks with ``runner="sandbox"`` in as many again.
    - ``processes``: more than 1 runs that many workers like this one and restarts those that die.
    - ``name``: the start of the worker's ``id``; by default host and process.
    - ``lease``: how long the jobs of a dead worker stay with it.
    - ``heartbeat``: how often the worker renews its leases, and so how soon a cancel reaches a running job.
    - ``grace``: how long a stopping worker lets its jobs finish before it hands them back.
    - ``stuck_after``: how long the event loop may be blocked before the worker gives up its jobs.
    - ``unknown_after``: how long a job waits whose task no worker knows before it fails.
    - ``limit`` (``"100/s"``), and ``limits`` by queue: how many jobs the worker starts in any such period. Each of
      its ``processes`` has these limits.
    - ``burst``: stop when the queues are drained or paused.
    - ``commands``: true, or the path of a shell, to run shell commands, such as ``penstock enqueue`` adds. Anyone
      who can write to the store can then run arbitrary commands here.
    - ``probe``: the address that serves health, readiness and metrics over HTTP, such as ``"9100"``; on loopback, or
      anywhere with a ``probe_token``. Worker processes take the ports that follow.

    Call its methods on the loop it runs in, except ``health()`` and ``stats``.
    """

    def __init__(self, app: App, **options: Unpack[WorkerOptions]) -> None:
        app.load()
        self.app = app
        self.given_options = dict(options)
        self.options: WorkerSettings = read_options(app, **options)
        self.handlers = QueueHandlers()
        self.listeners = Listeners()
        self.recorder = Recorder(self.options.id, self.listeners)
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
        """Return the counts of outcomes that the store has accepted from this worker."""
        return self.recorder.stats

    def health(self) -> Health:
        """Return the current health of the worker. Any thread may call this."""
        if self._session is not None:
            return self._session.health()
        if self.options.processes > 1 and self._state == "running":
            return Health(state="running", consuming=True, reason="each of its processes has its own health")
        return Health(state=self.state, consuming=False, reason=f"the worker is {self.state}")

    def commands(self) -> dict[tuple[str, str], str]:
        """Return the shell commands that this process holds, by queue and id. Any thread may call this."""
        return {} if self._session is None else running_commands(self._session)

    @property
    def probe_url(self) -> str | None:
        """Return the URL of the probe once it listens."""
        return None if self._probe is None else self._probe.url

    @overload
    def on(self, event: str, listener: Listener) -> None: ...
    @overload
    def on(self, event: str) -> Callable[[L], L]: ...
    def on(self, event: str, listener: Listener | None = None) -> Callable[[L], L] | None:
        """Call ``listener(WorkerEvent)`` at every ``event`` in this process. ``worker.events`` lists the names.

        Without a listener, use it as a decorator: ``@worker.on("failed")``.
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
        """Call ``hook`` before the first claim. An exception in it keeps the worker from starting."""
        self.start_hooks.append(hook)
        return hook

    def on_stop(self, hook: S) -> S:
        """Call ``hook`` after the last settle."""
        self.stop_hooks.append(hook)
        return hook

    def handler(
        self, queue: str, *, batch: int | None = None, batch_wait: Duration | None = None
    ) -> Callable[[H], H]:
        """Decorate the function that takes the jobs of ``queue`` without a task, each as a ``JobContext``.

        With ``batch`` it takes a list of up to that many jobs, at most ``batch_wait`` (100 ms) after the first one.
        """
        batching = parse_batching(batch, batch_wait, where=f"the handler of queue {queue!r}")

        def register(function: H) -> H:
            self.handlers.add(queue, function, batching)
            return function

        return register

    async def ready(self) -> None:
        """Wait until the worker is connected and claims jobs."""
        await self._ready.wait()

    def pause(self) -> None:
        """Claim no more jobs until ``resume``; jobs of this worker continue, other workers are not affected.

        A pending claim may still return jobs: ``await worker.idle()`` waits until all of them are settled.
        Raise ``InvalidOption`` with ``processes`` > 1: pause the queue instead.
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
        """Wait until the worker has no jobs and the store has all outcomes. Return false after ``timeout``.

        A paused worker then stays idle; any other may claim the next job immediately.
        """
        if self._session is None:
            return True
        rest_s = float("inf") if timeout is None else milliseconds(timeout, what="timeout") / 1000
        return await self._session.until_idle(time.monotonic() + rest_s)

    def stop(self, grace: Duration | None = None) -> None:
        """Stop claiming, let running jobs finish for ``grace``, hand back the others; then ``run()`` returns.

        A second call can shorten the grace; ``stop(0)`` hands back all jobs immediately.
        """
        grace_ms = self.options.grace_ms if grace is None else milliseconds(grace, what="grace")
        self._grace_ms = min(grace_ms, self._grace_ms) if self._stop.is_set() else grace_ms
        self._stop.set()
        if self._session is not None:
            self._session.hurry(self._grace_ms)

    def is_stopping(self) -> bool:
        """Return whether the worker was asked to stop. Any thread may call this."""
        return self._stop.is_set()

    async def run(self) -> None:
        """Work until stopped. In the main thread SIGTERM and SIGINT stop the worker; a second signal skips the grace.

        Raises:
            InvalidOption: this worker has nothing to run: no tasks, no handlers and no commands.
            StorageError: the store refused the connection at the start, or could not be reached for 30 s. A running
                worker waits for the store instead.
        """
        if self._state != "new":
            raise InvalidOption(f"{self!r} has already run. Make another one with app.worker(...).")
        if not self.start_hooks or self.options.processes > 1:
            # Start hooks may register tasks and handlers, so with hooks the check comes after them.
            self._refuse_to_idle()
        self._state = "starting"
        queues = ", ".join(self.options.queues)
        logger.info(
            "worker %s starts: store %s, queues %s",
            self.id,
            shown_store(self.app.url, self.app.namespace),
            queues,
        )
        if sigint_is_ignored():
            logger.info("worker %s: SIGINT is ignored (inherited): stop with SIGTERM", self.id)
        try:
            with handle_signals(self._on_signal, received=self._on_receipt):
                if self.options.processes > 1:
                    await self._run_pool()
                else:
                    await self._run_session()
        finally:
            self._state = "stopped"
            self.recorder.emit("stopped")

    def _refuse_to_idle(self) -> None:
        """Raise ``InvalidOption`` if this worker has nothing to run."""
        has_code = self.app.tasks or self.app.handlers or self.handlers.by_queue
        if not has_code and self.options.commands is None:
            raise InvalidOption(_nothing_to_run(self.app))

    def run_sync(self) -> None:
        """Call ``run()`` from synchronous code, on uvloop if it is installed."""
        if asyncio._get_running_loop() is not None:
            raise PenstockError(
                "run_sync() cannot be used in a thread that runs an event loop. Use `await worker.run()`."
            )
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self.run())

    def _on_receipt(self) -> None:
        """Note a signal even while a handler blocks the loop; raise in that handler once the grace is over."""
        if self._session is not None and self._session.watchdog.interrupting:
            raise LoopBlocked
        grace_s = self._grace_ms / 1000 if self.interrupt_at == float("inf") else 0.0
        self.interrupt_at = min(self.interrupt_at, time.monotonic() + grace_s + PATIENCE_S)

    def _on_signal(self) -> None:
        again = self._stop.is_set()
        logger.info("worker %s: %s", self.id, "handing back all jobs now" if again else "stopping")
        self.stop(0 if again else None)

    async def _run_session(self) -> None:
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
            # A caller that cancels run() does not want to wait, but the jobs must be handed back.
            await self._wind_up(session, 0)
            raise
        finally:
            await session.close()
            if self._probe is not None:
                await asyncio.to_thread(self._probe.close)
        logger.info("worker %s has stopped", self.id)

    def _start_probe(self) -> None:
        if self.options.probe is not None:
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
        self.recorder.emit("ready")
        self._log_queues("")

    async def _wind_up(self, session: WorkerSession, grace_ms: int) -> None:
        if self._state == "running":
            self._state = "stopping"
            self.recorder.emit("stopping")
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
        self.recorder.emit("ready")
        self._log_queues(f", in {self.options.processes} processes")

    def _log_queues(self, how: str) -> None:
        logger.info("worker %s works on %s%s", self.id, ", ".join(self.options.queues), how)
        task_queues = {task.queue for task in (*self.app.tasks.values(), *self.app.handlers.values())}
        for queue in self.options.queues.keys() - task_queues:
            if close := get_close_matches(queue, task_queues, n=1):
                logger.warning(
                    "worker %s: no task of the app goes to queue %r. Did you mean %r?",
                    self.id,
                    queue,
                    close[0],
                )

    def end_burst(self, message: str) -> None:
        """Stop a burst worker that has nothing left to do."""
        if not self._stop.is_set():
            logger.info("worker %s: %s", self.id, message)
            self.stop()


def _nothing_to_run(app: App) -> str:
    """Return why a worker of ``app`` has nothing to run, and what to do about it."""
    begin = "this worker has nothing to run: its app has no tasks"
    if not app.included:
        return (
            f"{begin}. Name the modules that define them: App(include=['myproject.mail']), or "
            "`penstock worker -i myproject.mail`. For jobs without a task, add a handler: @app.handler('queue')."
        )
    modules = ", ".join(app.included)
    if any(value is app for value in vars(sys.modules["__main__"]).values()):
        return (
            f"{begin}, because the running script creates it, and {modules} imports that script again, which creates "
            "another app. Move the app into a separate module."
        )
    return (
        f"{begin}, although it includes {modules}. Check that the tasks there are registered with this app."
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Any = uvloop.new_event_loop
    return factory  # type: ignore[no-any-return]
