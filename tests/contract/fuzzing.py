"""Random damage to a store that is full of jobs of every kind, and what has to hold afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from penstock.core.flow import Node, link_nodes
from penstock.core.job import Dedup, Dependency, Extras, NewJob
from penstock.core.lifecycle import State
from penstock.core.limits import Limit
from penstock.core.outcome import Complete, Fail, Snooze, Suspend
from penstock.core.step import NewStep
from penstock.errors import StorageDamaged
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import NewScheduler, Query, QueueSettings
from tests.contract.damage import database, harm_events
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, Bench, redispatch

__all__ = ["fill", "harm_some", "take_apart", "work_off"]

_ROUNDS: Final = 40


async def fill(bench: Bench) -> set[str]:
    """Put jobs of every kind into the queue, in every state; the ids of those that are to complete."""
    storage, queue = bench.storage, bench.queue
    await storage.configure(queue, QueueSettings(keep_completed=1000))
    await storage.limit(queue, "strict", Limit(concurrency=1))
    await storage.put_scheduler(queue, NewScheduler("nightly", b"spec", 2**45))
    await _bring_ended(bench)
    await _bring_running(bench)
    jobs = [
        *(bench.new(f"plain-{n}") for n in range(6)),
        bench.new("urgent", priority=-5, task="other"),
        bench.new("last", lifo=True),
        bench.new("later", delay_ms=MINUTE_MS),
        bench.new("mortal", ttl_ms=100 * MINUTE_MS),
        bench.new("labelled", extras=Extras(headers={"a": "b"}, stage="two")),
        bench.new("named", run_id="run", write_id="write", attempts=7),
        bench.new("unique", dedup=Dedup("key")),
        bench.new("heard", notify="ear"),
        *(bench.new(f"strict-{n}", extras=Extras(group="strict")) for n in range(4)),
        *(bench.new(f"loose-{n}", extras=Extras(group="loose", cost=2)) for n in range(2)),
    ]
    await storage.enqueue(queue, jobs)
    await storage.enqueue_flows(queue, [_flow(queue, n) for n in range(2)])
    known = {job.id for job in jobs} | {f"{name}-{n}" for name in ("parent", "child") for n in range(2)}
    return known | {"awake", "snoozed", "again", "retried", "stepped"}


def _flow(queue: str, n: int) -> list[Node]:
    parent = NewJob(f"parent-{n}", after=(Dependency(queue, f"child-{n}"),))
    return link_nodes([Node(queue, parent), Node(queue, NewJob(f"child-{n}"))], flow=f"flow-{n}")


async def _bring_ended(bench: Bench) -> None:
    await bench.bring(State.COMPLETED, "done")
    await bench.bring(State.FAILED, "broken")
    await bench.bring(State.CANCELLED, "dropped", extras=Extras(holds={"ledger": MINUTE_MS}))
    await bench.put("long")
    await bench.settle(await bench.claim(), Complete(b"x" * 5000))


async def _bring_running(bench: Bench) -> None:
    await bench.put("awake")
    await bench.settle(await bench.claim(), Suspend("go", timeout_ms=MINUTE_MS))
    await bench.put("snoozed")
    await bench.settle(await bench.claim(), Snooze(MINUTE_MS, stage="three"))
    await bench.put("retried")
    await bench.settle(await bench.claim(), Fail(BOOM, retry_in_ms=MINUTE_MS))
    await bench.put("stepped")
    lease = await bench.claim()
    results = {"charge": b"1", "ship[1]": b"22", "load": b"z" * 5000}
    steps = [NewStep("stepped", lease.token, name, result=result) for name, result in results.items()]
    steps.append(NewStep("stepped", lease.token, "tell", "retrying", failures=1, failure=BOOM))
    await bench.storage.record_steps(bench.queue, steps)
    await bench.settle(lease, Snooze(MINUTE_MS))
    await bench.put("again")
    await bench.claim()
    await bench.put("again", conflict=redispatch())


async def work_off(bench: Bench, expected: set[str]) -> None:
    """Claim, settle and sweep until the expected jobs are done, or rounds enough have passed."""
    for _ in range(_ROUNDS):
        try:
            await bench.storage.sweep(bench.queue)
            while leases := await bench.claim_all(9):
                for lease in leases:
                    await bench.settle(lease, Complete(b"1"))
        except StorageDamaged:
            await bench.storage.check(bench.queue, repair=True)
        if not expected - await _completed(bench):
            return
        await bench.storage.check(bench.queue, repair=True)
        await bench.shift(LEASE_MS)


async def _completed(bench: Bench) -> set[str]:
    return set(await bench.ids(State.COMPLETED))


async def take_apart(bench: Bench) -> None:
    """Look at everything, and remove it."""
    storage, queue = bench.storage, bench.queue
    ids = [job.id for job in (await storage.scan_jobs(queue, light=True)).jobs]
    await storage.get(queue, ids)
    for state in State:
        await storage.list_jobs(queue, state, limit=1000)
        await storage.search(queue, Query(state=state))
    await storage.counts(queue)
    await storage.metrics(queue)
    await storage.remove(queue, ids[::2])
    await storage.obliterate(queue, force=True)
    assert (await storage.scan_jobs(queue)).jobs == []
    assert (await storage.check(queue)).records == 0


# Damage


async def harm_some(bench: Bench, luck: random.Random) -> set[str]:
    """Damage a few stored values; the ids of jobs that may suffer from it, directly or through others."""
    suffering: set[str] = set()
    for _ in range(luck.randint(1, 4)):
        if isinstance(bench.storage, SqliteStorage):
            suffering |= _harm_database(bench.storage, luck)
        else:
            assert isinstance(bench.storage, ValkeyStorage)
            suffering |= await _harm_keys(bench.storage, bench.queue, luck)
    parents = {id.replace("child", "parent") for id in suffering}
    return suffering | parents


def spoiled(value: bytes, others: list[bytes], luck: random.Random) -> bytes:
    """Return the value truncated, with flipped bits, or replaced by other bytes."""
    match luck.randrange(4):
        case 0:
            return value[: luck.randrange(len(value) + 1)]
        case 1 if value:
            flipped = bytearray(value)
            for _ in range(luck.randint(1, 8)):
                flipped[luck.randrange(len(flipped))] ^= 1 << luck.randrange(8)
            return bytes(flipped)
        case 2:
            return luck.choice(others)
        case _:
            return luck.randbytes(luck.randrange(200))


_TABLES: Final = {
    "jobs": (
        "state", "blocked_by", "run_id", "worker", "settled_as", "runs", "failures", "stalls", "lease_until", "token",
        "kept_until", "failure", "rerun", "annex",
    ),
    "options": ("value",),
    "payloads": ("payload",),
    "limits": ("value",),
    "queues": ("settings", "minute", "waiting", "active", "failed", "clock_marks", "regroup"),
    "events": ("entry",),
    "dependencies": ("policy", "state", "failure"),
    "job_groups": ("waiting", "active", "held", "blocked", "cost"),
    "schedulers": ("spec",),
    "steps": ("name", "number", "status", "at_ms", "until_ms", "body", "result"),
}  # fmt: skip


def _harm_database(storage: SqliteStorage, luck: random.Random) -> set[str]:
    sql = database(storage)
    table = luck.choice(sorted(_TABLES))
    column = luck.choice(_TABLES[table])
    key = "key" if table == "job_groups" else "rowid"
    if table in ("limits", "schedulers", "steps"):
        key = "key" if table == "limits" else "name"
    rows = sql.execute(f"SELECT {key}, CAST({column} AS BLOB), typeof({column}) FROM {table}").fetchall()
    if not rows:
        return set()
    at, value, kind = luck.choice(rows)
    new: Any = luck.choice([-1, 2**60, -(2**63)])
    if kind != "integer":
        others = [_bytes(row[1]) for row in rows]
        new = spoiled(_bytes(value), others, luck)
    change = f"{column} = CAST(? AS TEXT)" if kind == "text" else f"{column} = ?"
    sql.execute(f"UPDATE OR IGNORE {table} SET {change} WHERE {key} = ?", (new, at))
    return set(_owners(sql, table, at))


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""


def _owners(sql: Any, table: str, at: Any) -> Iterator[str]:
    match table:
        case "jobs" | "payloads":
            yield from (id for (id,) in sql.execute("SELECT id FROM jobs WHERE key = ?", (at,)))
        case "options":
            yield from (id for (id,) in sql.execute("SELECT id FROM jobs WHERE options = ?", (at,)))
        case "steps":
            yield "stepped"
        case "dependencies":
            yield from (id for (id,) in sql.execute("SELECT parent FROM dependencies WHERE key = ?", (at,)))
        case _:
            pass


_OF_JOBS: Final = ("jobs", "state", "annex", "failures", "rerun", "results")
_BESIDE: Final = ("limits", "groups", "schedulers", "dedup", "waiters", "metrics", "workers", "consumers")
_REPLACED: Final = (
    "waiting", "scheduled", "active", "blocked", "completed", "failed", "expiring", "line", "wake", "parked",
    "group_keys", "dedup", "errors", "metrics", "events", "suspended", "slots", "logged",
)  # fmt: skip


_OF_META: Final = ("clock", "epoch", "trimmed", "lost", "outbox", "delivered", "regroup", "resumed")


async def _harm_keys(storage: ValkeyStorage, queue: str, luck: random.Random) -> set[str]:
    calls = storage._calls
    match luck.randrange(12):
        case 0 | 1 | 2 | 3:
            part = luck.choice(_OF_JOBS)
        case 4:
            part = luck.choice(_BESIDE)
        case 5:
            part = "options"
        case 6:
            key = calls.keys.part(queue, luck.choice(_REPLACED))
            await calls.plain(key, "DEL", key)
            await calls.plain(key, "SET", key, luck.randbytes(9))
            return set()
        case 7:
            return await _harm_meta(storage, queue, luck)
        case 8:
            return await _harm_dependencies(storage, queue, luck)
        case 9:
            await _harm_log(storage, queue, luck)
            return set()
        case 10:
            return await _harm_steps(storage, queue, luck)
        case _:
            key = calls.keys.part(queue, "meta")
            await calls.plain(key, "DEL", key)
            await calls.plain(key, "SET", key, luck.randbytes(9))
            return set()
    key = calls.keys.part(queue, part)
    if await calls.plain(key, "TYPE", key) != b"hash":
        return set()
    rows = await calls.plain(key, "HGETALL", key)
    if not rows:
        return set()
    at = luck.randrange(0, len(rows), 2)
    value = spoiled(rows[at + 1], rows[1::2], luck)
    if part in _BESIDE:
        value = rows[at + 1][: luck.randrange(3)]  # What is long enough may say something else, and be valid.
    await calls.plain(key, "HSET", key, rows[at], value)
    if part in _OF_JOBS:
        return {rows[at].decode()}
    return await _users(storage, queue, rows[at]) if part == "options" else set()


async def _users(storage: ValkeyStorage, queue: str, reference: bytes) -> set[str]:
    key = storage._calls.keys.part(queue, "jobs")
    rows = await storage._calls.plain(key, "HGETALL", key)
    return {id.decode() for id, static in zip(rows[::2], rows[1::2], strict=True) if reference in static}


async def _harm_dependencies(storage: ValkeyStorage, queue: str, luck: random.Random) -> set[str]:
    parent = f"parent-{luck.randrange(2)}"
    key = storage._calls.keys.part(queue, f"deps:{parent}")
    rows = await storage._calls.plain(key, "HGETALL", key)
    at = luck.randrange(0, len(rows), 2)
    await storage._calls.plain(key, "HSET", key, rows[at], spoiled(rows[at + 1], rows[1::2], luck))
    return {parent}


async def _harm_steps(storage: ValkeyStorage, queue: str, luck: random.Random) -> set[str]:
    key = storage._calls.keys.part(queue, luck.choice(("steps:stepped", "step_results:stepped")))
    if luck.random() < 0.2 or await storage._calls.plain(key, "TYPE", key) != b"hash":
        await storage._calls.plain(key, "SET", key, luck.randbytes(9))
        return {"stepped"}
    rows = await storage._calls.plain(key, "HGETALL", key)
    at = luck.randrange(0, len(rows), 2)
    await storage._calls.plain(key, "HSET", key, rows[at], spoiled(rows[at + 1], rows[1::2], luck))
    return {"stepped"}


async def _harm_log(storage: ValkeyStorage, queue: str, luck: random.Random) -> None:
    key = storage._calls.keys.part(queue, "events")
    if await storage._calls.plain(key, "TYPE", key) != b"stream":
        return
    entries = await storage._calls.plain(key, "XRANGE", key, "-", "+")
    number, _ = luck.choice(entries)
    await harm_events(storage, queue, last=int(number.partition(b"-")[0]), missing=luck.random() < 0.5)


async def _harm_meta(storage: ValkeyStorage, queue: str, luck: random.Random) -> set[str]:
    key = storage._calls.keys.part(queue, "meta")
    if await storage._calls.plain(key, "TYPE", key) != b"hash":
        return set()
    value = await storage._calls.plain(key, "HGET", key, "counters")
    spoilt = (
        value[: luck.randint(1, 38)]
        if luck.random() < 0.5
        else value[: luck.randint(39, max(39, len(value)))]
    )
    await storage._calls.plain(key, "HSET", key, "counters", spoilt)
    await storage._calls.plain(key, "HSET", key, "settings", luck.choice([b"{", b"7", b"\xff", b'{"a":{}}']))
    # A clock that is long enough may say something else, and be valid.
    for name in luck.sample(_OF_META, luck.randrange(4)):
        await storage._calls.plain(key, "HSET", key, name, b"\xc1" + luck.randbytes(luck.randrange(40)))
    return set()
