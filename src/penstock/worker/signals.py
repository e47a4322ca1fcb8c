"""SIGTERM and SIGINT: the first signal stops the worker, the second one cuts its grace short.

The event loop handles the signals. While a handler blocks the loop, Python still calls ``received`` in the main
thread, which may raise ``LoopBlocked`` there to end that handler.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class LoopBlocked(BaseException):
    """Raised in a handler that still blocks the event loop when the worker's grace is over."""


def sigint_is_ignored() -> bool:
    """Return whether this process inherited an ignored SIGINT, as background jobs of a script do.

    The processes of a pool ignore SIGINT on purpose, because their supervisor stops them.
    """
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN and parent_process() is None


@contextmanager
def handled(on_signal: Callable[[], None], *, received: Callable[[], None]) -> Iterator[None]:
    """Call ``on_signal`` on the running loop at each stop signal; restore the old handlers at the end.

    ``received`` is called first, in the middle of whatever the main thread does. Only the main thread can handle
    signals: in other threads, and on platforms without signals, this does nothing. A signal that the process
    ignores stays ignored: a supervisor passes Ctrl-C on.
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
            # The loop learns of signals from a file descriptor and does not need Python's own handler.
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
