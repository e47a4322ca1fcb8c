"""The child process of a sandbox: one run, with its own process group and limits; its output goes to the worker.

A sandbox contains mistakes: crashes, leaks, endless loops. It does not protect against malicious code, which has all
rights of the worker's user.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import importlib
import io
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import FrameType
from typing import Final

from penstock.core.command import SandboxLimits
from penstock.core.units import describe_size
from penstock.errors import MemoryLimitExceeded
from penstock.worker.runners.child import (
    Done,
    Raised,
    Ready,
    Request,
    WorkerLink,
    decode_request,
    end_with_parent,
    perform,
    raised,
)

_LIMITS_MEMORY: Final = sys.platform == "linux"


def serve_once(pipe: Connection, output: Connection, modules: Iterable[str]) -> None:
    """Import ``modules``, run one request, answer and exit. Processes that the run starts are killed with it."""
    os.setsid()
    # Ctrl-C of a terminal does not arrive here; programs that the function starts must not inherit an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _end_group_with_parent()
    # multiprocessing forbids children of daemons. Here they are allowed, and end with the process group.
    multiprocessing.current_process().daemon = False
    _redirect(output)
    link = WorkerLink(pipe)
    try:
        _import(modules)
        link.send(Ready())
        answer = _answer(decode_request(pipe.recv_bytes()), link)
        _flush()
        link.send(answer)
        # Call exit functions, but skip the interpreter's shutdown, which can take longer than the run, and do not
        # wait for threads.
        atexit._run_exitfuncs()
        _flush()
    except (EOFError, OSError):
        # The worker is gone.
        pass
    os._exit(0)


def _answer(request: Request, link: WorkerLink) -> Done | Raised:
    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        link.cancelled = True
        raise SystemExit("stopped by SIGTERM")

    signal.signal(signal.SIGTERM, stop)
    # The stack at the stop is often the only clue about a run that hung.
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    answer = perform(request, link, _confined(request.limits))
    # A function that returns after SIGTERM has stopped, not completed.
    return raised(SystemExit("stopped by SIGTERM")) if link.cancelled else answer


@contextmanager
def _confined(limits: SandboxLimits) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if limits.memory_bytes and _LIMITS_MEMORY:
        # Not RLIMIT_AS, which counts reserved memory: threads and libraries reserve a lot that they never use.
        resource.setrlimit(resource.RLIMIT_DATA, (_capped(limits.memory_bytes, before[1]), before[1]))
    if limits.cpu_ms:
        _limit_cpu(limits.cpu_ms / 1000)
    try:
        yield
    except MemoryError as error:
        # The traceback still holds what filled the memory, and reporting the error needs some more.
        resource.setrlimit(resource.RLIMIT_DATA, before)
        if not limits.memory_bytes:
            raise
        size = describe_size(limits.memory_bytes)
        raise MemoryLimitExceeded(
            f"the run asked for more than its {size} of memory. Raise the task's memory, or use less."
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _capped(limit: int, hard: int) -> int:
    """Return ``limit``, capped by the hard limit."""
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _limit_cpu(seconds: float) -> None:
    """Let SIGPROF end the process after ``seconds`` of processor time from now on."""
    faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # In whole seconds, and also for processes it starts, which do not inherit the timer.
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = _capped(math.ceil(time.process_time() + seconds) + 1, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _end_group_with_parent() -> None:
    """Kill everything the run started when the worker ends, even by SIGKILL."""
    group = os.getpgrp()
    end_with_parent(lambda: os.killpg(group, signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if sys.platform == "linux" and parent is not None:
        # The thread cannot act while a function holds the interpreter's lock. The kernel can: the worker's end of
        # this pipe closes with the worker, which signals the group.
        sentinel = parent.sentinel
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -group)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _redirect(output: Connection) -> None:
    """Redirect both streams to one pipe, which keeps the order of lines; line by line, so that a crash loses none."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        # Before dup2: if the worker's stream is a file, Python asks for its position.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
        os.dup2(output.fileno(), number)
    output.close()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(file=2, all_threads=False)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            # The function has removed or closed the stream.
            pass


def _import(modules: Iterable[str]) -> None:
    """Import modules ahead of the run. A module that cannot be imported fails the run that needs it."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            return
