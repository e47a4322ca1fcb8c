"""The sync face of an app."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from penstock.app import App
from penstock.events import EventTypes, Offsets
from penstock.hints import Hinting
from penstock.loopthread import run
from penstock.subscription import SyncSubscription
from penstock.sync.face import Face, as_sync, iterate
from penstock.sync.jobs import SyncJobHandle
from penstock.sync.queues import SyncQueue

if TYPE_CHECKING:
    from penstock.core.event import Event
    from penstock.flow.parts import Ending, Part
    from penstock.flow.sync import SyncFlowHandle
    from penstock.subscription import SubscriptionOptions

__all__ = ["SyncApp"]

R = TypeVar("R")


class SyncApp(Hinting, Face[App]):
    """See ``App``."""

    __slots__ = ()
    hints_for = "app"

    def __enter__(self) -> Self:
        run(self._target.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._target.close())

    def queue(self, name: str, **options: Any) -> SyncQueue:
        """See ``App.queue``."""
        return SyncQueue(self._target.queue(name, **options))

    def job(self, ref: str) -> SyncJobHandle[Any]:
        """See ``App.job``."""
        return SyncJobHandle(self._target.job(ref))

    def events(
        self,
        *queues: str,
        after: Offsets = 0,
        follow: bool = True,
        types: EventTypes = None,
        id: str | None = None,
    ) -> Generator[Event, None, None]:
        """See ``App.events``."""
        return iterate(self._target.events(*queues, after=after, follow=follow, types=types, id=id))

    def subscribe(self, *queues: str, **options: Unpack[SubscriptionOptions]) -> SyncSubscription:
        """See ``App.subscribe``."""
        return SyncSubscription(self._target.subscribe(*queues, **options))

    schedule = as_sync(App.schedule)
    schedulers = as_sync(App.schedulers)

    def flow(self, ref: str) -> SyncFlowHandle[Any]:
        """See ``App.flow``."""
        from penstock.flow.sync import SyncFlowHandle

        return SyncFlowHandle(self._target.flow(ref))

    def enqueue_flow(self, flow: Ending[R]) -> SyncFlowHandle[R]:
        """See ``App.enqueue_flow``."""
        from penstock.flow.sync import SyncFlowHandle

        return SyncFlowHandle(run(self._target.enqueue_flow(flow)))

    def enqueue_flows(self, flows: Iterable[Part]) -> list[SyncFlowHandle[Any]]:
        """See ``App.enqueue_flows``."""
        from penstock.flow.sync import SyncFlowHandle

        return [SyncFlowHandle(handle) for handle in run(self._target.enqueue_flows(flows))]

    close = as_sync(App.close)
    queues = as_sync(App.queues)
