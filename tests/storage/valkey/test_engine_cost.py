"""What the Valkey engine costs: commands per batch, bytes per job, and what the line of waiting jobs leaves behind."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from penstock.core.job import Conflict, Extras, NewJob, Options
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Fail, Failure, Suspend
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import Change, Report, Settlement, Take
from tests.servers import ValkeyServer

QUEUE = "mail"
OPTIONS = Options(task="mail.send", version="3", attempts=5)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
async def storage(server: ValkeyServer) -> ValkeyStorage:
    store = ValkeyStorage.from_url(server.url, namespace=f"t{uuid.uuid4().hex[:12]}")
    await store.open()
    return store


def jobs(count: int) -> list[NewJob]:
    return [NewJob(uuid.uuid4().hex, b"x" * 100, OPTIONS) for _ in range(count)]


def rows(count: int) -> list[NewJob]:
    """Return jobs as a run over a table puts them in."""
    return [
        NewJob(
            uuid.uuid4().hex,
            b"x" * 100,
            OPTIONS,
            run_id="run",
            write_id=f"write {number}",
            conflict=Conflict(mode="redispatch", reset_counts=True),
            extras=Extras(headers={"key": f"[{number}]"}, holds={"ledger": 86_400_000}, flow="flow"),
        )
        for number in range(count)
    ]


def commands(server: ValkeyServer) -> int:
    """How many commands functions have run so far, without those of the tests."""
    stats = server.info("commandstats")
    return sum(
        row["calls"] for name, row in stats.items() if name.split("_")[1].split("|")[0] not in _NOT_INNER
    )


_NOT_INNER = {"fcall", "info", "function", "client", "sadd", "ping", "config", "auth"}


@pytest.mark.parametrize("size", [10, 1000])
async def test_commands_per_batch_do_not_depend_on_its_size(
    server: ValkeyServer, storage: ValkeyStorage, size: int
) -> None:
    await storage.enqueue(QUEUE, jobs(1))
    enqueues, settles = [], []
    for _ in range(3):  # once in a second a call looks at all keys
        before = commands(server)
        await storage.enqueue(QUEUE, jobs(size))
        enqueues.append(commands(server) - before)
        await storage.enqueue(QUEUE, jobs(size))
        take = Take("worker", size, 60_000)
        leases = (await storage.claim(QUEUE, take)).leases
        assert len(leases) == size
        claimed = commands(server)
        outcomes = [Settlement(lease.id, lease.token, Complete(b"null")) for lease in leases]
        await storage.settle(QUEUE, outcomes, take=take)
        settles.append(commands(server) - claimed)
    assert min(enqueues) <= 12
    assert min(settles) <= 23
    await storage.close()


@pytest.mark.parametrize("size", [10, 1000])
async def test_commands_for_held_jobs_of_a_run_do_not_depend_on_their_number(
    server: ValkeyServer, storage: ValkeyStorage, size: int
) -> None:
    await storage.enqueue(QUEUE, rows(1))
    counted: dict[str, list[int]] = {"enqueue": [], "claim": [], "settle": [], "release": []}
    for _ in range(3):  # once in a second a call looks at all keys
        marks = [commands(server)]
        await storage.enqueue(QUEUE, rows(size))
        marks.append(commands(server))
        leases = (await storage.claim(QUEUE, Take("worker", size, 60_000))).leases
        assert len(leases) == size
        marks.append(commands(server))
        await storage.settle(QUEUE, [Settlement(lease.id, lease.token, Complete(b"1")) for lease in leases])
        marks.append(commands(server))
        answers = await storage.release(QUEUE, "ledger", [lease.id for lease in leases])
        assert set(answers) == {"released"}
        marks.append(commands(server))
        for verb, before, after in zip(counted, marks, marks[1:], strict=False):
            counted[verb].append(after - before)
    assert {verb: min(counts) <= 80 for verb, counts in counted.items()} == dict.fromkeys(counted, True)
    await storage.close()


async def test_a_queued_job_with_its_event_takes_at_most_320_bytes(
    server: ValkeyServer, storage: ValkeyStorage
) -> None:
    await storage.enqueue(QUEUE, jobs(1))
    before = server.info("memory")["used_memory"]
    for _ in range(20):
        await storage.enqueue(QUEUE, jobs(1000))
    used = server.info("memory")["used_memory"] - before
    assert used / 20_000 <= 320
    await storage.close()


async def test_options_are_stored_once_per_queue(storage: ValkeyStorage) -> None:
    await storage.enqueue(QUEUE, jobs(10))
    await storage.enqueue(QUEUE, [NewJob("other", options=Options(task="mail.other"))])
    key = storage._calls.keys.part(QUEUE, "options")
    assert await storage._calls.plain(key, "HLEN", key) == 2
    await storage.close()


async def test_jobs_that_left_the_line_are_neither_counted_nor_claimed(storage: ValkeyStorage) -> None:
    ids = [f"{i}" for i in range(8)]
    await storage.enqueue(QUEUE, [NewJob(id) for id in ids])
    await storage.cancel(QUEUE, ["0"])
    await storage.remove(QUEUE, ["1"])
    await storage.change(QUEUE, "5", Change(priority=-1))
    await storage.change(QUEUE, "6", Change(payload=b"new"))
    await storage.enqueue(QUEUE, [NewJob("1", b"again")])
    expected = ["5", "2", "3", "4", "6", "7", "1"]

    page = await storage.list_jobs(QUEUE, State.WAITING)
    back = await storage.list_jobs(QUEUE, State.WAITING, reverse=True)
    assert [job.id for job in page.jobs] == expected
    assert [job.id for job in back.jobs] == expected[::-1]
    assert (await storage.counts(QUEUE)).waiting == 7
    assert (await storage.check(QUEUE)).problems == {}
    first = (await storage.claim(QUEUE, Take("worker", 3, 60_000))).leases
    rest = (await storage.claim(QUEUE, Take("worker", 10, 60_000))).leases
    assert [lease.id for lease in first + rest] == expected
    assert rest[-1].payload == b"again"
    assert (await storage.counts(QUEUE)).waiting == 0
    await storage.close()


async def test_pages_of_the_waiting_are_whole_across_line_and_zset(storage: ValkeyStorage) -> None:
    await storage.enqueue(
        QUEUE, [NewJob(f"{i:02}", priority=(i % 3) - 1, lifo=i % 5 == 0) for i in range(60)]
    )
    await storage.cancel(QUEUE, [f"{i:02}" for i in range(4, 60, 9)])
    whole = [job.id for job in (await storage.list_jobs(QUEUE, State.WAITING, limit=100)).jobs]
    for reverse in (False, True):
        found: list[str] = []
        cursor = ""
        while True:
            page = await storage.list_jobs(QUEUE, State.WAITING, cursor=cursor, limit=7, reverse=reverse)
            found += [job.id for job in page.jobs]
            cursor = page.cursor
            if not cursor:
                break
        assert found == (whole[::-1] if reverse else whole)
    claimed = (await storage.claim(QUEUE, Take("worker", 100, 60_000))).leases
    assert [lease.id for lease in claimed] == whole
    await storage.close()


@pytest.mark.parametrize("part", ["line", "waiting", "active", "completed", "scheduled"])
async def test_a_full_check_puts_records_back_that_no_index_points_to(
    storage: ValkeyStorage, part: str
) -> None:
    await storage.enqueue(QUEUE, [NewJob("done"), NewJob("held")])
    done, _ = (await storage.claim(QUEUE, Take("worker", 2, 60_000))).leases
    await storage.settle(QUEUE, [Settlement(done.id, done.token, Complete(b"r"))])
    others = [NewJob("late", delay_ms=60_000), NewJob("fast", priority=-1), NewJob("plain")]
    await storage.enqueue(QUEUE, others)
    before = await storage.counts(QUEUE)
    key = storage._calls.keys.part(QUEUE, part)
    await storage._calls.plain(key, "DEL", key)

    found = await storage.check(QUEUE)
    mended = await storage.check(QUEUE, repair=True)

    state = "waiting" if part == "line" else part
    assert found.problems == mended.problems == {f"not_in_{state}": 1}
    assert (found.records, found.repaired, mended.repaired) == (5, False, True)
    assert (await storage.check(QUEUE)).problems == {}
    after = await storage.counts(QUEUE)
    assert (after.open, after.completed) == (before.open, before.completed)
    await storage.close()


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("suspended", "not_in_suspended"),
        ("error:Boom", "not_in_errors"),
        ("held:ledger", "not_in_held"),
        ("held_failed", "not_in_held"),
    ],
)
async def test_a_full_check_mends_the_indexes_of_features(
    storage: ValkeyStorage, part: str, problem: str
) -> None:
    held = Extras(holds={"ledger": 60_000})
    await storage.enqueue(QUEUE, [NewJob("asks"), NewJob("fails", extras=held)])
    asks, fails = (await storage.claim(QUEUE, Take("worker", 2, 60_000))).leases
    outcomes = [
        Settlement("asks", asks.token, Suspend("go", 60_000)),
        Settlement("fails", fails.token, Fail(Failure("Boom", ""), final=True)),
    ]
    await storage.settle(QUEUE, outcomes)
    key = storage._calls.keys.part(QUEUE, part)
    score = await storage._calls.plain(key, "ZRANGE", key, 0, -1, "WITHSCORES")
    await storage._calls.plain(key, "DEL", key)
    await storage._calls.plain(key, "ZADD", key, 1, "ghost")

    checked = await storage.check(QUEUE, repair=True)

    assert checked.problems == {problem: 1, f"stray_in_{part}": 1}
    assert (await storage.check(QUEUE)).problems == {}
    assert await storage._calls.plain(key, "ZRANGE", key, 0, -1, "WITHSCORES") == score
    await storage.close()


async def test_a_full_check_removes_entries_without_a_record(storage: ValkeyStorage) -> None:
    await storage.enqueue(QUEUE, [NewJob("a"), NewJob("b", delay_ms=60_000)])
    keys = storage._calls.keys
    for part, member in (("active", "ghost"), ("failed", "a"), ("scheduled", "ghost")):
        key = keys.part(QUEUE, part)
        await storage._calls.plain(key, "ZADD", key, 1, member)
    results = keys.part(QUEUE, "results")
    await storage._calls.plain(results, "HSET", results, "ghost", "r")

    checked = await storage.check(QUEUE, repair=True)

    kinds = {"stray_in_active": 1, "stray_in_failed": 1, "stray_in_scheduled": 1, "stray_in_results": 1}
    assert checked.problems == kinds
    assert (await storage.check(QUEUE)).problems == {}
    counts = await storage.counts(QUEUE)
    assert (counts.waiting, counts.scheduled, counts.active, counts.failed) == (1, 1, 0, 0)
    await storage.close()


async def test_a_retried_job_keeps_its_progress_and_log_lines(storage: ValkeyStorage) -> None:
    await storage.enqueue(QUEUE, [NewJob("a")])
    [lease] = (await storage.claim(QUEUE, Take("worker", 1, 60_000))).leases
    await storage.report(QUEUE, [Report("a", lease.token, progress=b"0.5", log=("half way",))])
    failed = Fail(Failure("Boom", "it went off"), final=True)
    await storage.settle(QUEUE, [Settlement("a", lease.token, failed)])
    assert await storage.retry(QUEUE, ["a"]) == ["retried"]
    [job] = await storage.get(QUEUE, ["a"])
    assert job is not None
    assert (job.progress, job.failure, job.failures) == (b"0.5", None, 0)
    assert (await storage.logs(QUEUE, "a")).lines == ["half way"]
    await storage.close()
