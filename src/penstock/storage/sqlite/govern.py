"""Operating on a queue as a whole: ``pause``, ``resume``, ``configure``, its workers' records, its clock."""

from __future__ import annotations

import msgspec

from penstock.core.lifecycle import EventType
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step
from penstock.storage.values import QueueSettings

__all__ = ["configure", "depart", "pause", "resume", "shift_clock"]

_PAUSED = EventType.PAUSED.value
_RESUMED = EventType.RESUMED.value
_CONFIGURED = EventType.CONFIGURED.value


def pause(step: Step) -> None:
    """Claims get nothing from now on."""
    if not step.queue.paused:
        step.queue.paused = 1
        step.notes.add_queue(_PAUSED, step.now_ms)


def resume(step: Step) -> None:
    """Claims get jobs again; those who wait are woken."""
    if step.queue.paused:
        step.queue.paused = 0
        step.notes.add_queue(_RESUMED, step.now_ms)
    step.wakes.add("w")


def configure(step: Step, settings: QueueSettings) -> None:
    """Replace the settings."""
    step.queue.settings_json = msgspec.json.encode(settings).decode()
    step.notes.add_queue(_CONFIGURED, step.now_ms, data=step.queue.settings_json)


def depart(step: Step, worker: str) -> None:
    """Forget a worker's record."""
    step.sql.execute(statements("read")["depart"], (step.queue.key, worker))


def shift_clock(step: Step, ms: int) -> None:
    """Move the queue's clock forward."""
    step.queue.shift_ms += ms
