"""The app that workers and executors of bench/spark import: one task, which does nothing."""

from __future__ import annotations

from penstock import App

__all__ = ["app", "noop"]

app = App()


@app.task
async def noop(n: int) -> int:
    return n
