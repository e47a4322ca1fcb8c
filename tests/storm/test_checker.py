"""The checker of the storm finds what was planted, and nothing in a store that is sound."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.core.event import Event, EventPage, Gap
from penstock.core.job import NewJob
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Complete
from penstock.storage.values import Held, Settlement, Take
from tests.servers import ValkeyServer
from tests.slow.local_processes import opened
from tests.storm.checker import ENQUEUES_LOST, Verdict, check_storm, longest_silence_ms
from tests.storm.history import History
from tests.storm.journal import Answer, Appender, answer_line, calls_path, fault_line, read_calls, sessions
from tests.storm.plan import QUEUES, planned
from tests.storm.stores import Store
from tests.storm.storm import Plan, Storm

JOBS = 120
TEMPLATE_DB, DB = 1, 2


class Calm(NamedTuple):
    """A small storm without faults, to plant some in. ``engine`` is what is planted with."""

    url: str
    folder: Path
    engine: Any

    async def check(self, *, excused: frozenset[str] = frozenset()) -> Verdict:
        async with opened(self.url) as storage:
            return await check_storm(storage, self.folder, jobs=JOBS, excused=excused, calm=True)


async def finish(url: str, folder: Path) -> None:
    """Run all jobs of a small plan."""
    plan = Plan("sqlite", jobs=JOBS, kills=0, seconds=1, faults=frozenset(), workers=1)
    await Storm(plan, Store(url), folder).run()


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def templates(server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("sqlite", "valkey")}
    urls = {"sqlite": f"sqlite:///{folders['sqlite']}/storm.db", "valkey": f"{server.url}/{TEMPLATE_DB}"}

    async def finish_both() -> None:
        await asyncio.gather(*(finish(url, folders[name]) for name, url in urls.items()))

    asyncio.run(finish_both())
    return folders


@pytest.fixture
def sqlite_storm(templates: dict[str, Path], tmp_path: Path) -> Iterator[Calm]:
    folder = tmp_path / "sqlite"
    shutil.copytree(templates["sqlite"], folder)
    database = sqlite3.connect(folder / "storm.db", isolation_level=None)
    yield Calm(f"sqlite:///{folder}/storm.db", folder, database)
    database.close()


@pytest.fixture
def valkey_storm(templates: dict[str, Path], server: ValkeyServer, tmp_path: Path) -> Iterator[Calm]:
    folder = tmp_path / "valkey"
    shutil.copytree(templates["valkey"], folder)
    with server.client(db=TEMPLATE_DB, decode_responses=False) as template:
        with server.client(db=DB, decode_responses=False) as client:
            client.flushdb()
            for key in template.scan_iter():
                template.copy(key, key, destination_db=DB)
            yield Calm(f"{server.url}/{DB}", folder, client)


@pytest.fixture(params=["sqlite", "valkey"])
def storm(request: pytest.FixtureRequest) -> Calm:
    found: Calm = request.getfixturevalue(f"{request.param}_storm")
    return found


def victim() -> tuple[str, str]:
    """A job that was enqueued plainly, and its queue."""
    job = next(job for job in map(planned, range(7, JOBS)) if job.kind == "plain" and job.mode == "bulk")
    return job.id, job.queue


def key(queue: str, part: str) -> str:
    return f"penstock:{{default/{queue}/0}}:{part}"


def delete_record(storm: Calm) -> None:
    id, queue = victim()
    if isinstance(storm.engine, sqlite3.Connection):
        storm.engine.execute("DELETE FROM jobs WHERE id = ?", (id,))
        return
    assert storm.engine.hdel(key(queue, "jobs"), id) + storm.engine.hdel(key(queue, "state"), id) == 2


def change_result(storm: Calm) -> None:
    id, queue = victim()
    result = str(planned(int(id[4:])).result).encode()
    if isinstance(storm.engine, sqlite3.Connection):
        storm.engine.execute("UPDATE jobs SET result = ? WHERE id = ?", (b"1", id))
        return
    state = storm.engine.hget(key(queue, "state"), id)
    assert result in state
    storm.engine.hset(key(queue, "state"), id, state.replace(result, b"0" * len(result)))


def drop_event(storm: Calm) -> None:
    if isinstance(storm.engine, sqlite3.Connection):
        storm.engine.execute(
            "DELETE FROM events WHERE key = (SELECT key FROM events ORDER BY key LIMIT 1 OFFSET 40)"
        )
        return
    entries = storm.engine.xrange(key(QUEUES[0], "events"))
    storm.engine.xdel(key(QUEUES[0], "events"), entries[len(entries) // 2][0])


def drop_last_event(storm: Calm) -> None:
    if isinstance(storm.engine, sqlite3.Connection):
        storm.engine.execute("DELETE FROM events WHERE key = (SELECT max(key) FROM events)")
        return
    [(entry, _)] = storm.engine.xrevrange(key(QUEUES[0], "events"), count=1)
    storm.engine.xdel(key(QUEUES[0], "events"), entry)


def break_index(storm: Calm) -> None:
    id, queue = victim()
    if isinstance(storm.engine, sqlite3.Connection):
        storm.engine.execute("UPDATE queues SET completed = completed + 1 WHERE name = ?", (queue,))
        return
    assert storm.engine.zrem(key(queue, "completed"), id) == 1


def lose_accepted_id(storm: Calm) -> None:
    id = f"job-{JOBS + 1}"
    _append(storm.folder / "ledgers" / "producer-0", answer_line(Answer(False, id, "queued", id, "-")))


def accept_twice(storm: Calm) -> None:
    id, _ = victim()
    _append(storm.folder / "ledgers" / "producer-0", *[answer_line(Answer(False, id, "queued", id, "-"))] * 2)


def forget_on_repeat(storm: Calm) -> None:
    id, _ = victim()
    _append(storm.folder / "ledgers" / "producer-0", answer_line(Answer(True, id, "updated", id, "-")))


def answer_wrong_result(storm: Calm) -> None:
    id, _ = victim()
    _append(storm.folder / "ledgers" / "producer-0", answer_line(Answer(True, id, "completed", id, "0")))


def repeat_call(storm: Calm) -> None:
    """The same lease runs twice."""
    id, queue = victim()
    [call] = [call for call in read_calls(storm.folder, queue) if call.id == id]
    _append_call(storm, f"{queue} {id} {call.run} {call.token}")


def call_after_completion(storm: Calm) -> None:
    """Another lease runs a job that has completed."""
    id, queue = victim()
    _append_call(storm, f"{queue} {id} 2 999999")


def drop_calls(storm: Calm) -> None:
    [session] = sessions(storm.folder)
    calls_path(storm.folder, session.name, session.pid).write_text(
        f"session {session.worker} {session.begun_ns}\n"
    )


def cut_call(storm: Calm) -> None:
    """The handler did not end, but the store has its result."""
    [session] = sessions(storm.folder)
    path = calls_path(storm.folder, session.name, session.pid)
    lines = path.read_text().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if line.startswith("end"))
    path.write_text("".join(lines[:last] + lines[last + 1 :]))


def refuse_start(storm: Calm) -> None:
    _append(storm.folder / "faults", fault_line("cannot_start", "worker-0", 1, "75: no server"))


def hang_stop(storm: Calm) -> None:
    _append(storm.folder / "faults", fault_line("stop_hung", "worker-0", 1, "not over after 15 s"))


def _append_call(storm: Calm, call: str, *, ended_ns: int = 2) -> None:
    session = sessions(storm.folder)[0]
    path = calls_path(storm.folder, session.name, session.pid)
    _append(path, f"begin {call} {ended_ns - 1}", f"end {call} {ended_ns} completed")


def _append(path: Path, *lines: str) -> None:
    file = Appender(path)
    file.write(*lines)
    file.close()


FAULTS: dict[Callable[[Calm], None], set[str]] = {
    delete_record: {"job lost", "record missing"},
    change_result: {"wrong result"},
    drop_event: {"event missing"},
    drop_last_event: {"event missing"},
    lose_accepted_id: {"job lost"},
    accept_twice: {"job queued twice"},
    forget_on_repeat: {"wrong answer"},
    answer_wrong_result: {"wrong answer"},
    repeat_call: {"call repeated"},
    call_after_completion: {"call repeated", "call without a claim"},
    drop_calls: {"settled without a call"},
    cut_call: {"outcome differs"},
    hang_stop: {"stop hung"},
    refuse_start: {"cannot start"},
}


async def test_a_sound_store_has_no_violations(storm: Calm) -> None:
    verdict = await storm.check()
    assert verdict.violations == {}
    assert verdict.figures["calls"] >= JOBS * 0.9


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
async def test_the_checker_names_a_planted_fault(storm: Calm, plant: Callable[[Calm], None]) -> None:
    plant(storm)
    verdict = await storm.check()
    assert FAULTS[plant] <= verdict.violations.keys(), list(verdict.lines())


async def test_the_checker_compares_counts_with_records(sqlite_storm: Calm) -> None:
    break_index(sqlite_storm)
    assert "wrong counts" in (await sqlite_storm.check()).violations


async def test_the_checker_listens_to_check(valkey_storm: Calm) -> None:
    break_index(valkey_storm)
    assert "check() complains" in (await valkey_storm.check()).violations


async def test_the_checker_tells_two_workers_with_the_same_pid_apart(storm: Calm) -> None:
    [session] = sessions(storm.folder)
    path = calls_path(storm.folder, session.name, session.pid)
    _append(path, f"session worker-0-later {time.monotonic_ns()}")
    _append(storm.folder / "faults", fault_line("kill", session.name, session.pid))
    await repeat_finished_call(storm, worker="worker-0-later")
    verdict = await storm.check()
    assert verdict.violations == {}, list(verdict.lines())
    assert verdict.figures["finished calls repeated (killed)"] == 1


async def repeat_finished_call(storm: Calm, *, worker: str = "", earlier_s: float = 0) -> None:
    """A lease runs out although its call has finished, and the job runs again."""
    job = next(job for job in map(planned, range(JOBS, JOBS + 20)) if job.kind == "plain")
    worker = worker or sessions(storm.folder)[0].worker
    take = Take(worker, 1, 30_000)
    ended_ns = time.monotonic_ns() - int(earlier_s * 1e9)
    async with opened(storm.url) as storage:
        await storage.enqueue(job.queue, [NewJob(job.id)])
        [first] = (await storage.claim(job.queue, take)).leases
        held = [Held(first.id, first.token)]
        await storage.extend(job.queue, held, worker=worker, lease_ms=0)
        assert (await storage.sweep(job.queue)).rescued == 1
        [second] = (await storage.claim(job.queue, take)).leases
        outcome = Complete(str(job.result).encode())
        await storage.settle(job.queue, [Settlement(second.id, second.token, outcome)])
    for lease in (first, second):
        _append_call(storm, f"{job.queue} {job.id} {lease.run} {lease.token}", ended_ns=ended_ns)
    _append(storm.folder / "faults", fault_line("pause", "worker-1", 1))


async def test_the_checker_names_finished_work_that_a_stop_repeats_even_beside_a_pause(storm: Calm) -> None:
    await repeat_finished_call(storm)
    verdict = await storm.check()
    assert verdict.violations.keys() == {"stop repeats finished work"}, list(verdict.lines())


async def test_the_checker_names_finished_work_that_a_live_worker_lost(storm: Calm) -> None:
    await repeat_finished_call(storm)
    faults = storm.folder / "faults"
    lines = [line.split(" ", 1) for line in faults.read_text().splitlines()]
    faults.write_text("".join(f"{int(at) + 10**12} {rest}\n" for at, rest in lines))
    verdict = await storm.check()
    assert verdict.violations.keys() == {"lease lost by a live worker"}, list(verdict.lines())


async def test_only_a_worker_out_of_reach_of_the_store_may_lose_finished_work(storm: Calm) -> None:
    await repeat_finished_call(storm, earlier_s=5)
    verdict = await storm.check()
    assert verdict.violations == {}
    assert verdict.figures["finished calls repeated (out of reach)"] == 1


def test_a_silence_is_measured_between_the_moments_that_count() -> None:
    assert longest_silence_ms([50, 900, 1100, 2500], 100, 2000) == 900
    assert longest_silence_ms([], 100, 2000) == 1900


async def test_a_lossy_failover_explains_a_lost_job_but_no_wrong_result(storm: Calm) -> None:
    lose_accepted_id(storm)
    verdict = await storm.check(excused=ENQUEUES_LOST)
    assert verdict.holds
    assert verdict.lost.keys() == {"job lost"}
    change_result(storm)
    assert (await storm.check(excused=ENQUEUES_LOST)).violations.keys() == {"wrong result"}


# The log, event by event


def event(seq: int, type: EventType, state: State, *, id: str = "job-1", **fields: Any) -> Event:
    return Event(seq=seq, at_ms=1000, type=type, queue="q", id=id, state=state, **fields)


def life(id: str = "job-1", *, after: int = 0, **fields: Any) -> list[Event]:
    """Enqueued, claimed, completed."""
    leased = {"run": 1, "token": after + 2, "worker": "w"} | fields
    return [
        event(after + 1, EventType.ENQUEUED, State.WAITING, id=id),
        event(after + 2, EventType.CLAIMED, State.ACTIVE, id=id, **leased),
        event(after + 3, EventType.COMPLETED, State.COMPLETED, id=id, **leased),
    ]


def complaints(events: list[Event], *, gap: Gap | None = None) -> set[str]:
    found: list[str] = []
    history = History("q", lambda kind, _: found.append(kind))
    history.read(EventPage(events=events, next=events[-1].seq, last=events[-1].seq, epoch="e", gap=gap))
    history.close()
    return set(found)


def test_a_legal_log_passes() -> None:
    assert complaints(life() + life("job-2", after=3)) == set()


def test_a_second_completion_is_named() -> None:
    again = event(4, EventType.COMPLETED, State.COMPLETED, run=1, token=2, worker="w")
    assert complaints([*life(), again]) == {"completed twice", "illegal transition"}


def test_a_settle_under_a_stale_token_is_named() -> None:
    enqueued, claimed, _ = life()
    stale = event(3, EventType.COMPLETED, State.COMPLETED, run=1, token=1, worker="w")
    assert complaints([enqueued, claimed, stale]) == {"settled under a stale token"}


def test_a_token_that_comes_back_is_named() -> None:
    assert complaints(life() + life("job-2", after=3, token=2)) == {"token came back"}


def test_a_trimmed_log_is_named() -> None:
    assert "event missing" in complaints(life(after=3), gap=Gap(1, 3))


def test_a_second_enqueue_is_named() -> None:
    enqueued = event(4, EventType.ENQUEUED, State.WAITING)
    assert complaints([*life(), enqueued]) == {"wrong number of enqueue events"}


def test_two_members_of_a_strict_group_at_a_time_are_named() -> None:
    first, second = life("job-1", group="strict-1"), life("job-2", after=2, group="strict-1")
    events = [*first[:2], *second[:2]]
    assert complaints(events) == {"group limit exceeded", "strict group out of order"}


def test_a_clock_that_goes_back_is_named() -> None:
    early = Event(seq=4, at_ms=999, type=EventType.PAUSED, queue="q")
    assert complaints([*life(), early]) == {"time runs backwards"}
