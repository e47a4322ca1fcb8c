"""Operating on a queue as a whole: ``pause``, ``resume``, ``configure``, its workers' records, its clock."""

from __future__ import annotations

import msgspec

from penstock.core.lifecycle import EventType
from penstock.storage.sqlite import groups
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step
from penstock.storage.values import QueueSettings

__all__ = ["configure", "depart", "pause", "resume", "shift_clock"]

_PAUSED = EventType.PAUSED.value
_RESUMED = EventType.RESUMED.value
_CONFIGURED = EventType.CONFIGURED.value


def pause(step: Step, group: str = "") -> None:
    """Claims get nothing from now on, or nothing of this group."""
    if group:
        _pause_group(step, group, paused=1)
    elif not step.queue.paused:
        step.queue.paused = 1
        step.notes.add_queue(_PAUSED, step.now_ms)


def resume(step: Step, group: str = "") -> None:
    """Claims get jobs again; those who wait are woken."""
    if group:
        _pause_group(step, group, paused=0)
        return
    if step.queue.paused:
        step.queue.paused = 0
        step.notes.add_queue(_RESUMED, step.now_ms)
    step.wakes.add("w")


def _pause_group(step: Step, key: str, *, paused: int) -> None:
    group = groups.group_of(step, key)
    if group.paused != paused:
        group.paused = paused
        step.queue.uses |= groups.USES_GROUPS
        step.notes.add_queue(_PAUSED if paused else _RESUMED, step.now_ms, grp=key)
        groups.touch(step, group)


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
