"""A queue's dead letters: what fails for good is put into another queue as well."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Fail
from penstock.storage.values import QueueSettings
from tests.contract.factories import BOOM, MINUTE_MS, Bench

S = State


@pytest.fixture
async def dead(bench: Bench) -> Bench:
    """The queue that the bench's letters go to."""
    dead = Bench(bench.storage, f"{bench.queue}-dead")
    await bench.storage.configure(bench.queue, QueueSettings(dead_letter=dead.queue, dead_letter_task="bury"))
    return dead


async def letters(bench: Bench, dead: Bench) -> list[tuple[str, dict[str, Any]]]:
    await bench.storage.sweep(bench.queue)
    leases = await dead.claim_all()
    assert all(lease.options.task == "bury" for lease in leases)
    return [(lease.id, json.loads(lease.payload)) for lease in leases]


async def test_a_job_that_failed_for_good_is_put_into_the_dead_letter_queue(
    bench: Bench, dead: Bench
) -> None:
    answer = await bench.put(payload=b'{"to": "ada"}', task="send", attempts=2)
    await bench.settle(await bench.claim(), Fail(BOOM))
    assert await letters(bench, dead) == []
    await bench.settle(await bench.claim(), Fail(BOOM))
    job = await bench.job()
    [(id, letter)] = await letters(bench, dead)
    assert id == f"{bench.queue}:job:{answer.incarnation}"
    assert letter == {
        "queue": bench.queue,
        "id": "job",
        "task": "send",
        "payload": {"to": "ada"},
        "error": {"type": "Boom", "message": "it went off"},
        "failures": 2,
        "failed_at": job.finished_at_ms,
    }
    assert job.state is S.FAILED


async def test_jobs_that_did_not_fail_write_no_letters(bench: Bench, dead: Bench) -> None:
    await bench.put("a")
    await bench.put("b")
    await bench.settle(await bench.claim(), Complete(b""))
    await bench.storage.cancel(bench.queue, ["b"])
    assert await letters(bench, dead) == []


@pytest.mark.parametrize("payload", [b"\xff\x00binary", b"", b"{not json"])
async def test_a_payload_that_is_not_json_is_written_in_base64(
    bench: Bench, dead: Bench, payload: bytes
) -> None:
    await bench.bring(S.FAILED, payload=payload)
    [(_, letter)] = await letters(bench, dead)
    assert letter["payload"] == base64.b64encode(payload).decode()


async def test_expired_and_stalled_jobs_and_those_kept_for_no_time_write_letters(
    bench: Bench, dead: Bench
) -> None:
    await bench.put("expired", ttl_ms=MINUTE_MS)
    await bench.put("stalled", max_stalls=0)
    await bench.put("gone", failure_ttl_ms=0)
    await bench.shift(2 * MINUTE_MS)
    for lease in await bench.claim_all():
        if lease.id == "gone":
            await bench.settle(lease, Fail(BOOM, final=True))
    await bench.shift(2 * MINUTE_MS)
    found = {letter["id"]: letter["error"] for _, letter in await letters(bench, dead)}
    stalled = "its worker died or stopped renewing the lease 1 times; the last one was worker"
    assert {id: (error["type"], error["message"]) for id, error in found.items()} == {
        "expired": ("Expired", "the job's ttl passed before it was finished"),
        "stalled": ("Stalled", stalled),
        "gone": (BOOM.type, BOOM.message),
    }


async def test_a_job_retried_in_vain_renews_its_letter(bench: Bench, dead: Bench) -> None:
    await bench.bring(S.FAILED)
    [lease] = await _swept(bench, dead)
    await dead.settle(lease, Complete(b""))
    await bench.storage.retry(bench.queue, ["job"])
    await bench.settle(await bench.claim(), Fail(BOOM, final=True))
    [again] = await _swept(bench, dead)
    assert (again.id, again.incarnation > lease.incarnation) == (lease.id, True)


async def _swept(bench: Bench, dead: Bench) -> list[Any]:
    await bench.storage.sweep(bench.queue)
    return await dead.claim_all()


async def test_a_very_long_id_makes_a_letter_with_an_id_that_is_allowed(bench: Bench, dead: Bench) -> None:
    await bench.bring(S.FAILED, "ü" * 200)
    [(id, letter)] = await letters(bench, dead)
    assert len(id) <= 200
    assert letter["id"] == "ü" * 200


async def test_a_queue_whose_dead_letter_was_taken_back_writes_none(bench: Bench, dead: Bench) -> None:
    await bench.storage.configure(bench.queue, QueueSettings())
    await bench.bring(S.FAILED)
    assert await letters(bench, dead) == []
