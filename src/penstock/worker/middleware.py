"""Middleware: code around every run. ``async def middleware(context, call_next) -> result``.

::

    async def timed(context, call_next):
        started = time.perf_counter()
        try:
            return await call_next()
        finally:
            histogram.observe(time.perf_counter() - started)

The first in the list is the outermost. What it returns is the job's result; what it raises decides the job's
fate as if the handler had raised it. A process runner's result arrives as ``EncodedResult``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.worker.context import JobContext, context_of
from penstock.worker.run import Call, Run

__all__ = ["CallNext", "Middleware", "compose"]

CallNext = Callable[[], Awaitable[Any]]
Middleware = Callable[[JobContext, CallNext], Awaitable[Any]]


def compose(middleware: Sequence[Middleware], call: Call) -> Call:
    """``call`` wrapped in all of ``middleware``; ``call`` itself if there is none."""
    for layer in reversed(middleware):
        call = _wrapped(layer, call)
    return call


def _wrapped(layer: Middleware, inner: Call) -> Call:
    def call(run: Run) -> Awaitable[Any]:
        return layer(context_of(run), lambda: inner(run))

    return call
