"""CPU-bound functions run in processes of their own, one job at a time each, so that one can be killed alone.

A thread stands by for each busy process and blocks on its pipe; the loop is never touched by a slow or dying
child. What travels are the payload's bytes and the name of the function, never a pickled closure.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, assert_never

import msgspec

from penstock.errors import InvalidOption
from penstock.worker.context import context_of
from penstock.worker.run import Call, EncodedResult, Run, Undecodable
from penstock.worker.runners import child
from penstock.worker.runners.child import Discarded, Done, Raised, Reported, Request
from penstock.worker.runners.thread import ThreadRunner

if TYPE_CHECKING:
    from penstock.task import Task

__all__ = ["ProcessDied", "ProcessRunner"]

logger = logging.getLogger("penstock.worker")

# Not fork: a worker has threads, and a forked child would hold copies of their locks and connections.
_spawn: Final = multiprocessing.get_context("spawn")


class ProcessDied(Exception):
    """The process that ran the job ended before the job did: killed, out of memory, or exited."""


class _Child:
    """One process and our end of its pipe. Used by one thread at a time; ``kill`` may come from any."""

    def __init__(self) -> None:
        ours, theirs = _spawn.Pipe()
        self.pipe: Connection = ours
        self.process = _spawn.Process(
            target=child.serve, args=(theirs,), name="penstock-handler", daemon=True
        )
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """End it: an idle child leaves when its pipe closes."""
        self.pipe.close()
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()

    def exit_code(self) -> int | None:
        self.process.join(1.0)
        return self.process.exitcode


class ProcessRunner:
    """At most ``size`` processes (one per processor unless given), started when needed and replaced when they die."""

    def __init__(self, size: int | None = None) -> None:
        self._threads = ThreadRunner(size or os.cpu_count() or 1)
        self._idle: list[_Child] = []
        self._lock = threading.Lock()
        self._closed = False

    def bind(self, task: Task[..., Any]) -> Call:
        """A call that has the task's function run by a process, found there by its module and name."""
        module, name = task.func.__module__, task.func.__qualname__
        if "<locals>" in name:
            raise InvalidOption(
                f"task {task.name!r} cannot run in a process: {name} is defined inside a function, "
                "where another process cannot import it. Move it to the top of a module."
            )
        return lambda run: self._threads.run(lambda run: self._call(run, module, name), run)

    def close(self) -> None:
        """End the idle processes now, the others when they are done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()
        self._threads.close()

    def _call(self, run: Run, module: str, name: str) -> EncodedResult:
        process = self._take()
        run.kill = process.kill
        try:
            if run.abort is not None:
                raise ProcessDied("aborted before it began")
            request = Request(module, name, queue=run.lane.name, lease=run.lease)
            process.pipe.send_bytes(msgspec.msgpack.encode(request))
            answer = self._answer(process, run)
        except (EOFError, OSError) as error:
            died = ProcessDied(f"the process that ran the job ended with exit code {process.exit_code()}")
            process.close()
            raise died from error
        finally:
            run.kill = None
        self._give_back(process)
        return answer

    def _answer(self, process: _Child, run: Run) -> EncodedResult:
        while True:
            match child.decode_message(process.pipe.recv_bytes()):
                case Done(result=result):
                    return EncodedResult(result)
                case Raised() as raised:
                    self._give_back_after(process, raised)
                case Reported() as said:
                    # By way of the context: that a run has one tells the executor to wait for its last words.
                    context_of(run).pass_on(progress=said.progress, log=said.log, payload=said.payload)
                case Discarded():
                    run.discarded = True
                case _ as never:
                    assert_never(never)

    def _give_back_after(self, process: _Child, raised: Raised) -> None:
        self._give_back(process)
        error = raised.to_exception()
        if raised.undecodable:
            raise Undecodable from error
        raise error

    def _take(self) -> _Child:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.process.is_alive():
                    return process
                process.close()
        return _Child()

    def _give_back(self, process: _Child) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.close()
