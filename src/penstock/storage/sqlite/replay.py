"""Repeated calls: the last answer of each stream is kept for a minute, and returned again for the same ticket.

The answer does not include the payloads of leases: leases that are still held are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from penstock.core.flow import Node
from penstock.core.job import Enqueued, NewJob
from penstock.storage.bounds import MEMO_KEPT_MS
from penstock.storage.sqlite import claim as claims
from penstock.storage.sqlite import enqueue as enqueues
from penstock.storage.sqlite import settle as settles
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Claimed, Held, Settled, SettledBatch, Settlement, Take, Ticket

Memo = TypeVar("Memo")


_sql = statements("replay")
_packer = msgspec.msgpack.Encoder()


class _ClaimMemo(msgspec.Struct, array_like=True):
    held: list[Held]
    wait_ms: int | None
    paused: bool
    limited: bool
    over_budget: bool = False  # absent in memos of earlier versions


class _SettleMemo(msgspec.Struct, array_like=True):
    answers: list[Settled]
    claimed: _ClaimMemo | None


_enqueued = msgspec.msgpack.Decoder(list[Enqueued])
_claimed = msgspec.msgpack.Decoder(_ClaimMemo)
_settled = msgspec.msgpack.Decoder(_SettleMemo)


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
    memo = _recall(unit, ticket, _claimed)
    if memo is not None:
        return _restored(unit, memo)
    claimed = claims.claim(unit, take)
    if ticket is not None:
        _remember(unit, ticket, _claim_memo(claimed))
    return claimed


def settle(
    unit: Unit, settlements: Sequence[Settlement], *, take: Take | None, ticket: Ticket | None
) -> SettledBatch:
    """Apply the outcomes, or return the answers under this ticket."""
    memo = _recall(unit, ticket, _settled)
    if memo is not None:
        return SettledBatch(memo.answers, None if memo.claimed is None else _restored(unit, memo.claimed))
    batch = settles.settle(unit, settlements, take=take)
    if ticket is not None:
        claimed = None if batch.claimed is None else _claim_memo(batch.claimed)
        _remember(unit, ticket, _SettleMemo(batch.answers, claimed))
    return batch


def _claim_memo(claimed: Claimed) -> _ClaimMemo:
    held = [Held(lease.id, lease.token) for lease in claimed.leases]
    return _ClaimMemo(held, claimed.wait_ms, claimed.paused, claimed.limited, claimed.over_budget)


def _restored(unit: Unit, memo: _ClaimMemo) -> Claimed:
    leases = claims.read_back(unit, memo.held)
    return Claimed(leases, memo.wait_ms, memo.paused, over_budget=memo.over_budget, limited=memo.limited)


def _recall(unit: Unit, ticket: Ticket | None, decoder: msgspec.msgpack.Decoder[Memo]) -> Memo | None:
    """Return what is stored under this ticket; ``None`` if it is damaged too, so that the call runs again."""
    if ticket is None:
        return None
    row = unit.sql.execute(_sql["recall"], (unit.queue.key, *ticket, unit.now_ms - MEMO_KEPT_MS)).fetchone()
    try:
        return None if row is None else decoder.decode(row[0])
    except msgspec.DecodeError:
        return None


def _remember(unit: Unit, ticket: Ticket | None, memo: object) -> None:
    if ticket is not None:
        unit.sql.execute(_sql["remember"], (unit.queue.key, *ticket, unit.now_ms, _packer.encode(memo)))
