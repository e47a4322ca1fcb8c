"""``processes=N``: a supervisor that starts N worker processes, replaces those that die, and stops them all.

Children are spawned, not forked, because a worker has threads and connections. So the app, the worker's options and
its handlers must be importable; listeners stay in the process that added them.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.client.imports import locate
from penstock.client.job_verbs import take_back
from penstock.core.text import StderrLog, get_logger, log_to_stderr, stderr_log
from penstock.errors import StorageError
from penstock.worker.runners.child import end_with_parent, prepare_app
from penstock.worker.runners.process import SPAWN

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.worker.worker import Worker


logger = get_logger("penstock.worker")

_LOOK_EVERY_S: Final = 0.1
# After its grace a child has this long to settle the jobs it hands back.
_EXTRA_S: Final = 15.0
_SOONEST_RESTART_S: Final = 1.0


class _ChildSpec(NamedTuple):
    """The modules to import first, the module and name of the app, the modules of its tasks, the store that it has
    moved to, the options and handlers of the worker, and how the child logs if the supervisor prints its log."""

    preloaded: tuple[str, ...]
    module: str
    name: str
    included: tuple[str, ...]
    moved_to: tuple[str, str | None] | None
    options: dict[str, Any]
    handlers: dict[str, Any]
    log: StderrLog | None


class Supervisor:
    """Runs ``worker.options.processes`` workers like ``worker``, each in its own process."""

    def __init__(self, worker: Worker) -> None:
        options = worker.given_options | {"processes": 1}
        self._specs = [
            _ChildSpec(
                worker.app.preloaded,
                *locate(worker.app, in_script=True),
                worker.app.included,
                worker.app.moved_to,
                options | _options_of(worker, number),
                dict(worker.handlers.by_queue),
                stderr_log(),
            )
            for number in range(1, worker.options.processes + 1)
        ]
        self._app = worker.app
        self._queues = tuple(worker.options.queues)
        self._grace_ms = worker.options.grace_ms
        self._ids: dict[int, str] = {}
        self._rescues: set[asyncio.Task[None]] = set()
        self._children: dict[int, BaseProcess] = {}
        self._started_at: dict[int, float] = {}
        # Each process that is not ready yet sends the id of its worker when it is.
        self._awaited: dict[int, Connection] = {}

    async def start(self) -> None:
        """Start the processes. Raise what starting one raises."""
        for number in range(len(self._specs)):
            self._start(number)

    async def run(
        self, stop: asyncio.Event, grace_ms: Callable[[], int], *, ready: Callable[[], None]
    ) -> None:
        """Keep the processes running until ``stop`` is set or, in burst mode, all have ended; then stop them.

        ``ready`` is called once, when all of them claim jobs.
        """
        reported_ready = False
        while not stop.is_set() and self._children:
            self._replace_dead()
            if self._all_are_ready() and not reported_ready:
                reported_ready = True
                ready()
            try:
                await asyncio.wait_for(stop.wait(), _LOOK_EVERY_S)
            except TimeoutError:
                pass
        await self._end(grace_ms)

    def _start(self, number: int) -> None:
        ours, theirs = SPAWN.Pipe(duplex=False)
        process = SPAWN.Process(
            target=_work, args=(self._specs[number], theirs), name=f"penstock-worker-{number + 1}"
        )
        # Block Ctrl-C while the child loads; the child unblocks it once it ignores the signal.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._awaited[number] = ours
        self._children[number] = process
        self._started_at[number] = time.monotonic()

    def _all_are_ready(self) -> bool:
        for number, connection in list(self._awaited.items()):
            try:
                if connection.poll():
                    self._ids[number] = connection.recv_bytes().decode()
                    del self._awaited[number]
            except EOFError:
                # The process died first. Its replacement reports when it is ready.
                pass
        return not self._awaited

    def _replace_dead(self) -> None:
        for number, process in list(self._children.items()):
            if process.is_alive():
                continue
            self._rescue_jobs_of(number, process)
            if process.exitcode == 0:
                del self._children[number]
            elif time.monotonic() - self._started_at[number] >= _SOONEST_RESTART_S:
                logger.error(
                    "worker process %s ended with code %s; restarting", process.name, process.exitcode
                )
                self._start(number)

    def _rescue_jobs_of(self, number: int, process: BaseProcess) -> None:
        """Take back the jobs of a process that ended before it handed them back. Its exit is proof enough."""
        worker = self._ids.pop(number, None)
        if worker is not None and process.exitcode != 0:
            task = asyncio.create_task(self._take_back(worker))
            self._rescues.add(task)
            task.add_done_callback(self._rescues.discard)

    async def _take_back(self, worker: str) -> None:
        try:
            storage = await self._app.connect()
            for queue in self._queues:
                await take_back(storage, queue, await storage.leases_of(queue, worker))
        except StorageError as error:
            logger.warning("the jobs of worker %s return when their leases expire: %s", worker, error)

    async def _end(self, grace_ms: Callable[[], int]) -> None:
        """Pass the signal on, and a second one if our own grace is cut to zero."""
        began = time.monotonic()
        signals = 0
        while any(process.is_alive() for process in self._children.values()):
            # One signal at a time: a process would receive two that are pending as one.
            if signals < (2 if self._grace_ms and grace_ms() == 0 else 1):
                signals += 1
                self._signal_all()
            if time.monotonic() - began > grace_ms() / 1000 + _EXTRA_S:
                for process in self._children.values():
                    process.kill()
            await asyncio.sleep(_LOOK_EVERY_S / 2)
        for number, process in self._children.items():
            self._rescue_jobs_of(number, process)
        await asyncio.gather(*self._rescues)

    def _signal_all(self) -> None:
        for process in self._children.values():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)


def _options_of(worker: Worker, number: int) -> dict[str, Any]:
    """Return the options that differ between the workers: their names and the ports of their probes."""
    address = worker.options.probe
    options: dict[str, Any] = {"name": f"{worker.options.name}-{number}"}
    if address is not None:
        host, port, token = address.moved(number - 1)
        options |= {"probe": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "probe_token": token}
    return options


def _work(spec: _ChildSpec, ready: Connection) -> None:
    """Run a worker in a child. Only the supervisor handles Ctrl-C; it sends SIGTERM to its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # A restarted supervisor starts new workers.
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    for module in spec.preloaded:
        importlib.import_module(module)
    app: App = getattr(importlib.import_module(spec.module), spec.name)
    prepare_app(app, spec.moved_to, spec.included)
    worker = app.worker(**spec.options)
    if spec.log is not None:
        # The supervisor logs for all of them. A child adds Penstock's warnings and all lines of the application.
        log_to_stderr(spec.log._replace(worker=worker.id), ours=logging.WARNING)
    for queue, queue_handler in spec.handlers.items():
        worker.handlers.add(queue, *queue_handler)
    worker.on("ready", lambda event: ready.send_bytes(worker.id.encode()))
    worker.run_sync()
