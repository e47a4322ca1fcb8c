"""Rounds of calls, one per queue, of which some may take long.

The queues of a cluster are on several servers. A call to a server that is away, or for a slot that is moving, takes up
to 30 s. Meanwhile the leases of other queues must be renewed, and their jobs rescued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

PATIENCE_S: Final = 1.0


class Round(NamedTuple, Generic[T]):
    """The answers by queue, the first failure, and whether the answer of a queue is late."""

    answers: dict[str, T]
    failure: Exception | None
    is_late: bool


class Rounds(Generic[T]):
    """Calls every queue once per round, and waits ``patience_s`` for the answers.

    A late call goes on beside the next rounds, which leave its queue out. With ``one_by_one``, a call begins when the
    one before has ended or is late.
    """

    def __init__(
        self,
        call: Callable[[str], Coroutine[Any, Any, T]],
        *,
        patience_s: float = PATIENCE_S,
        one_by_one: bool = False,
    ) -> None:
        self._call = call
        self._patience_s = patience_s
        self._one_by_one = one_by_one
        self._calls: dict[str, asyncio.Task[T]] = {}

    async def run(self, queues: Iterable[str]) -> Round[T]:
        """Run a round. Its answers include those of late calls that have ended since the round before."""
        for queue in queues:
            if queue not in self._calls:
                call = self._calls[queue] = asyncio.create_task(self._call(queue))
                call.add_done_callback(_retrieve)
                if self._one_by_one:
                    await asyncio.wait([call], timeout=self._patience_s)
        if self._calls and not self._one_by_one:
            await asyncio.wait(self._calls.values(), timeout=self._patience_s)
        return self._collect()

    def _collect(self) -> Round[T]:
        answers: dict[str, T] = {}
        failure: Exception | None = None
        for queue, call in [*self._calls.items()]:
            if not call.done():
                continue
            del self._calls[queue]
            try:
                answers[queue] = call.result()
            except Exception as error:
                failure = failure or error
        return Round(answers, failure, is_late=bool(self._calls))

    def close(self) -> None:
        """Cancel the calls under way."""
        for call in self._calls.values():
            call.cancel()


def _retrieve(call: asyncio.Task[Any]) -> None:
    """Retrieve the outcome of a call, so that asyncio does not warn about one that nobody waits for."""
    if not call.cancelled():
        call.exception()
