"""Flows: jobs that wait for other jobs.

``Flow`` (a parent and its children), ``chain``, ``group``, ``chord`` and ``Dag`` define which job waits for which, and
can be nested. ``app.enqueue_flow`` enqueues all of it.
"""

from __future__ import annotations

from penstock.client.flow.handle import FlowHandle, FlowNode
from penstock.client.flow.parts import Chain, Chord, Dag, Flow, Group, Part, chain, chord, group

__all__ = [
    "Chain",
    "Chord",
    "Dag",
    "Flow",
    "FlowHandle",
    "FlowNode",
    "Group",
    "Part",
    "chain",
    "chord",
    "group",
]
