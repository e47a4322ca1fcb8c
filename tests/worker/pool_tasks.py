"""An app that worker processes import."""

from __future__ import annotations

import os

from penstock import App, JobContext

app = App(os.environ.get("PENSTOCK_POOL_URL", "memory://"))


@app.task(queue="pool")
async def whoami(context: JobContext) -> int:
    return os.getpid()


@app.task(queue="pool", max_stalls=5)
async def die_once(context: JobContext) -> int:
    if context.run == 1:
        os._exit(9)
    return context.run


def handle_raw(context: JobContext) -> int:
    return os.getpid()
