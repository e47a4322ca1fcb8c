"""Ctrl-C while something runs that wants to come to a good end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["noted_interrupts"]


@contextmanager
def noted_interrupts() -> Iterator[threading.Event]:
    """Within the block the first SIGINT sets the event, and every further one raises ``KeyboardInterrupt``.

    In the main thread, that is: elsewhere nobody sees signals. One that the process ignores stays ignored.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield noted
        return
    is_first = True

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_first
        if not is_first:
            raise KeyboardInterrupt
        is_first = False
        # Not here: the thread that was interrupted may hold the lock of the event.
        threading.Thread(target=noted.set, name="penstock-interrupt", daemon=True).start()

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
