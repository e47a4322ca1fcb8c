"""Replay: the last answer of each stream is kept for a minute, and returned again for the same ticket.

A kept answer names its leases only. If the call is repeated, those that are still held are read again. The table is
called ``memo``, and its streams ``lane``, since the first format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from penstock.core.flow import Node
from penstock.core.job import Enqueued, NewJob
from penstock.storage.bounds import REPLAY_KEPT_MS
from penstock.storage.sqlite import claim as claims
from penstock.storage.sqlite import enqueue as enqueues
from penstock.storage.sqlite import settle as settles
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Claimed, Held, Settled, SettledBatch, Settlement, Take, Ticket

Stored = TypeVar("Stored")

_sql = statements("replay")
_packer = msgspec.msgpack.Encoder()


class _StoredClaim(msgspec.Struct, array_like=True):
    held: list[Held]
    wait_ms: int | None
    paused: bool
    limited: bool
    over_budget: bool = False  # Earlier versions did not store it.


class _StoredBatch(msgspec.Struct, array_like=True):
    answers: list[Settled]
    claimed: _StoredClaim | None


_enqueued = msgspec.msgpack.Decoder(list[Enqueued])
_claimed = msgspec.msgpack.Decoder(_StoredClaim)
_settled = msgspec.msgpack.Decoder(_StoredBatch)


def enqueue(unit: Unit, jobs: Sequence[NewJob], *, ticket: Ticket | None) -> list[Enqueued]:
    """Enqueue the jobs, or return the answer under this ticket."""
    answers = _recall(unit, ticket, _enqueued)
    if answers is None:
        answers = enqueues.enqueue(unit, jobs)
        _remember(unit, ticket, answers)
    return answers


def enqueue_flows(unit: Unit, flows: Sequence[Sequence[Node]], *, ticket: Ticket | None) -> list[Enqueued]:
    """Enqueue the flows, or return the answer under this ticket."""
    answers = _recall(unit, ticket, _enqueued)
    if answers is None:
        answers = enqueues.enqueue_flows(unit, flows)
        _remember(unit, ticket, answers)
    return answers


def claim(unit: Unit, take: Take, *, ticket: Ticket | None) -> Claimed:
    """Lease jobs, or return the leases under this ticket that are still held."""
    stored = _recall(unit, ticket, _claimed)
    if stored is not None:
        return _restored(unit, stored)
    claimed = claims.claim(unit, take)
    if ticket is not None:
        _remember(unit, ticket, _stored(claimed))
    return claimed


def settle(
    unit: Unit, settlements: Sequence[Settlement], *, take: Take | None, ticket: Ticket | None
) -> SettledBatch:
    """Apply the outcomes, or return the answers under this ticket."""
    stored = _recall(unit, ticket, _settled)
    if stored is not None:
        claimed = None if stored.claimed is None else _restored(unit, stored.claimed)
        return SettledBatch(stored.answers, claimed)
    batch = settles.settle(unit, settlements, take=take)
    if ticket is not None:
        next_jobs = None if batch.claimed is None else _stored(batch.claimed)
        _remember(unit, ticket, _StoredBatch(batch.answers, next_jobs))
    return batch


def _stored(claimed: Claimed) -> _StoredClaim:
    held = [Held(lease.id, lease.token) for lease in claimed.leases]
    return _StoredClaim(held, claimed.wait_ms, claimed.paused, claimed.limited, claimed.over_budget)


def _restored(unit: Unit, stored: _StoredClaim) -> Claimed:
    leases = claims.read_back(unit, stored.held)
    return Claimed(leases, stored.wait_ms, stored.paused, stored.over_budget, stored.limited)


def _recall(unit: Unit, ticket: Ticket | None, decoder: msgspec.msgpack.Decoder[Stored]) -> Stored | None:
    """Return the answer under this ticket; ``None`` if there is none or it is damaged, so that the call runs again."""
    if ticket is None:
        return None
    row = unit.sql.execute(_sql["recall"], (unit.queue.key, *ticket, unit.now_ms - REPLAY_KEPT_MS)).fetchone()
    try:
        return None if row is None else decoder.decode(row[0])
    except msgspec.DecodeError:
        return None


def _remember(unit: Unit, ticket: Ticket | None, answer: object) -> None:
    if ticket is not None:
        unit.sql.execute(_sql["remember"], (unit.queue.key, *ticket, unit.now_ms, _packer.encode(answer)))
