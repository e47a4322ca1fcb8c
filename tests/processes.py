"""Which processes live: for tests that kill, and look for what was left behind.

Run by path, ``processes.py PID MARK``, it waits for the end of a process, then kills what that has started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from uuid import uuid4

import psutil

MARK = "STARTED_BY_TESTS"
"""The variable by which the processes of a test run are known. Those that detach themselves inherit it as well."""


def is_alive(pid: int) -> bool:
    """Whether such a process runs. A zombie has ended, and only waits for whoever adopted it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leave_nothing_behind() -> None:
    """Have everything that this process starts from now on killed when it ends, even if it is killed itself."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    os.environ[MARK] = mark = uuid4().hex
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", __file__, str(os.getpid()), mark],
        environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)],
        setsid=True,  # Ctrl-C reaches the whole group, and this process has to survive it.
    )


def _started_by(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def _kill_after(pid: int, mark: str) -> None:
    try:
        psutil.Process(pid).wait()
    except psutil.NoSuchProcess:
        pass
    while processes := list(_started_by(mark)):
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=1)


if __name__ == "__main__":
    _kill_after(int(sys.argv[1]), sys.argv[2])
