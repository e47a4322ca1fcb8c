"""What a worker runs jobs with: plans and executor, wired for a shift and for a test alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.worker.after import AfterHooks
from penstock.worker.executor import Executor
from penstock.worker.plans import Plans
from penstock.worker.runners.command import CommandRunner
from penstock.worker.runners.process import ProcessRunner
from penstock.worker.runners.sandbox import SandboxRunner
from penstock.worker.runners.thread import ThreadRunner

if TYPE_CHECKING:
    from penstock.worker.middleware import Middleware
    from penstock.worker.reporter import Reporter
    from penstock.worker.run import Run
    from penstock.worker.worker import Worker

__all__ = ["make_executor", "make_plans"]


def make_plans(worker: Worker, middleware: Sequence[Middleware], *, unknown_after_ms: int = 0) -> Plans:
    """How this worker's jobs are run, with threads and processes of its own."""
    return Plans(
        worker.app,
        handlers=worker.handlers,
        middleware=middleware,
        threads=ThreadRunner(worker.options.threads),
        processes=ProcessRunner(worker.options.child_processes),
        sandboxes=SandboxRunner(worker.options.child_processes),
        concurrency=worker.options.concurrency,
        commands=None if worker.options.commands is None else CommandRunner(worker.options.commands),
        unknown_after_ms=unknown_after_ms,
    )


def make_executor(
    worker: Worker,
    plans: Plans,
    *,
    reporter: Reporter,
    finished: Callable[[Run], None],
    freed: Callable[[], None],
    interrupts: bool = True,
) -> Executor:
    """An executor with the worker's hooks; it closes ``plans`` when it is closed."""
    hooks = worker.options.after_execution
    # None without hooks: then runs do not even ask.
    after = AfterHooks(hooks, lambda e, run: worker.tally.error(e, queue=run.lane.name)) if hooks else None
    return Executor(
        worker.app,
        plans=plans,
        after=after,
        reporter=reporter,
        finished=finished,
        freed=freed,
        stuck=worker.tally.stuck,
        interrupts=interrupts,
    )
