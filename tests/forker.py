"""The process that ``preloaded.py`` has scripts run by: ``forker.py ADDRESS``. It ends when its stdin does."""

from __future__ import annotations

import atexit
import gc
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

# Tables and tests need libraries that take longer to import than most commands take to run.
_NOT_LOADED: Final = (
    "penstock.spark",
    "penstock.testing",
    "penstock.bridges",
    "penstock.integrations",
    "penstock.__main__",
)


class _Forker:
    """The process that forks: a script per connection, and its exit code in answer."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        # By the descriptor that is ready when the process has ended.
        self._forks: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> list[int]:
        """Fork until stdin ends. Return in forks only: the streams of a script, and a file that says what to run."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == sys.stdin.fileno():
                    sys.exit()
                if key.fd in self._forks:
                    self._tell_end(key.fd)
                elif key.data is not None:
                    # The test has given up.
                    os.kill(key.data, signal.SIGKILL)
                    self._selector.unregister(key.fd)
                elif descriptors := self._fork():
                    return descriptors

    def _fork(self) -> list[int]:
        """Return nothing in the process that goes on forking."""
        connection, _ = self._listener.accept()
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
        pid = os.fork()
        if pid == 0:
            self._let_go(connection)
            return descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        ended = os.pidfd_open(pid)
        self._forks[ended] = pid, connection
        self._selector.register(ended, selectors.EVENT_READ)
        self._selector.register(connection, selectors.EVENT_READ, pid)
        return []

    def _tell_end(self, ended: int) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        pid, connection = self._forks.pop(ended)
        _, status = os.waitpid(pid, 0)
        with suppress(KeyError):
            self._selector.unregister(connection)
        with connection, suppress(BrokenPipeError):
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())

    def _let_go(self, connection: socket.socket) -> None:
        """Close what the script must not have."""
        self._selector.close()
        self._listener.close()
        connection.close()
        for ended, (_, other) in self._forks.items():
            os.close(ended)
            other.close()


def _import_commands() -> None:
    """Import what commands use, and the modules that they import late."""
    import penstock

    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not module.name.startswith(_NOT_LOADED):
            import_module(module.name)


def _become(descriptors: list[int]) -> None:
    """Run the script that was asked for in this process."""
    *streams, asked = descriptors
    with open(asked, "rb") as file:
        request = json.load(file)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    first, *arguments = request["command"]
    if first == "-m":
        sys.argv, sys.path[0] = arguments, request["folder"]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = request["command"], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def _end(code: int) -> NoReturn:
    """End this process as the interpreter would, but leave its memory to the system: freeing it takes 0.07 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main(address: str) -> None:
    _import_commands()
    # What is here stays, so the forks need not look at it.
    gc.freeze()
    forker = _Forker(address)
    print("ready", flush=True)
    descriptors = forker.serve()
    try:
        _become(descriptors)
    except SystemExit as exit:
        if exit.code is not None and not isinstance(exit.code, int):
            raise
        _end(exit.code or 0)
    _end(0)


if __name__ == "__main__":
    _main(sys.argv[1])
