"""Run Python scripts in new processes that need not import Penstock first.

A process of its own (``forker.py``) imports what commands import, then forks once per request. Each fork runs a script
like a new interpreter would: with its own arguments, folder, environment and streams, up to the end of the interpreter.
That saves most of the 0.3 s of processor time that a command needs to start and to end.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO, Final

from tests.processes import MARK

__all__ = ["run_script"]

# Interpreters read these variables when they start.
_READ_AT_START: Final = ("PYTHON", "LC_", "LANG", "TZ", "LD_")


def run_script(
    *command: str,
    cwd: Path,
    env: Mapping[str, str],
    input: str = "",
    timeout: float = 60,
    options: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[bytes]:
    """Run a script to its end, as ``subprocess.run(capture_output=True)`` does.

    ``command`` is the path of a script, or ``-m`` and a module, and the arguments; ``options`` are the interpreter's.
    """
    read_at_start = frozenset((k, v) for k, v in env.items() if k.startswith(_READ_AT_START))
    request = json.dumps({"command": command, "folder": str(cwd), "environment": dict(env)})
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.connect(_forker(options, read_at_start))
        with _file(input) as stdin, _file(request) as asked:
            out, stdout = _pipe(stack)
            err, stderr = _pipe(stack)
            socket.send_fds(connection, [b"\n"], [stdin.fileno(), stdout, stderr, asked.fileno()])
            os.close(stdout)
            os.close(stderr)
        said = _read(out, err, connection.fileno(), timeout_s=timeout)
    return subprocess.CompletedProcess(command, int(said[2]), said[0], said[1])


def _file(text: str) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(text.encode(errors="surrogateescape"))
    file.seek(0)
    return file


def _pipe(stack: ExitStack) -> tuple[int, int]:
    ours, theirs = os.pipe()
    stack.callback(os.close, ours)
    return ours, theirs


def _read(*descriptors: int, timeout_s: float) -> list[bytes]:
    """Read all of them to their ends."""
    read = dict.fromkeys(descriptors, b"")
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0, deadline - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired("the script", timeout_s, *list(read.values())[:2])
            for key, _ in ready:
                part = os.read(key.fd, 65536)
                read[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
    return list(read.values())


@cache
def _forker(options: tuple[str, ...], read_at_start: frozenset[tuple[str, str]]) -> str:
    """Start a process that forks, for interpreters with these options and variables. Return its address."""
    folder = tempfile.TemporaryDirectory(prefix="penstock-preloaded-")
    address = f"{folder.name}/socket"
    process = subprocess.Popen(
        [sys.executable, *options, Path(__file__).with_name("forker.py"), address],
        # With the mark, forks that an interrupted run leaves behind are known by it, too.
        env={name: os.environ[name] for name in ("PATH", MARK) if name in os.environ} | dict(read_at_start),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(folder.cleanup)
    # It ends when its stdin does, so also if this process is killed.
    atexit.register(process.communicate)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return address
