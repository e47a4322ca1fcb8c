"""CPU-bound functions run in processes of their own, one job at a time each, so that one can be killed alone.

A thread stands by for each busy process and blocks on its pipe; the loop is never touched by a slow or dying
child. What travels are the payload's bytes and the name of the function, never a pickled closure.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.worker.run import Call, EncodedResult, Run
from penstock.worker.runners.child import serve
from penstock.worker.runners.messages import Done, Raised, Request
from penstock.worker.runners.parent import ChildProcess, IdleChildren, address_of, answered, hear
from penstock.worker.runners.thread import ThreadRunner

if TYPE_CHECKING:
    from penstock.task import Task

__all__ = ["ProcessDied", "ProcessRunner"]


class ProcessDied(Exception):
    """The process that ran the job ended before the job did: killed, out of memory, or exited."""


class ProcessRunner:
    """At most ``size`` processes (one per processor unless given), started when needed and replaced when they die."""

    def __init__(self, size: int | None = None) -> None:
        self._threads = ThreadRunner(size or os.cpu_count() or 1)
        self._idle: IdleChildren[ChildProcess] = IdleChildren()

    def bind(self, task: Task[..., Any]) -> Call:
        """A call that has the task's function run by a process, found there by its module and name."""
        module, name = address_of(task)

        def request(run: Run) -> Request:
            app = task.app
            return Request(module, name, run.lane.name, run.lease, app.moved_to, app.included)

        return lambda run: self._threads.run(lambda run: self._call(run, request(run)), run)

    def close(self) -> None:
        """End the idle processes now, the others when they are done."""
        self._idle.close()
        self._threads.close()

    def _call(self, run: Run, request: Request) -> EncodedResult:
        child = self._idle.take() or ChildProcess(serve)
        run.kill = child.kill
        try:
            if run.abort is not None:
                raise EOFError
            child.send(request)
            last = _last_message(child, run)
        except (EOFError, OSError) as error:
            run.kill = None
            raise ProcessDied(f"the process that ran the job ended with exit code {child.close()}") from error
        run.kill = None
        if run.abort is None:
            self._idle.put(child)
        else:
            # Whoever aborted the run may be about to kill its process, which must not be another run's by then.
            child.close()
        return answered(last)


def _last_message(child: ChildProcess, run: Run) -> Done | Raised:
    while True:
        last = hear(child.receive(), run)
        if last is not None:
            return last
