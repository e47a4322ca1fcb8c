"""The Spark task of a fleet: one worker of the app, in the Python process of an executor."""

from __future__ import annotations

import asyncio
import platform
import re
from importlib import import_module
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.client.app import App
from penstock.client.imports import find
from penstock.errors import InvalidOption, PenstockError, StorageError
from penstock.spark.driver_lease import LeaseCheck
from penstock.spark.tasks import Batches, Mapper
from penstock.storage import open_storage
from penstock.worker.health import WorkerStats
from penstock.worker.worker import Worker

_CHECK_EVERY_S: Final = 1.0
_COUNTERS: Final = ("claimed", "completed", "failed", "retrying", "cancelled", "released", "stalled")
_ARROW: Final = pa.schema(
    {
        **dict.fromkeys(("worker", "host"), pa.string()),
        **dict.fromkeys(_COUNTERS, pa.int64()),
        "abandoned": pa.bool_(),
        "error": pa.string(),
    }
)
REPORT: Final = from_arrow_schema(_ARROW)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The input of each Spark task: the app (``module:name``), the ``modules`` with its tasks, the options of the
    worker, and the driver's lease. The worker stops when that lease ends. It uses the driver's store."""

    app: str
    modules: list[str]
    lease_check: LeaseCheck
    options: dict[str, Any]


def work(assignment: Assignment) -> Mapper:
    """Return a mapper that runs a worker until the fleet ends or, if the options say so, the queues are drained."""

    def run(batches: Batches) -> Batches:
        for _ in batches:
            pass
        yield _row(assignment)

    return run


def _row(assignment: Assignment) -> pa.RecordBatch:
    """Run the worker and return its report. Report a configuration error instead of raising it, because Spark would
    repeat the task four times and bury the message."""
    worker, stats, abandoned, error = "", WorkerStats(), False, None
    try:
        worker, stats, abandoned = _serve(assignment)
    except StorageError:
        raise
    except PenstockError as raised:
        error = str(raised)
    counts = {name: [getattr(stats, name)] for name in _COUNTERS}
    row = {
        "worker": [worker],
        "host": [platform.node()],
        **counts,
        "abandoned": [abandoned],
        "error": [error],
    }
    return pa.RecordBatch.from_pydict(row, schema=_ARROW)


def _serve(assignment: Assignment) -> tuple[str, WorkerStats, bool]:
    app = find(assignment.app, App)
    _import_tasks(assignment.modules)
    lease_check = assignment.lease_check
    if not asyncio.run(_is_held(lease_check)):
        return "", WorkerStats(), True
    # The app's module may configure another store on this machine.
    url, namespace = app.url, app.namespace
    app.move_to(lease_check.url)
    try:
        worker = app.worker(name=_name(), **assignment.options)
        watch = _Watch(worker, lease_check)
        worker.on_start(watch.begin)
        worker.run_sync()
        return worker.id, worker.stats, watch.abandoned
    finally:
        app.move_to(url, namespace=namespace)


def _import_tasks(modules: list[str]) -> None:
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise InvalidOption(
                f"module {module!r}, which defines tasks of the app, cannot be imported on {platform.node()}: {error}. "
                "Install it where Spark runs, or ship it (--py-files, spark.addArtifacts)."
            ) from error


def _name() -> str:
    context = TaskContext.get()
    part = 0 if context is None else context.partitionId()
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", platform.node())[:100]
    return f"spark-{part}-{host}"


async def _is_held(lease_check: LeaseCheck) -> bool:
    storage = open_storage(lease_check.url)
    await storage.open()
    try:
        return await lease_check.is_held(storage)
    finally:
        await storage.close()


class _Watch:
    """Stops the worker when the fleet's lease ends, because the fleet was stopped or its driver is dead. The worker is
    then ``abandoned``, unless it was already stopping."""

    def __init__(self, worker: Worker, lease_check: LeaseCheck) -> None:
        self._worker = worker
        self._lease_check = lease_check
        self._task: asyncio.Task[None] | None = None
        self.abandoned = False

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        storage = await self._worker.app.connect()
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            try:
                if not await self._lease_check.is_held(storage):
                    self.abandoned = self._worker.state != "stopping"
                    self._worker.stop()
                    return
            except StorageError:
                # Keep watching: the worker waits for the store as well.
                continue
