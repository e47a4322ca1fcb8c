"""Messages to other queues, applied in the transaction that sends them."""

from __future__ import annotations

from collections import deque
from typing import assert_never

from penstock.storage.sqlite import flows
from penstock.storage.sqlite.enqueue import put_or_tell
from penstock.storage.sqlite.messages import Done, Link, Message, Put
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.unit import Step


def deliver(transaction: Transaction, step: Step) -> None:
    """Apply what ``step`` has to say to other queues, and what they have to say to that, in order.

    Every queue has one step until the end, so that what one message does is seen by the next; all but the
    caller's own are accepted here.
    """
    steps = {step.queue.name: step}
    sent = deque(step.outbox)
    while sent:
        queue, message = sent.popleft()
        if queue not in steps:
            steps[queue] = transaction.step(step.namespace, queue)
        target = steps[queue]
        target.outbox = []
        _apply(target, message)
        sent.extend(target.outbox)
    for target in steps.values():
        if target is not step:
            transaction.accept(target)


def _apply(step: Step, message: Message) -> None:
    match message:
        case Put(job, to_come):
            put_or_tell(step, job, to_come)
        case Link(id_, dependent):
            flows.link(step, id_, dependent)
        case Done(dependent, end):
            flows.done(step, dependent, end)
        case _ as never:
            assert_never(never)
    step.save(())
