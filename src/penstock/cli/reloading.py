"""``penstock worker --reload``: a worker that is started again when a Python file here has changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Final

import click

__all__ = ["end_with_reloader", "run_reloading"]

_LOOK_EVERY_S: Final = 0.3
_PASSED_OVER: Final = frozenset({"node_modules", "site-packages", "__pycache__"})


def run_reloading(arguments: list[str], folder: Path) -> int:
    """Run ``penstock worker run`` with these arguments until it is told to end; its exit code.

    A stop is graceful, as ever: the jobs of the old worker end with the code they began with. A second Ctrl-C hands
    them back at once. So it is, too, when the terminal is closed, and when this process dies: no worker is left behind.
    """
    stopped = False
    seen = _changes(folder)
    # Nobody writes to it: the kernel closes our end when we are gone, in whatever way.
    lifeline, _ = os.pipe()
    worker = _start(arguments, lifeline)

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        # The shell and the kernel both hang up when a terminal is closed: that asks, and does not insist.
        if stopped and number != signal.SIGHUP:
            worker.terminate()
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # What is ignored stays ignored: with nohup, the terminal may go.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    while not stopped:
        time.sleep(_LOOK_EVERY_S)
        now = _changes(folder)
        if now != seen:
            changed = next(iter({path for path, _ in now.items() ^ seen.items()}))
            click.echo(f"{changed.relative_to(folder)} has changed: starting again", err=True)
            seen = now
            _end(worker)
            worker = _start(arguments, lifeline)
        elif worker.poll() == 0:
            return 0
    return _end(worker)


def end_with_reloader(lifeline: int) -> None:
    """Have this worker end as if it had been told to, when the process at the other end of ``lifeline`` is gone."""
    os.set_inheritable(lifeline, False)

    def watch() -> None:
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="penstock-lifeline", daemon=True).start()


def _start(arguments: list[str], lifeline: int) -> subprocess.Popen[bytes]:
    # In a session of its own: Ctrl-C comes to us, and we pass it on.
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "run", f"--lifeline={lifeline}", *arguments],
        pass_fds=[lifeline],
        start_new_session=True,
    )


def _end(worker: subprocess.Popen[bytes]) -> int:
    worker.terminate()
    return worker.wait()


def _changes(folder: Path) -> dict[Path, int]:
    """When each Python file below ``folder`` was last written; hidden folders and installed packages are left out."""
    found: dict[Path, int] = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _PASSED_OVER]
        for name in files:
            if name.endswith(".py") and not name.startswith("."):
                path = Path(parent, name)
                try:
                    found[path] = path.stat().st_mtime_ns
                except FileNotFoundError:
                    pass
    return found
