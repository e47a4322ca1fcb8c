"""The app that the workers of bench/process import: one task, which returns the length of a text."""

from __future__ import annotations

import os

from penstock import App

__all__ = ["URL", "app", "measure"]

URL = "BENCH_PROCESS_URL"

app = App(os.environ.get(URL, "memory://"))


@app.task(queue="bench-process")
async def measure(k: int, name: str, text: str, x: float) -> int:
    return len(text)
