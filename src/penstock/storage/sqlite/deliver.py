"""Delivery of messages to other queues, in the transaction that sends them."""

from __future__ import annotations

from collections import deque
from typing import assert_never

from penstock.storage.sqlite import flows
from penstock.storage.sqlite.enqueue import put_or_tell
from penstock.storage.sqlite.messages import Done, Link, Message, Put
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.unit import Unit


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
