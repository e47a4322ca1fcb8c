"""Fencing: the current token alone decides whose settle counts."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Cancel, Complete, Fail, Outcome
from penstock.storage.values import Settled
from tests.contract.factories import BOOM, LEASE_MS, TERMINAL_STATES, Bench

E, S = EventType, State


async def test_the_token_alone_decides_even_past_the_deadline(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.shift(10 * LEASE_MS)

    assert await bench.settle(lease, Complete(b"late")) == Settled(True, S.COMPLETED)


async def test_the_holder_of_an_old_token_is_not_heard_after_a_rescue(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.shift(LEASE_MS)
    await bench.storage.sweep(bench.queue)
    picture = await bench.picture()

    assert await bench.settle(lease, Complete(b"old")) == Settled(False, S.WAITING)
    assert await bench.picture() == picture


async def test_complete_is_true_for_exactly_one_of_two_claimers(bench: Bench) -> None:
    first = await bench.bring(S.ACTIVE)
    assert first
    await bench.shift(LEASE_MS)
    await bench.storage.sweep(bench.queue)
    second = await bench.claim()

    assert await bench.settle(first, Complete(b"first")) == Settled(False, S.ACTIVE)
    assert await bench.settle(second, Complete(b"second")) == Settled(True, S.COMPLETED)
    assert await bench.settle(first, Fail(BOOM)) == Settled(False, S.COMPLETED)
    assert (await bench.job()).result == b"second"


@pytest.mark.parametrize("state", TERMINAL_STATES)
async def test_a_token_of_an_earlier_life_of_the_id_is_worth_nothing(bench: Bench, state: State) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    ends: dict[State, Outcome] = {
        S.COMPLETED: Complete(),
        S.FAILED: Fail(BOOM, final=True),
        S.CANCELLED: Cancel(),
    }
    await bench.settle(lease, ends[state])
    await bench.storage.remove(bench.queue, ["job"])
    await bench.put()
    assert await bench.settle(lease, Complete(b"old")) == Settled(False, S.WAITING)

    again = await bench.claim()
    assert again.token > lease.token
    assert await bench.settle(lease, Complete(b"old")) == Settled(False, S.ACTIVE)
    assert await bench.settle(again, Complete(b"new")) == Settled(True, S.COMPLETED)


async def test_tokens_do_not_come_back_after_obliterate(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.storage.obliterate(bench.queue, force=True)
    assert await bench.settle(lease, Complete()) == Settled(False, None)

    again = await bench.bring(S.ACTIVE)
    assert again
    assert again.token > lease.token
    assert await bench.settle(lease, Complete()) == Settled(False, S.ACTIVE)
