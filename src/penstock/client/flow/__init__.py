"""Flows: jobs that wait for other jobs.

``Flow`` (a parent and its children), ``chain``, ``group``, ``chord`` and ``Dag`` say who waits for whom, and may
stand inside each other. ``app.enqueue_flow`` puts all of it in.
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
