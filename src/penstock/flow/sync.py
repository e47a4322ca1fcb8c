"""The sync face of flows."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from penstock.core.duration import Duration
from penstock.core.job import EnqueueStatus
from penstock.flow.handle import FlowHandle
from penstock.flow.parts import Whole
from penstock.hints import Hinting
from penstock.loopthread import run
from penstock.sync import Face, SyncJobHandle, as_sync

__all__ = ["SyncFlowHandle", "SyncWhole"]

R_co = TypeVar("R_co", covariant=True)


class SyncWhole(Hinting, Face[Whole[R_co]], Generic[R_co]):
    """See ``Whole``."""

    __slots__ = ()
    hints_for = "flow"

    def enqueue(self) -> SyncFlowHandle[R_co]:
        """See ``Whole.enqueue``."""
        return SyncFlowHandle(run(self._target.enqueue()))


class SyncFlowHandle(Hinting, Face[FlowHandle[R_co]], Generic[R_co]):
    """See ``FlowHandle``."""

    __slots__ = ()
    hints_for = "flow handle"

    @property
    def root(self) -> SyncJobHandle[Any]:
        return SyncJobHandle(self._target.root)

    @property
    def ref(self) -> str:
        return self._target.ref

    @property
    def ends(self) -> list[SyncJobHandle[Any]]:
        return [SyncJobHandle(end) for end in self._target.ends]

    @property
    def jobs(self) -> list[SyncJobHandle[Any]]:
        return [SyncJobHandle(job) for job in self._target.jobs]

    @property
    def names(self) -> dict[str, SyncJobHandle[Any]]:
        return {name: SyncJobHandle(job) for name, job in self._target.names.items()}

    @property
    def status(self) -> EnqueueStatus | None:
        return self._target.status

    def result(self, timeout: Duration | None = None) -> R_co:
        """See ``FlowHandle.result``."""
        return run(self._target.result(timeout))

    usage = as_sync(FlowHandle.usage)
    set_budget = as_sync(FlowHandle.set_budget)
    tree = as_sync(FlowHandle.tree)
    cancel = as_sync(FlowHandle.cancel)
    retry = as_sync(FlowHandle.retry)
