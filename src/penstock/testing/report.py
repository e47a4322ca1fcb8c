"""What a harness tells: which runs there were, and what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

from penstock.core.lifecycle import State
from penstock.core.outcome import Failure
from penstock.storage.values import Counts

__all__ = ["Drained", "Ran", "RunOutcome"]

RunOutcome: TypeAlias = Literal[
    "completed", "failed", "retrying", "snoozed", "released", "cancelled", "stalled"
]


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of one job. ``outcome`` is what the store made of it, ``state`` the job's state after that.

    ``error`` is what the handler raised, the exception itself; ``failure`` is what was stored of it.
    """

    queue: str
    id: str
    task: str
    run: int
    outcome: RunOutcome
    state: State | None
    at: datetime
    result: Any = None
    error: BaseException | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did: ``runs`` in their order, ``left`` the counts of queues that have open jobs, ``advanced`` how
    far it moved the clock."""

    runs: list[Ran] = field(default_factory=list)
    left: Mapping[str, Counts] = field(default_factory=dict)
    advanced: timedelta = timedelta()

    def __len__(self) -> int:
        return len(self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)

    @property
    def completed(self) -> list[Ran]:
        return self._with("completed")

    @property
    def failed(self) -> list[Ran]:
        """Runs after which their job had failed for good."""
        return self._with("failed")

    @property
    def retrying(self) -> list[Ran]:
        """Runs that failed, with attempts left."""
        return self._with("retrying")

    def _with(self, outcome: RunOutcome) -> list[Ran]:
        return [run for run in self.runs if run.outcome == outcome]
