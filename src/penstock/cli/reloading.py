"""``penstock worker --reload``: a worker that is started again when a Python file here has changed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final

import click

__all__ = ["run_reloading"]

_LOOK_EVERY_S: Final = 0.3
_PASSED_OVER: Final = frozenset({"node_modules", "site-packages", "__pycache__"})


def run_reloading(arguments: list[str], folder: Path) -> int:
    """Run ``penstock worker run`` with these arguments until it is told to end; its exit code.

    A stop is graceful, as ever: the jobs of the old worker end with the code they began with.
    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    seen = _changes(folder)
    worker = _start(arguments)
    while not stopped:
        time.sleep(_LOOK_EVERY_S)
        now = _changes(folder)
        if now != seen:
            changed = [path for path, at in now.items() if seen.get(path) != at] or [
                *(seen.keys() - now.keys())
            ]
            click.echo(f"{changed[0].relative_to(folder)} has changed: starting again", err=True)
            seen = now
            _end(worker)
            worker = _start(arguments)
        elif worker.poll() == 0:
            return 0
    return _end(worker)


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    # In a session of its own: Ctrl-C comes to us, and we pass it on once.
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "run", *arguments], start_new_session=True
    )


def _end(worker: subprocess.Popen[bytes]) -> int:
    worker.terminate()
    return worker.wait()


def _changes(folder: Path) -> dict[Path, int]:
    """When each Python file below ``folder`` was last written; hidden folders and installed packages are left out."""
    found: dict[Path, int] = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if not any(part.startswith(".") or part in _PASSED_OVER for part in parts):
            try:
                found[path] = path.stat().st_mtime_ns
            except FileNotFoundError:
                pass
    return found
