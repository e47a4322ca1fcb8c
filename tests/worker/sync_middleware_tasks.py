"""A task for processes whose app has a middleware there, and a module that must be imported first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from penstock import App

PRELOADED = "tests.worker.preloaded_first"
was_first = PRELOADED in sys.modules
calls: list[str] = []

app = App("memory://sync-middleware", attempts=1)
app.preloaded = (PRELOADED,)


@app.sync_middleware
def note(call_next: Callable[[], Any]) -> Any:
    calls.append("before")
    return call_next()


@app.task(queue="cpu", runner="process")
def seen() -> list[str]:
    return [*calls, f"preloaded first: {was_first}"]
