"""The workers that a run starts, besides those on its queue anyway: processes here, Spark's executors, or both."""

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
from types import ModuleType, TracebackType
from typing import Any, Final, Protocol, Self

from pyspark.sql import SparkSession

from penstock.client.app import App
from penstock.client.imports import is_typed_in, locate
from penstock.client.task import Task
from penstock.core.text import StderrLog, get_logger, is_about_run, log_to_stderr
from penstock.errors import InvalidOption
from penstock.spark.errors import FleetFailed
from penstock.spark.executors import Fleet, fleet, slots
from penstock.spark.store import shared_url


class Staff:
    """Hired within a ``with`` block, for as long as the run takes; of several blocks inside each other, the outermost.

    Raises:
        InvalidOption: a ``fleet`` nobody knows, an app that others cannot import, or a fleet that would leave no slot
            to Spark for the run itself: each would wait for the other.
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
                f"fleet={fleet!r} is not known. Give fleet='spark', or workers=4 for processes here."
            )
        if fleet is None and fleet_size is not None:
            raise InvalidOption("fleet_size is the size of Spark's fleet. Give fleet='spark', too.")
        self._spark = spark
        self._task = task
        self._crew = open_crew(task, workers, concurrency=concurrency)
        self._size = 0 if fleet is None else _room(spark, fleet_size)
        self._concurrency = concurrency
        self._fleet: Fleet | None = None
        self._hired = ExitStack()
        self._users = 0

    def __enter__(self) -> Self:
        self._users += 1
        if self._users > 1:
            return self
        with ExitStack() as hired:
            hired.enter_context(self._crew)
            if self._size:
                # Until the run ends: the queue may be drained while rows are yet to be put in.
                self._fleet = fleet(
                    self._spark,
                    self._task.app,
                    size=self._size,
                    queues=[self._task.queue],
                    until_drained=False,
                    concurrency=self._concurrency,
                )
                hired.enter_context(self._fleet)
            self._hired = hired.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            self._hired.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raises ``FleetFailed`` if those that were hired have ended by themselves."""
        self._crew.check()
        if self._fleet is not None:
            self._fleet.check()


def _room(spark: SparkSession, asked: int | None) -> int:
    if asked is not None and spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        return asked
    there = slots(spark)
    size = max(there - 1, 1) if asked is None else asked
    if size >= there:
        raise InvalidOption(
            f"a fleet of {size} takes all {there} task slots of this Spark session, and the run needs one for itself. "
            f"Give {f'fleet_size={there - 1}' if there > 1 else 'the session more cores'}, or use workers=."
        )
    return size


# Workers for a run: processes of this machine, started with it and ended with it; for a task of a
# notebook or a prompt, which no other process can load, a thread.
#
# ``python -m penstock.spark.processing.workers APP QUEUE CONCURRENCY`` is what each of them runs; ``APP`` is
# ``module:name``, or ``path.py:name`` for an app that stands in the script itself. It ends when its
# standard input does, so that none is left behind by a run that was killed; running jobs have their grace
# then, unless the last that it read was a ``!``.


_PATIENCE_S: Final = 60.0
_GRACE: Final = "30s"
# Says that a process is one of a crew, and which store it works for, whatever its module would say.
_MARK: Final = "PENSTOCK_CREW"
_AT_ONCE: Final = b"!"
# What a script is called in the processes of its crew, as ``__mp_main__`` is in those of multiprocessing.
_SCRIPT: Final = "__penstock_main__"


_worker_log: Final = get_logger("penstock.worker")


def _is_no_run(record: logging.LogRecord) -> bool:
    return not is_about_run(record)


def refuse_in_crew() -> None:
    """Raises ``InvalidOption`` in a process of a crew: its script would start a run of its own, and that another."""
    if os.environ.get(_MARK):
        raise InvalidOption(
            "process() was called by a worker that was loading the script. Put the call under "
            "`if __name__ == '__main__':`, so that it is made once."
        )


class Crew(Protocol):
    """Workers on one queue, within a ``with`` block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self) -> None:
        """Raise ``FleetFailed`` if all workers have ended by themselves."""
        ...


def open_crew(task: Task[..., Any], count: int, *, concurrency: int) -> Crew:
    """Return ``count`` workers for the queue of a task, with ``concurrency`` jobs at a time each.

    Raises:
        InvalidOption: ``count`` is negative, or other processes cannot load the app.
    """
    if count < 0:
        raise InvalidOption(f"workers={count} is negative. Give 0 to start none.")
    if count and is_typed_in(task.func):
        return _ThreadCrew(task.app, task.queue, concurrency=count * concurrency)
    return _ProcessCrew(task.app, task.queue, count, concurrency=concurrency)


class _ThreadCrew:
    """A worker in a thread of this process."""

    def __init__(self, app: App, queue: str, *, concurrency: int) -> None:
        self._worker = app.worker(queues=[queue], concurrency=concurrency, grace=_GRACE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="penstock-worker", daemon=True)

    def __enter__(self) -> Self:
        # Failures come back as rows. Of many, the tracebacks would bury the progress of the run.
        if not _worker_log.hasHandlers():
            _worker_log.addFilter(_is_no_run)
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_hasty = kind is not None and issubclass(kind, KeyboardInterrupt)
        if self._thread.is_alive() and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._worker.stop, 0 if is_hasty else None)
            except RuntimeError:
                pass  # it has ended by itself
        self._thread.join(_PATIENCE_S)
        _worker_log.removeFilter(_is_no_run)

    def check(self) -> None:
        """Raise ``FleetFailed`` if the worker has ended by itself."""
        if not self._thread.is_alive():
            raise FleetFailed(
                f"the worker that was started for the run has ended: {self._error!r}. What was done is in the output."
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


class _ProcessCrew:
    """``count`` worker processes.

    Raises (when made): ``InvalidOption``, if other processes cannot load the app.
    """

    def __init__(self, app: App, queue: str, count: int, *, concurrency: int) -> None:
        self._count = count
        self._url = shared_url(app) if count else ""
        self._arguments = [_target(app), queue, str(concurrency)] if count else []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        # What this process can import, they can.
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, _MARK: self._url}
        command = [sys.executable, "-m", __name__, *self._arguments]
        # In groups of their own: Ctrl-C is for the run, which lets them finish what they have begun.
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, process_group=0)
            for _ in range(self._count)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_hasty = kind is not None and issubclass(kind, KeyboardInterrupt)
        for process in self._processes:
            _tell_to_end(process, at_once=is_hasty)
        for process in self._processes:
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check(self) -> None:
        """Raises ``FleetFailed`` if all of them have ended by themselves, which they are not to do."""
        codes = [process.poll() for process in self._processes]
        if codes and None not in codes:
            raise FleetFailed(
                f"the workers that were started for the run have ended, with code {codes[0]}. What they have printed "
                "says why; what was done is in the output."
            )


def _tell_to_end(process: subprocess.Popen[bytes], *, at_once: bool) -> None:
    assert process.stdin is not None
    try:
        if at_once:
            process.stdin.write(_AT_ONCE)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has ended by itself


def _target(app: App) -> str:
    module, name = locate(app, in_script=True)
    if module != "__main__":
        return f"{module}:{name}"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise InvalidOption(
            "workers need an app that other processes can load, and this one was typed in. Define the task in the same "
            "notebook, or put the app and its tasks into a module."
        )
    return f"{Path(script).resolve()}:{name}"


def main() -> None:
    """Work on a queue until standard input ends."""
    target, queue, concurrency = sys.argv[1:]
    where, _, name = target.rpartition(":")
    module = _script(where) if where.endswith(".py") else import_module(where)
    app: App = getattr(module, name)
    app.move_to(os.environ[_MARK])
    # Failures come back as rows. Of many, the tracebacks would bury the progress of the run.
    log_to_stderr(StderrLog(runs=False), level=logging.WARNING)
    asyncio.run(_serve(app, queue, int(concurrency)))


def _script(path: str) -> ModuleType:
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
        said = sys.stdin.buffer.read()
        loop.call_soon_threadsafe(worker.stop, 0 if said == _AT_ONCE else None)

    threading.Thread(target=wait_for_end, daemon=True).start()
    await worker.run()


if __name__ == "__main__":
    main()
