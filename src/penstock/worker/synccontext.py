"""What of a job's context has to be awaited, for handlers that cannot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.children import Child
from penstock.core.job import Policy
from penstock.loopthread import run
from penstock.sync import SyncJobHandle

if TYPE_CHECKING:
    from penstock.flow.parts import Part
    from penstock.worker.context import JobContext

__all__ = ["SyncJobContext"]


class SyncJobContext:
    """``context.sync``: for handlers in threads and processes, with a connection of their own to the store."""

    __slots__ = ("_context",)

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[SyncJobHandle[Any]]:
        """See ``JobContext.add_children``."""
        added = run(self._context.add_children(children, on_failure=on_failure))
        return [SyncJobHandle(handle) for handle in added]

    def children(self) -> list[Child]:
        """See ``JobContext.children``."""
        return run(self._context.children())
