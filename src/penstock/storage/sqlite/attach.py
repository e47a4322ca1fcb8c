"""``attach``: more dependencies for a job that is there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.annex import Dependent
from penstock.core.flow import Dependency, Node, woven
from penstock.core.lifecycle import EventType
from penstock.storage.sqlite import flows
from penstock.storage.sqlite.enqueue import put_nodes
from penstock.storage.sqlite.limits import check_costs
from penstock.storage.sqlite.records import CANCELLED, COMPLETED, FAILED, SCHEDULED, WAITING
from penstock.storage.sqlite.step import Step
from penstock.storage.values import AttachAnswer

__all__ = ["attach"]

_CHANGED = EventType.CHANGED.value


def attach(
    step: Step, id_: str, after: Sequence[Dependency], *, nodes: Sequence[Node], flow: str
) -> AttachAnswer:
    """Give the job further dependencies, and put in those that come along."""
    record = step.find([id_]).get(id_)
    if record is None or step.is_over(record) or record.is_staged:
        return "not_found"
    if record.state in (COMPLETED, FAILED, CANCELLED):
        return "ended"
    own = {job.id for queue, job in nodes if queue == step.queue.name}
    flows.refuse_unknown(step, after, own)
    check_costs(step, [job for queue, job in nodes if queue == step.queue.name])
    flow = record.annex.flow or flow
    to_come = frozenset((queue, job.id) for queue, job in nodes)
    record.annex = msgspec.structs.replace(record.annex, flow=flow, has_dependencies=True)
    flows.depend(step, id_, flow, after, to_come=to_come)
    if record.state in (SCHEDULED, WAITING) or record.blocked_by == "group":
        step.ties.awaits_children(step, record)
    step.note(_CHANGED, record, run=record.runs)
    flows.conclude(step, record)
    step.save([record])
    put_nodes(step, woven(nodes, flow=flow, into=Dependent(step.queue.name, id_, flow), after=after), to_come)
    return "attached"
