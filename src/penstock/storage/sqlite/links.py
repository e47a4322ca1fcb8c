"""The effects of linked jobs (``Record.has_links``) on others, in their own queue and, by messages, in other queues.

Each kind of link has a module, and ``LINKS`` calls them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, assert_never

from penstock.core.flow import dead_letter_job
from penstock.core.job import NewJob
from penstock.storage.sqlite import dedup, flows, groups, limits, schedules, statements
from penstock.storage.sqlite.enqueue import put_or_tell
from penstock.storage.sqlite.holds import index
from penstock.storage.sqlite.records import Record, unpack_failure
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.unit import Done, Link, Message, Put, Unit

_NO_DEAD_LETTER = '"dead_letter":null'
_sql = statements("records")


class Links:
    """The effects of changes to a linked job on other jobs."""

    def maybe_block(self, unit: Unit, record: Record, *, keeps_number: bool) -> bool:
        """Block a job that is about to wait, if its dependencies or its group require it. Return whether it was."""
        return self.awaits_children(unit, record) or groups.maybe_block(
            unit, record, keeps_number=keeps_number
        )

    def ended(self, unit: Unit, record: Record) -> None:
        """Update group, dependents, dedup key and scheduler after the end of a job, or its removal while open."""
        groups.leave(unit, record)
        flows.ended(unit, record)
        extras = record.extras
        if extras.dedup:
            dedup.ended(unit, extras.dedup, record)
        if extras.repeats:
            schedules.ended(unit, extras.scheduler, record)

    def saving(self, unit: Unit, record: Record) -> None:
        """Update the index of holds before a record is written."""
        index(unit, record)

    def scheduled(self, unit: Unit, record: Record) -> None:
        """Update the group of a member that waits for a time or a signal."""
        groups.scheduled(unit, record)

    def reordered(self, unit: Unit, record: Record) -> None:
        """Update the line of a group after a member's priority has changed."""
        groups.line_up_again(unit, record)

    def settle(self, unit: Unit) -> None:
        """Fill the groups and write them, after the verb has done everything else."""
        limits.fill_touched(unit)

    def failed(self, unit: Unit, record: Record) -> None:
        """Send the dead letter of a failed job, linked or not, if the queue is configured for it."""
        settings_json = unit.queue.settings_json
        if settings_json == "{}" or _NO_DEAD_LETTER in settings_json:
            return
        settings = unit.queue.settings
        if settings.dead_letter is not None:
            letter = _dead_letter(unit, record, settings.dead_letter_options or settings.dead_letter_task)
            unit.outbox.append((settings.dead_letter, Put(letter)))

    def removed(self, unit: Unit, record: Record) -> None:
        """Notify the dependents of a failed or cancelled job that is deleted."""
        flows.removed(unit, record)

    def forget(self, unit: Unit, ids: Sequence[str]) -> None:
        """Delete the dependencies and dependents of these ids."""
        flows.forget(unit, ids)

    def awaits_children(self, unit: Unit, record: Record) -> bool:
        """Block a job that has unfinished dependencies, outside its group's line. Return whether it was blocked."""
        is_blocked = flows.maybe_block(unit, record)
        if is_blocked:
            groups.wait_elsewhere(unit, record)
        return is_blocked


LINKS: Final = Links()


def _dead_letter(unit: Unit, record: Record, handled_by: str) -> NewJob:
    payload = record.payload
    if payload is None:
        payload = unit.sql.execute(_sql["payload"], (record.key,)).fetchone()[0]
    return dead_letter_job(
        queue=unit.queue.name, id=record.id, incarnation=record.incarnation, task=record.options.task,
        payload=payload, failure=unpack_failure(record.failure), failures=record.failures,
        failed_at_ms=unit.now_ms, handled_by=handled_by,
    )  # fmt: skip


def deliver(transaction: Transaction, unit: Unit) -> None:
    """Apply the messages of ``unit`` to other queues, and their messages in turn, in order.

    Each queue has one unit for all messages, so that each message sees the effects of those before it. This function
    accepts all units except the caller's.
    """
    units = {unit.queue.name: unit}
    sent = deque(unit.outbox)
    while sent:
        queue, message = sent.popleft()
        if queue not in units:
            units[queue] = transaction.unit(unit.namespace, queue)
        target = units[queue]
        target.outbox = []
        _apply(target, message)
        sent.extend(target.outbox)
    for target in units.values():
        if target is not unit:
            transaction.accept(target)


def _apply(unit: Unit, message: Message) -> None:
    match message:
        case Put(job, to_come):
            put_or_tell(unit, job, to_come)
        case Link(id_, dependent):
            flows.link(unit, id_, dependent)
        case Done(dependent, end):
            flows.done(unit, dependent, end)
        case _ as never:
            assert_never(never)
    unit.flush()
