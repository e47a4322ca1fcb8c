"""What a fleet's tasks do on the executors: a worker of the app, in the Python process that Spark has there."""

from __future__ import annotations

import asyncio
import platform
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
from pyspark import TaskContext

from penstock.client.app import App
from penstock.client.imports import find
from penstock.errors import InvalidOption, PenstockError, StorageError
from penstock.spark.driver_lease import Charge
from penstock.storage import open_storage
from penstock.worker.health import WorkerStats
from penstock.worker.worker import Worker

_Loop: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_LOOK_EVERY_S: Final = 1.0
_COUNTED: Final = ("claimed", "completed", "failed", "retrying", "cancelled", "released", "stalled")
REPORT: Final = ", ".join(
    [
        "worker string",
        "host string",
        *(f"{name} bigint" for name in _COUNTED),
        "abandoned boolean",
        "error string",
    ]
)
_ARROW: Final = pa.schema(
    [
        ("worker", pa.string()),
        ("host", pa.string()),
        *((name, pa.int64()) for name in _COUNTED),
        ("abandoned", pa.bool_()),
        ("error", pa.string()),
    ]
)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What each task of a fleet is told: which app (``module:name``) and which ``modules`` with its tasks to import,
    with which options for its worker, and whose job to look at to know when it is over. The store is the driver's."""

    app: str
    modules: list[str]
    charge: Charge
    options: dict[str, Any]


def work(assignment: Assignment) -> _Loop:
    """The loop of a task: until the queues are drained, if that was asked for, or the fleet is ended."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        yield _row(assignment)

    return run


def _row(assignment: Assignment) -> pa.RecordBatch:
    """What became of the worker, and whether it ended because nobody held the fleet's job. A mistake that every attempt
    would repeat is told, not raised: Spark would try four times, and say it worse."""
    worker, stats, abandoned, error = "", WorkerStats(), False, None
    try:
        worker, stats, abandoned = _serve(assignment)
    except StorageError:
        raise
    except PenstockError as raised:
        error = str(raised)
    counted = {name: [getattr(stats, name)] for name in _COUNTED}
    row = {
        "worker": [worker],
        "host": [platform.node()],
        **counted,
        "abandoned": [abandoned],
        "error": [error],
    }
    return pa.RecordBatch.from_pydict(row, schema=_ARROW)


def _serve(assignment: Assignment) -> tuple[str, WorkerStats, bool]:
    app = find(assignment.app, App)
    _import_tasks(assignment.modules)
    charge = assignment.charge
    if not asyncio.run(_is_held(charge)):
        return "", WorkerStats(), True
    # What the app's module says of its store, it says of the machine it is imported on: the driver's is meant.
    url, namespace = app.url, app.namespace
    app.move_to(charge.url)
    try:
        worker = app.worker(name=_name(), **assignment.options)
        watch = _Watch(worker, charge)
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
                f"module {module!r}, which has tasks of the app, cannot be imported on {platform.node()}: {error}. "
                "Install it where Spark runs, or ship it (--py-files, spark.addArtifacts)."
            ) from error


def _name() -> str:
    context = TaskContext.get()
    part = 0 if context is None else context.partitionId()
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", platform.node())[:100]
    return f"spark-{part}-{host}"


async def _is_held(charge: Charge) -> bool:
    storage = open_storage(charge.url)
    await storage.open()
    try:
        return await charge.is_held(storage)
    finally:
        await storage.close()


class _Watch:
    """Stops the worker when nobody holds the fleet's job any more: it was ended, or its driver is dead. The worker was
    ``abandoned`` then, unless it was at its end anyway."""

    def __init__(self, worker: Worker, charge: Charge) -> None:
        self._worker = worker
        self._charge = charge
        self._task: asyncio.Task[None] | None = None
        self.abandoned = False

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        storage = await self._worker.app.connect()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                if not await self._charge.is_held(storage):
                    self.abandoned = self._worker.state != "stopping"
                    self._worker.stop()
                    return
            except StorageError:
                # The worker waits for the store, and so do we.
                continue
