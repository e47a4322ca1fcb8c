"""The effects of linked jobs on others, in their own queue and, by messages, in other queues.

Each kind of link has a module; ``LINKS`` calls them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, assert_never

from penstock.core.flow import dead_letter_job
from penstock.storage.sqlite import dedup, flows, groups, limits, schedules, statements
from penstock.storage.sqlite.enqueue import put_or_tell
from penstock.storage.sqlite.holds import index
from penstock.storage.sqlite.records import Record, unpack_failure
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.unit import Done, Link, Links, Message, Put, Unit

_NO_DEAD_LETTER = '"dead_letter":null'
_sql = statements("records")


class _Links:
    def maybe_block(self, unit: Unit, record: Record, *, keeps_number: bool) -> bool:
        """Block the job if its dependencies or its group require it."""
        return self.awaits_children(unit, record) or groups.maybe_block(
            unit, record, keeps_number=keeps_number
        )

    def ended(self, unit: Unit, record: Record) -> None:
        """Update the group, dependents, dedup key and scheduler."""
        groups.leave(unit, record)
        flows.ended(unit, record)
        extras = record.extras
        if extras.dedup:
            dedup.ended(unit, extras.dedup, record)
        if extras.repeats:
            schedules.ended(unit, extras.scheduler, record)

    def saving(self, unit: Unit, record: Record) -> None:
        """Update the index of holds."""
        index(unit, record)

    def scheduled(self, unit: Unit, record: Record) -> None:
        """Update the group."""
        groups.scheduled(unit, record)

    def reordered(self, unit: Unit, record: Record) -> None:
        """Update the group's line."""
        groups.line_up_again(unit, record)

    def settle(self, unit: Unit) -> None:
        """Fill the groups and write them."""
        limits.fill_touched(unit)

    def failed(self, unit: Unit, record: Record) -> None:
        """Send the dead letter."""
        send_dead_letter(unit, record)

    def removed(self, unit: Unit, record: Record) -> None:
        """Notify the dependents."""
        flows.removed(unit, record)

    def forget(self, unit: Unit, ids: Sequence[str]) -> None:
        """Delete the dependencies and dependents."""
        flows.forget(unit, ids)

    def awaits_children(self, unit: Unit, record: Record) -> bool:
        """Block the job if it has unfinished dependencies. It leaves its group's line meanwhile."""
        is_blocked = flows.maybe_block(unit, record)
        if is_blocked:
            groups.wait_elsewhere(unit, record)
        return is_blocked


LINKS: Final[Links] = _Links()


def send_dead_letter(unit: Unit, record: Record) -> None:
    """Send the dead letter of a failed job, if the queue is configured for it."""
    if unit.queue.settings_json == "{}" or _NO_DEAD_LETTER in unit.queue.settings_json:
        return
    settings = unit.queue.settings
    if settings.dead_letter is None:
        return
    payload = record.payload
    if payload is None:
        payload = unit.sql.execute(_sql["payload"], (record.key,)).fetchone()[0]
    letter = dead_letter_job(
        queue=unit.queue.name,
        id=record.id,
        incarnation=record.incarnation,
        task=record.options.task,
        payload=payload,
        failure=unpack_failure(record.failure),
        failures=record.failures,
        failed_at_ms=unit.now_ms,
        handled_by=settings.dead_letter_options or settings.dead_letter_task,
    )
    unit.outbox.append((settings.dead_letter, Put(letter)))


def deliver(transaction: Transaction, unit: Unit) -> None:
    """Apply the messages of ``unit`` to other queues, and their messages in turn, in order.

    Every queue has one unit until the end, so that each message sees the effects of those before it. All units
    except the caller's are accepted here.
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
