"""SIGTERM and SIGINT: the first asks, the second insists."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["STOP_SIGNALS", "handled"]

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handled(on_signal: Callable[[], None]) -> Iterator[None]:
    """Call ``on_signal`` on the running loop at each of the stop signals; afterwards all is as it was.

    Only the main thread can have them: elsewhere, and where the platform has none, nothing happens. A signal that
    the process ignores stays ignored: a supervisor passes Ctrl-C on by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    heeded = [number for number in STOP_SIGNALS if before[number] is not signal.SIG_IGN]
    try:
        for number in heeded:
            loop.add_signal_handler(number, on_signal)
    except NotImplementedError:
        yield
        return
    try:
        yield
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)
