"""A worker in a process of its own, to be killed: ``python -m tests.worker.mortal URL [heartbeat]``."""

from __future__ import annotations

import asyncio
import ctypes
import sys

from penstock import App

QUEUE = "mortal"

app = App(sys.argv[1] if __name__ == "__main__" else "memory://")


@app.task(queue=QUEUE)
async def hang() -> None:
    await asyncio.sleep(3600)


@app.task(queue=QUEUE)
async def hog() -> None:
    """Hold the GIL, as a long ``sorted()`` or a regular expression does: no thread of this process runs meanwhile."""
    ctypes.PyDLL(None).sleep(3600)


if __name__ == "__main__":
    app.worker(grace=0, heartbeat=sys.argv[2] if len(sys.argv) > 2 else None).run_sync()
