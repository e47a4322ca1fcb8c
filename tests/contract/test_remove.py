"""remove: records are deleted; active jobs are left alone."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import OPEN, EventType, State
from penstock.storage.values import Finished
from tests.contract.factories import Bench, Seen, other_states, start_states

E, S = EventType, State


@pytest.mark.parametrize("state", start_states("remove"))
async def test_a_job_that_is_not_active_is_removed_immediately(bench: Bench, state: State) -> None:
    await bench.bring(state, notify="ear")
    before = await bench.job()
    if state not in OPEN:
        await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    await bench.events()

    assert await bench.storage.remove(bench.queue, ["job"]) == ["removed"]

    assert await bench.find() is None
    assert await bench.counts() == {}
    assert await bench.ids(state) == []
    assert await bench.claim_all() == []
    [event] = await bench.events()
    assert (event.type, event.id, event.state, event.incarnation) == (
        E.REMOVED,
        "job",
        "",
        before.incarnation,
    )
    news = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000 if state in OPEN else 1)
    assert news == ([Finished("job", before.incarnation, S.CANCELLED)] if state in OPEN else [])


@pytest.mark.parametrize("state", other_states("remove"))
async def test_an_active_job_is_left_alone(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await bench.storage.remove(bench.queue, ["job"]) == ["active"]
    assert await bench.picture() == picture


async def test_a_batch_acts_item_after_item(bench: Bench) -> None:
    await bench.bring_all()
    await bench.events()

    answers = await bench.storage.remove(bench.queue, ["failed", "nobody", "active", "failed", "waiting"])

    assert answers == ["removed", "not_found", "active", "not_found", "removed"]
    assert await bench.seen() == [Seen(E.REMOVED, "failed", ""), Seen(E.REMOVED, "waiting", "")]
    assert await bench.storage.remove(bench.queue, []) == []


async def test_the_id_can_be_used_again(bench: Bench) -> None:
    first = await bench.put()
    await bench.storage.remove(bench.queue, ["job"])

    again = await bench.put()

    assert again.status == "queued"
    assert again.incarnation > first.incarnation
