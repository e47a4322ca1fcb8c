"""Operating on a queue as a whole: ``pause``, ``resume``, ``configure``, its workers' records, its clock."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from penstock.core.lifecycle import EventType
from penstock.storage.sqlite import groups
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step
from penstock.storage.values import QueueSettings

__all__ = ["configure", "depart", "pause", "resume", "shift_clock"]

_PAUSED = EventType.PAUSED.value
_RESUMED = EventType.RESUMED.value
_CONFIGURED = EventType.CONFIGURED.value


def pause(step: Step, group: str, duration_ms: int) -> None:
    """Claims get nothing from now on, or nothing of this group; with a duration, for that long."""
    if duration_ms:
        _pause_for(step, group, duration_ms)
    elif _set_paused(step, group, paused=1):
        step.notes.add_queue(_PAUSED, step.now_ms, grp=group)


def resume(step: Step, group: str) -> None:
    """Claims get jobs again; those who wait are woken."""
    was_paused = _set_paused(step, group, paused=0)
    was_parked = bool(step.queue.uses) and groups.group_of(step, group).parked_until > step.now_ms
    if was_parked:
        groups.park(step, group, until_ms=0)
    if was_paused or was_parked:
        step.notes.add_queue(_RESUMED, step.now_ms, grp=group)
    if not group:
        step.wakes.add("w")


def _pause_for(step: Step, group: str, duration_ms: int) -> None:
    until_ms = step.now_ms + duration_ms
    if groups.group_of(step, group).parked_until < until_ms:
        groups.park(step, group, until_ms=until_ms)
        step.notes.add_queue(_PAUSED, step.now_ms, grp=group, data=f'{{"for_ms":{duration_ms}}}')


def _set_paused(step: Step, key: str, *, paused: int) -> bool:
    """Whether that changed the flag."""
    if not key:
        was, step.queue.paused = step.queue.paused, paused
        return was != paused
    group = groups.group_of(step, key)
    if group.paused == paused:
        return False
    group.paused = paused
    step.queue.uses |= groups.USES_GROUPS
    groups.touch(step, group)
    return True


def configure(step: Step, settings: QueueSettings) -> None:
    """Replace the settings."""
    step.queue.settings_json = msgspec.json.encode(settings).decode()
    step.notes.add_queue(_CONFIGURED, step.now_ms, data=step.queue.settings_json)


def depart(step: Step, worker: str) -> None:
    """Forget a worker's record."""
    step.sql.execute(statements("read")["depart"], (step.queue.key, worker))


def shift_clock(step: Step, ms: int, *, jump: bool) -> None:
    """Move the queue's clock forward. ``jump``: the queue is not told."""
    step.queue.shift_ms += ms
    if not jump:
        moment = step.moment
        step.set_moment(replace(moment, now_ms=moment.now_ms + ms, wall_ms=moment.wall_ms + ms))
