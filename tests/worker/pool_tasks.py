"""An app that worker processes import."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from penstock import App, JobContext

app = App(os.environ.get("PENSTOCK_POOL_URL", "memory://"))


@app.on_start
async def sign_in() -> None:
    if folder := os.environ.get("PENSTOCK_POOL_SIGNED_IN"):
        Path(folder, str(os.getpid())).touch()


@app.task(queue="pool")
async def whoami(context: JobContext) -> int:
    return os.getpid()


@app.task(queue="pool")
async def sleep_for_ever() -> None:
    await asyncio.sleep(3600)


@app.task(queue="pool", max_stalls=5)
async def die_once(context: JobContext) -> int:
    if context.run == 1:
        os._exit(9)
    return context.run


@app.task(queue="pool", max_stalls=5, batch=3, batch_wait="2s")
async def die_together(numbers: list[int], jobs: list[JobContext]) -> list[int]:
    if any(job.run == 1 for job in jobs):
        os._exit(9)
    return [job.run for job in jobs]


def handle_raws(contexts: list[JobContext]) -> list[int]:
    return [len(contexts) for _ in contexts]


def handle_raw(context: JobContext) -> int:
    return os.getpid()
