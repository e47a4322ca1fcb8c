"""What was enqueued under a harness: to look at, and to assert. ``Harness`` has all of this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.testing.record import Recorded, Recorder, matcher

if TYPE_CHECKING:
    from penstock.core.duration import Duration
    from penstock.storage.base import Storage
    from penstock.task import Task

__all__ = ["Assertions"]


class Assertions:
    """See the module. Every accepted job counts, whoever made it and whatever became of it; duplicates do not."""

    _recorder: Recorder

    async def _storage(self) -> Storage:
        """The store under the harness."""
        raise NotImplementedError

    async def enqueued(
        self,
        task: Task[..., Any] | str | None = None,
        *args: Any,
        queue: str | None = None,
        id: str | None = None,
        delay: Duration | None = None,
        priority: int | None = None,
        payload: Any = None,
        **kwargs: Any,
    ) -> list[Recorded]:
        """The jobs that were enqueued so far, in order; those of a task, with these arguments, on a queue …

        What is not given does not matter, single arguments included. Values are compared by ``==``, so
        ``unittest.mock.ANY`` will do. An argument named like an option here is given by position.
        """
        found = matcher(
            task, args, kwargs, queue=queue, id=id, delay=delay, priority=priority, payload=payload
        )
        storage = await self._storage()
        for name in await storage.queues():
            await self._recorder.look(storage, name)
        return [job for job in self._recorder.jobs if found(job)]

    async def assert_enqueued(
        self, task: Task[..., Any] | str | None = None, *args: Any, count: int | None = None, **wanted: Any
    ) -> list[Recorded]:
        """Fail the test unless such a job was enqueued, or exactly ``count`` of them; takes what ``enqueued`` takes."""
        __tracebackhide__ = True
        found = await self.enqueued(task, *args, **wanted)
        if not found if count is None else len(found) != count:
            number = "none was" if not found else f"{len(found)} were"
            raise AssertionError(
                f"{'a job' if count is None else f'{count} jobs'} of {_described(task, args, wanted)} should have been "
                f"enqueued, and {number}. Enqueued were: {self._recorder.jobs or 'no jobs at all'}"
            )
        return found

    async def refute_enqueued(
        self, task: Task[..., Any] | str | None = None, *args: Any, **wanted: Any
    ) -> None:
        """Fail the test if such a job was enqueued; takes what ``enqueued`` takes."""
        __tracebackhide__ = True
        await self.assert_enqueued(task, *args, count=0, **wanted)


def _described(task: Task[..., Any] | str | None, args: tuple[Any, ...], wanted: dict[str, Any]) -> str:
    name = "any task" if task is None else task if isinstance(task, str) else task.name
    given = [*map(repr, args), *(f"{key}={value!r}" for key, value in wanted.items() if value is not None)]
    return f"{name}({', '.join(given)})" if given else name
