"""In a sandbox: one run, in a process group and under limits of its own, with its output sent to the worker.

This keeps mistakes in: crashes, leaks, endless loops. It is no wall against code that means harm, which may do
whatever the worker's user may.
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
from penstock.worker.runners.child import WorkerLink, end_with_parent, perform
from penstock.worker.runners.messages import Done, Raised, Ready, Request, decode_request, raised

_LIMITS_MEMORY: Final = sys.platform == "linux"


def serve_once(pipe: Connection, output: Connection, modules: Iterable[str]) -> None:
    """Get ready, import ``modules``, run one request, answer, and exit. Whatever it starts is killed with it."""
    os.setsid()
    # No terminal's Ctrl-C comes here; programs that the function starts must not inherit a deaf ear for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _end_group_with_parent()
    # By multiprocessing a daemon may have no children; a function may, and they end with its group.
    multiprocessing.current_process().daemon = False
    _redirect(output)
    link = WorkerLink(pipe)
    try:
        _import(modules)
        link.send(Ready())
        answer = _answer(decode_request(pipe.recv_bytes()), link)
        _flush()
        link.send(answer)
        # What was registered for the exit is done, if it does not take long. The interpreter is not taken apart
        # piece by piece, which takes longer than many a run, and threads that are left are not waited for.
        atexit._run_exitfuncs()
        _flush()
    except (EOFError, OSError):
        # Nobody listens any more.
        pass
    os._exit(0)


def _answer(request: Request, link: WorkerLink) -> Done | Raised:
    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        link.cancelled = True
        raise SystemExit("told to stop by SIGTERM")

    signal.signal(signal.SIGTERM, stop)
    # Where it was when it was stopped is often all there is to know of a run that hung.
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    answer = perform(request, link, _confined(request.limits))
    # A function that was told to stop and returns has stopped; it has not completed.
    return raised(SystemExit("stopped by SIGTERM")) if link.cancelled else answer


@contextmanager
def _confined(limits: SandboxLimits) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if limits.memory_bytes and _LIMITS_MEMORY:
        # Not RLIMIT_AS, which counts what is reserved and never used: threads and libraries reserve a lot.
        resource.setrlimit(resource.RLIMIT_DATA, (_within(limits.memory_bytes, before[1]), before[1]))
    if limits.cpu_ms:
        _limit_cpu(limits.cpu_ms / 1000)
    try:
        yield
    except MemoryError as error:
        # The frames of the traceback still hold what filled the memory; to tell of it takes some more.
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


def _within(limit: int, hard: int) -> int:
    """``limit``, or the least that somebody else allows."""
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _limit_cpu(seconds: float) -> None:
    """SIGPROF ends the process when it has used so much from now on, start-up not counted."""
    faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # In whole seconds, and for what it starts, too, which inherits no timer.
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = _within(math.ceil(time.process_time() + seconds) + 1, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _end_group_with_parent() -> None:
    """When the worker is gone, even by SIGKILL, nothing of the run stays behind."""
    group = os.getpgrp()
    end_with_parent(lambda: os.killpg(group, signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if sys.platform == "linux" and parent is not None:
        # The thread cannot act while a function holds the interpreter's lock. So the kernel does: the worker's
        # end of this pipe closes with the worker, which signals the group.
        sentinel = parent.sentinel
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -group)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _redirect(output: Connection) -> None:
    """One pipe for both, so that lines keep their order; line by line, so that a crash loses none."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        # Before, and not after: where the worker's own is a file, Python asks for the position in it.
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
            # None, or closed by the function: what is lost was the function's to lose.
            pass


def _import(modules: Iterable[str]) -> None:
    """So that a run need not. What cannot be imported fails the run that needs it, with the reason."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            return
