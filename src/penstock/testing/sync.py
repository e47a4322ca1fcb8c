"""The sync face of a harness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.client.loopthread import run
from penstock.core.units import Duration

if TYPE_CHECKING:
    from penstock.client.task import Task
    from penstock.storage.values import Counts
    from penstock.testing.harness import Harness
    from penstock.testing.record import Drained, Recorded


class SyncHarness:
    """See ``Harness``. Handlers that are coroutine functions run on the loop thread of the sync face."""

    __slots__ = ("_target",)

    def __init__(self, target: Harness) -> None:
        self._target = target

    def drain(
        self,
        *queues: str,
        until: Duration | None = None,
        raise_failures: bool | None = None,
        max_runs: int = 10_000,
    ) -> Drained:
        """See ``Harness.drain``."""
        return run(self._target.drain(*queues, until=until, raise_failures=raise_failures, max_runs=max_runs))

    def run_all(self, *queues: str, raise_failures: bool | None = None, max_runs: int = 10_000) -> Drained:
        """See ``Harness.run_all``."""
        return run(self._target.run_all(*queues, raise_failures=raise_failures, max_runs=max_runs))

    def perform(self, task: Task[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See ``Harness.perform``."""
        return run(self._target.perform(task, *args, **kwargs))

    def enqueued(
        self, task: Task[..., Any] | str | None = None, *args: Any, **criteria: Any
    ) -> list[Recorded]:
        """See ``Harness.enqueued``."""
        return run(self._target.enqueued(task, *args, **criteria))

    def assert_enqueued(
        self, task: Task[..., Any] | str | None = None, *args: Any, count: int | None = None, **criteria: Any
    ) -> list[Recorded]:
        """See ``Harness.assert_enqueued``."""
        __tracebackhide__ = True
        return run(self._target.assert_enqueued(task, *args, count=count, **criteria))

    def refute_enqueued(self, task: Task[..., Any] | str | None = None, *args: Any, **criteria: Any) -> None:
        """See ``Harness.refute_enqueued``."""
        __tracebackhide__ = True
        run(self._target.refute_enqueued(task, *args, **criteria))

    def left(self) -> dict[str, Counts]:
        """See ``Harness.left``."""
        return run(self._target.left())

    def reset(self) -> None:
        """See ``Harness.reset``."""
        run(self._target.reset())
