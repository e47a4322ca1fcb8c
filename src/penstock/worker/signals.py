"""SIGTERM and SIGINT: the first asks, the second insists.

The event loop takes the signals. While a handler blocks it, Python still calls ``received`` in the main thread,
which may raise ``LoopBlocked`` there to end that handler.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class LoopBlocked(BaseException):
    """Raised in a handler that blocks the event loop although the time of its worker is over."""


@contextmanager
def handled(on_signal: Callable[[], None], *, received: Callable[[], None]) -> Iterator[None]:
    """Call ``on_signal`` on the running loop at each of the stop signals; afterwards all is as it was.

    ``received`` is called before that, in the middle of whatever the main thread does.
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
            # The loop learns of signals by a file descriptor and has no use for Python's own handler.
            signal.signal(number, lambda *_: received())
            signal.siginterrupt(number, False)
    except NotImplementedError:
        yield
        return
    try:
        yield
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)
