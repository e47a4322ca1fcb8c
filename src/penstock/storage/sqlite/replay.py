"""Repeated calls: the last answer of each lane is kept for a minute, and given again to the same ticket.

Leases are not kept with their payloads: they are read back, without those that are no longer held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from penstock.core.job import Enqueued
from penstock.storage.sqlite.claim import read_back
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import Claimed, Held, Settled, SettledBatch, Ticket

Kept = TypeVar("Kept")

MEMO_KEPT_MS = 60_000

_sql = statements("memo")
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


def enqueued_once(step: Step, ticket: Ticket | None, work: Callable[[], list[Enqueued]]) -> list[Enqueued]:
    """Do the work, or give the answer it had under this ticket."""
    kept = _read(_enqueued, _recall(step, ticket))
    if kept is not None:
        return kept
    answers = work()
    _remember(step, ticket, answers)
    return answers


def claimed_once(step: Step, ticket: Ticket | None, work: Callable[[], Claimed]) -> Claimed:
    """Do the work, or give the leases it got under this ticket that are still held."""
    kept = _read(_claimed, _recall(step, ticket))
    if kept is not None:
        return _restored(step, kept)
    claimed = work()
    _remember(step, ticket, _claim_memo(claimed))
    return claimed


def settled_once(step: Step, ticket: Ticket | None, work: Callable[[], SettledBatch]) -> SettledBatch:
    """Do the work, or give the answers it had under this ticket."""
    memo = _read(_settled, _recall(step, ticket))
    if memo is not None:
        return SettledBatch(memo.answers, None if memo.claimed is None else _restored(step, memo.claimed))
    batch = work()
    claimed = None if batch.claimed is None else _claim_memo(batch.claimed)
    _remember(step, ticket, _SettleMemo(batch.answers, claimed))
    return batch


def _claim_memo(claimed: Claimed) -> _ClaimMemo:
    held = [Held(lease.id, lease.token) for lease in claimed.leases]
    return _ClaimMemo(held, claimed.wait_ms, claimed.paused, claimed.limited, claimed.over_budget)


def _restored(step: Step, memo: _ClaimMemo) -> Claimed:
    leases = read_back(step, memo.held)
    return Claimed(leases, memo.wait_ms, memo.paused, over_budget=memo.over_budget, limited=memo.limited)


def _read(decoder: msgspec.msgpack.Decoder[Kept], packed: bytes | None) -> Kept | None:
    """Return the answer that was kept; ``None`` if it is damaged, so that the call is made again."""
    try:
        return None if packed is None else decoder.decode(packed)
    except msgspec.DecodeError:
        return None


def _recall(step: Step, ticket: Ticket | None) -> bytes | None:
    if ticket is None:
        return None
    found = step.sql.execute(_sql["recall"], (step.queue.key, *ticket, step.now_ms - MEMO_KEPT_MS)).fetchone()
    return None if found is None else found[0]


def _remember(step: Step, ticket: Ticket | None, answer: object) -> None:
    if ticket is not None:
        step.sql.execute(_sql["remember"], (step.queue.key, *ticket, step.now_ms, _packer.encode(answer)))
