"""The workers that a run starts: local processes, Spark's executors, or both.

Local workers start and stop with the run. Each process runs ``python -m penstock.spark.processing.workers APP QUEUE
CONCURRENCY``. ``APP`` is ``module:name``, or ``path.py:name`` for an app in the script itself. The process stops when
its standard input closes, so that a killed run leaves none behind. Running jobs then have their grace period, unless
the input was ``!``. A task of a notebook or a prompt, which no other process can load, runs in a thread instead.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

from pyspark.sql import SparkSession

from penstock.client.app import App
from penstock.client.imports import is_typed_in, locate
from penstock.client.task import Task
from penstock.core.text import StderrLog, get_logger, is_about_run, log_to_stderr
from penstock.errors import FleetFailed, InvalidOption
from penstock.spark.executors import Fleet, fleet, slots
from penstock.spark.store import shared_url


class RunWorkers:
    """The workers of a run, which work within a ``with`` block. Nested blocks share them. ``are_ours`` is false if the
    run relies on other workers.

    Raises:
        InvalidOption: ``fleet`` is unknown, other processes cannot import the app, or the fleet would leave Spark no
            task slot for the run itself, which would be a deadlock.
    """

    def __init__(
        self,
        spark: SparkSession,
        task: Task[..., Any],
        *,
        workers: int,
        fleet: str | None,
        fleet_size: int | None,
        concurrency: int,
    ) -> None:
        if fleet not in (None, "spark"):
            raise InvalidOption(
                f"fleet must be 'spark' or None, got {fleet!r}. For local processes, set workers=4."
            )
        if fleet is None and fleet_size is not None:
            raise InvalidOption("fleet_size needs fleet='spark'.")
        self._spark = spark
        self._task = task
        self.are_ours = bool(workers or fleet)
        self._local = open_local_workers(task, workers, concurrency=concurrency)
        self._size = 0 if fleet is None else _fleet_size(spark, fleet_size)
        self._concurrency = concurrency
        self._fleet: Fleet | None = None
        self._started = ExitStack()
        self._users = 0

    def __enter__(self) -> Self:
        self._users += 1
        if self._users > 1:
            return self
        with ExitStack() as started:
            started.enter_context(self._local)
            if self._size:
                # Keep the fleet until the run ends: the queue may be empty before all rows are enqueued.
                self._fleet = fleet(
                    self._spark,
                    self._task.app,
                    size=self._size,
                    queues=[self._task.queue],
                    until_drained=False,
                    concurrency=self._concurrency,
                )
                started.enter_context(self._fleet)
            self._started = started.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._users -= 1
        if not self._users:
            self._started.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raise ``FleetFailed`` if the workers have stopped by themselves."""
        self._local.check()
        if self._fleet is not None:
            self._fleet.check()


def _fleet_size(spark: SparkSession, requested: int | None) -> int:
    if requested is not None and spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        return requested
    slot_count = slots(spark)
    size = max(slot_count - 1, 1) if requested is None else requested
    if size >= slot_count:
        remedy = f"Set fleet_size={slot_count - 1}" if slot_count > 1 else "Give the session more cores"
        raise InvalidOption(
            f"a fleet of {size} takes all {slot_count} task slots of this Spark session, and the run needs one for "
            f"itself. {remedy}, or use workers=."
        )
    return size


# Local workers.


_STOP_TIMEOUT_S: Final = 60.0
_GRACE: Final = "30s"
# Set in local worker processes to the URL of their store, which overrides the app's.
_URL_VARIABLE: Final = "PENSTOCK_LOCAL_WORKER"
_NO_GRACE: Final = b"!"
# The module name of a script in worker processes, like ``__mp_main__`` of multiprocessing.
_SCRIPT: Final = "__penstock_main__"


_worker_log: Final = get_logger("penstock.worker")


def _is_not_about_run(record: logging.LogRecord) -> bool:
    return not is_about_run(record)


def refuse_in_local_worker() -> None:
    """Raise ``InvalidOption`` in a local worker, whose script would otherwise start runs recursively."""
    if os.environ.get(_URL_VARIABLE):
        raise InvalidOption(
            "a worker called process() while it loaded the script. Put the call under "
            "`if __name__ == '__main__':`."
        )


def open_local_workers(
    task: Task[..., Any], count: int, *, concurrency: int
) -> _ThreadWorker | _ProcessWorkers:
    """Return ``count`` workers for the task's queue. Each runs up to ``concurrency`` jobs at a time.

    Raises:
        InvalidOption: ``count`` is negative, or other processes cannot load the app.
    """
    if count < 0:
        raise InvalidOption(f"workers must be >= 0, got {count}.")
    if count and is_typed_in(task.func):
        return _ThreadWorker(task.app, task.queue, concurrency=count * concurrency)
    return _ProcessWorkers(task.app, task.queue, count, concurrency=concurrency)


class _ThreadWorker:
    """A worker in a thread of this process."""

    def __init__(self, app: App, queue: str, *, concurrency: int) -> None:
        self._worker = app.worker(queues=[queue], concurrency=concurrency, grace=_GRACE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="penstock-worker", daemon=True)

    def __enter__(self) -> Self:
        # Failures become rows. Their tracebacks would bury the progress of the run.
        if not _worker_log.hasHandlers():
            _worker_log.addFilter(_is_not_about_run)
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if self._thread.is_alive() and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._worker.stop, 0 if is_interrupted else None)
            except RuntimeError:
                pass  # it has already stopped
        self._thread.join(_STOP_TIMEOUT_S)
        _worker_log.removeFilter(_is_not_about_run)

    def check(self) -> None:
        """Raise ``FleetFailed`` if the worker has stopped by itself."""
        if not self._thread.is_alive():
            raise FleetFailed(
                f"the worker of the run has stopped: {self._error!r}. Finished rows are in the output."
            ) from self._error

    def _main(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._is_ready.set()

    async def _work(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_ready.set()
        await self._worker.run()


class _ProcessWorkers:
    """``count`` worker processes.

    Raises:
        InvalidOption: other processes cannot load the app.
    """

    def __init__(self, app: App, queue: str, count: int, *, concurrency: int) -> None:
        self._count = count
        self._url = shared_url(app) if count else ""
        self._arguments = [_target(app), queue, str(concurrency)] if count else []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        # Workers can import what this process can.
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, _URL_VARIABLE: self._url}
        command = [sys.executable, "-m", __name__, *self._arguments]
        # Use separate process groups: Ctrl-C reaches only the run, which lets the workers finish.
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, process_group=0)
            for _ in range(self._count)
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        for process in self._processes:
            _stop(process, without_grace=is_interrupted)
        for process in self._processes:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check(self) -> None:
        """Raise ``FleetFailed`` if all processes have stopped by themselves."""
        codes = [process.poll() for process in self._processes]
        if codes and None not in codes:
            raise FleetFailed(
                f"the workers of the run have stopped with exit code {codes[0]}. See their output for the reason. "
                "Finished rows are in the output of the run."
            )


def _stop(process: subprocess.Popen[bytes], *, without_grace: bool) -> None:
    assert process.stdin is not None
    try:
        if without_grace:
            process.stdin.write(_NO_GRACE)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has already stopped


def _target(app: App) -> str:
    module, name = locate(app, in_script=True)
    if module != "__main__":
        return f"{module}:{name}"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise InvalidOption(
            "workers need an app that other processes can load, but this one was typed in. Define the task in the "
            "same notebook, or put the app and its tasks into a module."
        )
    return f"{Path(script).resolve()}:{name}"


def main() -> None:
    """Run a worker until standard input closes."""
    target, queue, concurrency = sys.argv[1:]
    where, _, name = target.rpartition(":")
    module = _load_script(where) if where.endswith(".py") else import_module(where)
    app: App = getattr(module, name)
    app.move_to(os.environ[_URL_VARIABLE])
    # Failures become rows. Their tracebacks would bury the progress of the run.
    log_to_stderr(StderrLog(runs=False), level=logging.WARNING)
    asyncio.run(_serve(app, queue, int(concurrency)))


def _load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_SCRIPT, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_SCRIPT] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _serve(app: App, queue: str, concurrency: int) -> None:
    worker = app.worker(queues=[queue], concurrency=concurrency, grace=_GRACE)
    loop = asyncio.get_running_loop()

    def wait_for_end() -> None:
        message = sys.stdin.buffer.read()
        loop.call_soon_threadsafe(worker.stop, 0 if message == _NO_GRACE else None)

    threading.Thread(target=wait_for_end, daemon=True).start()
    await worker.run()


if __name__ == "__main__":
    main()
