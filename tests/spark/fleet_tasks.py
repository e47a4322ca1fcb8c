"""Tasks of the fleet tests, in a module that executors can import. They learn from the driver where the store is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from penstock import App

app = App("memory://")


@app.task(queue="mixed")
async def double(n: int) -> int:
    return 2 * n


@app.task(queue="mixed", attempts=1)
def refuse(n: int) -> int:
    raise SystemExit(f"not {n}")


@app.task(queue="mixed", runner="process")
def process_id(n: int) -> int:
    return os.getpid()


@app.task(queue="mixed", batch=100, batch_wait="50ms")
def lengths(rows: pa.Table) -> pa.Array:
    return pc.utf8_length(rows["text"])


@app.task(queue="mixed", max_stalls=5)
def die_once(marker: str) -> str:
    """Takes the executor's Python along, the first time."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


@app.task(queue="mixed", max_stalls=9)
def die_often(folder: str, times: int) -> int:
    """Takes the executor's Python along, that many times."""
    died = len(list(Path(folder).iterdir()))
    if died < times:
        (Path(folder) / str(died)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return died


@app.task(queue="rows")
async def square(n: int) -> int:
    return n * n


def oversleep(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In place of a fleet's loop: one that does not hear when it is told to stop."""
    time.sleep(60)
    yield from ()
