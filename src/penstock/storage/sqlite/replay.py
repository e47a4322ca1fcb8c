"""Repeated calls: the last answer of each stream is kept for a minute, and returned again for the same ticket.

The answer does not include the payloads of leases: leases that are still held are read again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from penstock.core.job import Enqueued
from penstock.storage.sqlite.claim import read_back
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Claimed, Held, Settled, SettledBatch, Ticket

Answer = TypeVar("Answer")

MEMO_KEPT_MS = 60_000

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


def enqueued_once(unit: Unit, ticket: Ticket | None, work: Callable[[], list[Enqueued]]) -> list[Enqueued]:
    """Do the work, or return its answer under this ticket."""
    memo = _read(_enqueued, _recall(unit, ticket))
    if memo is not None:
        return memo
    answers = work()
    _remember(unit, ticket, answers)
    return answers


def claimed_once(unit: Unit, ticket: Ticket | None, work: Callable[[], Claimed]) -> Claimed:
    """Do the work, or return its leases under this ticket that are still held."""
    memo = _read(_claimed, _recall(unit, ticket))
    if memo is not None:
        return _restored(unit, memo)
    claimed = work()
    _remember(unit, ticket, _claim_memo(claimed))
    return claimed


def settled_once(unit: Unit, ticket: Ticket | None, work: Callable[[], SettledBatch]) -> SettledBatch:
    """Do the work, or return its answers under this ticket."""
    memo = _read(_settled, _recall(unit, ticket))
    if memo is not None:
        return SettledBatch(memo.answers, None if memo.claimed is None else _restored(unit, memo.claimed))
    batch = work()
    claimed = None if batch.claimed is None else _claim_memo(batch.claimed)
    _remember(unit, ticket, _SettleMemo(batch.answers, claimed))
    return batch


def _claim_memo(claimed: Claimed) -> _ClaimMemo:
    held = [Held(lease.id, lease.token) for lease in claimed.leases]
    return _ClaimMemo(held, claimed.wait_ms, claimed.paused, claimed.limited, claimed.over_budget)


def _restored(unit: Unit, memo: _ClaimMemo) -> Claimed:
    leases = read_back(unit, memo.held)
    return Claimed(leases, memo.wait_ms, memo.paused, over_budget=memo.over_budget, limited=memo.limited)


def _read(decoder: msgspec.msgpack.Decoder[Answer], packed: bytes | None) -> Answer | None:
    """Return the stored answer; ``None`` if it is damaged, so that the call runs again."""
    try:
        return None if packed is None else decoder.decode(packed)
    except msgspec.DecodeError:
        return None


def _recall(unit: Unit, ticket: Ticket | None) -> bytes | None:
    if ticket is None:
        return None
    row = unit.sql.execute(_sql["recall"], (unit.queue.key, *ticket, unit.now_ms - MEMO_KEPT_MS)).fetchone()
    return None if row is None else row[0]


def _remember(unit: Unit, ticket: Ticket | None, answer: object) -> None:
    if ticket is not None:
        unit.sql.execute(_sql["remember"], (unit.queue.key, *ticket, unit.now_ms, _packer.encode(answer)))
