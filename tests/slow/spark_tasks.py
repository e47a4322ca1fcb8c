"""What the executors of the kill tests run."""

from __future__ import annotations

import asyncio
import os

from penstock import App

app = App(os.environ.get("PENSTOCK_URL", "memory://"))


@app.task(queue="worked", max_stalls=20)
async def square(n: int) -> int:
    await asyncio.sleep(0.05)
    return n * n


@app.task(queue="rows", max_stalls=20)
async def cube(n: int) -> int:
    await asyncio.sleep(0.05)
    return n * n * n
