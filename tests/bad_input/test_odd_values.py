"""Odd values at every entry point: each is refused with an error of ours, or accepted. Nothing else comes out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import App, Dedup, Flow, PenstockError, chain, chord, group, uuid7
from penstock.client.claim import ClaimedJob
from penstock.client.search import Filters
from penstock.core.text import is_storable

pytestmark = pytest.mark.timeout(120)

LONGEST_MESSAGE = 1000
PATIENCE_S = 20
DEPTH = 100_000


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Text(str):
    """A str of somebody's own."""


class Colour(StrEnum):
    RED = "red"


# Made once: that takes longer than all other values together.
@cache
def deep_list() -> Any:
    found: Any = []
    for _ in range(DEPTH):
        found = [found]
    return found


@cache
def deep_dict() -> Any:
    found: Any = {}
    for _ in range(DEPTH):
        found = {"a": found}
    return found


def own_list() -> Any:
    found: list[Any] = []
    found.append(found)
    return found


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "5": lambda: 5,
    "-1": lambda: -1,
    "1e400 as int": lambda: 10**400,
    "-1e5000 as int": lambda: -(10**5000),
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "Decimal nan": lambda: Decimal("sNaN"),
    "empty text": lambda: "",
    "space": lambda: " ",
    "lone surrogate": lambda: "a\udcff",
    "NUL": lambda: "a\x00b",
    "escape": lambda: "\x1b[2J",
    "long text": lambda: "x" * 1_000_000,
    "subclass of str": lambda: Text("red"),
    "str enum": lambda: Colour.RED,
    "bytes": lambda: b"\xff\x00",
    "bytearray": lambda: bytearray(b"a"),
    "list": lambda: ["a", "b"],
    "tuple of odd": lambda: (None, b"x", "\udcff"),
    "tuple of three": lambda: (1, 2, 3),
    "dict": lambda: {"a": "b"},
    "dict of odd": lambda: {"a\udcff": "b", b"x": 1, None: None},
    "dict of surrogates": lambda: {"a": "\udcff"},
    "dict of surrogate keys": lambda: {"\udcff": "a"},
    "set": lambda: {1, "a"},
    "deep list": deep_list,
    "deep dict": deep_dict,
    "list of itself": own_list,
    "object": object,
    "class": lambda: int,
    "unshowable": Unshowable,
    "list of unshowable": lambda: [Unshowable()],
    "function": lambda: len,
    "exception": lambda: ValueError("x"),
    "naive time": lambda: datetime(2030, 1, 1),
    "largest time": lambda: datetime.max,
    "generator": lambda: (number for number in range(3)),
}


class World(NamedTuple):
    app: Any
    task: Any
    queue: Any
    claimed: Any


async def drained(items: Any) -> list[Any]:
    return [item async for item in items]


async def claim_waiting(world: World, wait: Any) -> None:
    await world.queue.enqueue("x")
    await world.queue.claim_one(wait=wait)


async def wait_for_result(world: World, timeout: Any) -> None:
    """Cancel the job, or 5 s would be the time that the test takes."""
    job = await world.queue.enqueue("x")
    waiting = asyncio.create_task(job.result(timeout))
    await job.cancel()
    await waiting


def made(build: Callable[[World, Any], Any]) -> Callable[[World, Any], Awaitable[Any]]:
    async def call(world: World, value: Any) -> Any:
        return build(world, value)

    return call


Entry = Callable[[World, Any], Awaitable[Any]]


def by_name(name: str, call: Callable[[World, dict[str, Any]], Any]) -> Entry:
    """The entry whose value is given under that name."""
    return lambda world, value: call(world, {name: value})


def placements() -> dict[str, Entry]:
    """Every option of a job, by every way to give it."""
    from penstock.client.options import JOB_POLICY, PLACEMENT

    entries: dict[str, Entry] = {}
    for name in sorted(PLACEMENT):
        entries[f"task.options({name}=).enqueue"] = by_name(
            name, lambda w, v: w.task.options(**v).enqueue("x")
        )
        entries[f"queue.enqueue({name}=)"] = by_name(name, lambda w, v: w.queue.enqueue("x", **v))
    for name in sorted(PLACEMENT | JOB_POLICY):
        entries[f"task.options({name}=)"] = by_name(name, made(lambda w, v: w.task.options(**v)))
    for name in sorted(JOB_POLICY):
        entries[f"queue.enqueue({name}=)"] = by_name(name, lambda w, v: w.queue.enqueue("x", **v))
        entries[f"App({name}=)"] = by_name(name, made(lambda w, v: App("memory://", **v)))
    return entries


def worker_options() -> dict[str, Entry]:
    from penstock.worker.options import WorkerOptions

    names = sorted(WorkerOptions.__annotations__)
    return {f"worker({name}=)": by_name(name, made(lambda w, v: w.app.worker(**v))) for name in names}


def task_options() -> dict[str, Entry]:
    from penstock.client.options import TASK

    def define(world: World, options: dict[str, Any]) -> Any:
        def function(item: str) -> None: ...

        return App("memory://").task(**options)(function)

    names = sorted(TASK | {"name", "queue"})
    return {f"app.task({name}=)": by_name(name, made(define)) for name in names}


def schedule_options() -> dict[str, Entry]:
    entries: dict[str, Entry] = {
        "queue.schedule(payload)": lambda w, v: w.queue.schedule("s", v, every="1h"),
        "queue.schedule(name)": lambda w, v: w.queue.schedule(v, "x", every="1h"),
        "app.schedule(job)": lambda w, v: w.app.schedule("s", v, every="1h"),
        "schedule(cron=)": lambda w, v: w.queue.schedule("s", "x", cron=v),
        "schedule(every=)": lambda w, v: w.queue.schedule("s", "x", every=v),
        "schedule(after_completion=)": lambda w, v: w.queue.schedule("s", "x", after_completion=v),
        "schedule(tz=)": lambda w, v: w.queue.schedule("s", "x", cron="0 3 * * *", tz=v),
    }
    for name in ("start", "end", "limit", "missed"):
        entries[f"schedule({name}=)"] = by_name(
            name, lambda w, v: w.queue.schedule("s", "x", every="1h", **v)
        )
    return entries


def looking() -> dict[str, Entry]:
    entries: dict[str, Entry] = {
        "queue.get": lambda w, v: w.queue.get(v),
        "queue.get_or_none": lambda w, v: w.queue.get_or_none(v),
        "queue.get_many": lambda w, v: w.queue.get_many(v),
        "queue.get_many([])": lambda w, v: w.queue.get_many([v]),
        "queue.list_jobs": lambda w, v: drained(w.queue.list_jobs(v)),
        "queue.list_jobs(limit=)": lambda w, v: drained(w.queue.list_jobs("waiting", limit=v)),
        "queue.metrics": lambda w, v: w.queue.metrics(v),
        "queue.logs": lambda w, v: w.queue.logs(v),
        "queue.logs(start=)": lambda w, v: w.queue.logs("known", start=v),
        "queue.logs(limit=)": lambda w, v: w.queue.logs("known", limit=v),
        "queue.search(state)": lambda w, v: w.queue.search(v),
        "queue.dedup": lambda w, v: w.queue.dedup(v),
        "queue.held": lambda w, v: drained(w.queue.held(v)),
        "queue.held(limit=)": lambda w, v: drained(w.queue.held("ledger", limit=v)),
        "queue.events(after=)": lambda w, v: drained(w.queue.events(after=v, follow=False)),
        "queue.events(types=)": lambda w, v: drained(w.queue.events(types=v, follow=False)),
        "queue.events(id=)": lambda w, v: drained(w.queue.events(id=v, follow=False)),
        "app.events": lambda w, v: drained(w.app.events(v, follow=False)),
        "app.events(after=)": lambda w, v: drained(w.app.events("orders", after=v, follow=False)),
        "app.subscribe(consumer=)": made(lambda w, v: w.app.subscribe(consumer=v)),
        "app.subscribe(after=)": made(lambda w, v: w.app.subscribe("orders", after=v)),
        "app.subscribe(hold=)": made(lambda w, v: w.app.subscribe("orders", consumer="a", hold=v)),
        "app.subscribe(on_error=)": made(lambda w, v: w.app.subscribe("orders", on_error=v)),
        "subscription.on": made(lambda w, v: w.app.subscribe("orders").on(v)(len)),
        "app.queue": made(lambda w, v: w.app.queue(v)),
        "app.queue(serde=)": made(lambda w, v: w.app.queue("orders", serde=v)),
        "app.job": made(lambda w, v: w.app.job(v)),
        "app.flow": made(lambda w, v: w.app.flow(v)),
        "queue.job": made(lambda w, v: w.app.queue("orders").job(v)),
        "app.task_named": made(lambda w, v: w.app.task_named(v)),
        "handle.result(timeout=)": wait_for_result,
        "handle.keep_result": lambda w, v: w.queue.job("known").keep_result(v),
    }  # fmt: skip
    for name in [*Filters.__annotations__, "limit", "scan", "cursor"]:
        entries[f"queue.search({name}=)"] = by_name(name, lambda w, v: w.queue.search("failed", **v))
    return entries


def operating() -> dict[str, Entry]:
    entries: dict[str, Entry] = {
        "queue.signal(data)": lambda w, v: w.queue.signal("known", "go", v),
        "queue.signal(name)": lambda w, v: w.queue.signal("known", v),
        "queue.signal(id)": lambda w, v: w.queue.signal(v, "go"),
        "queue.hold(consumer)": lambda w, v: w.queue.hold(v, "known"),
        "queue.hold(ids)": lambda w, v: w.queue.hold("ledger", v),
        "queue.hold(ttl=)": lambda w, v: w.queue.hold("ledger", "known", ttl=v),
        "queue.release": lambda w, v: w.queue.release(v, "known"),
        "queue.hold_events": lambda w, v: w.queue.hold_events(v, offset=0),
        "queue.hold_events(offset=)": lambda w, v: w.queue.hold_events("c", offset=v),
        "queue.hold_events(ttl=)": lambda w, v: w.queue.hold_events("c", offset=0, ttl=v),
        "queue.release_events": lambda w, v: w.queue.release_events(v),
        "queue.clear_dedup": lambda w, v: w.queue.clear_dedup(v),
        "queue.set_budget(name)": lambda w, v: w.queue.set_budget(v, 5),
        "queue.set_budget(amount)": lambda w, v: w.queue.set_budget("usd", v),
        "queue.set_budget(per=)": lambda w, v: w.queue.set_budget("usd", 5, per=v),
        "queue.set_budget(flow=)": lambda w, v: w.queue.set_budget("usd", 5, flow=v),
        "queue.remove_budget": lambda w, v: w.queue.remove_budget(v),
        "queue.remove_budget(flow=)": lambda w, v: w.queue.remove_budget("usd", flow=v),
        "queue.limit(group=)": lambda w, v: w.queue.limit(group=v, concurrency=1),
        "queue.limit(concurrency=)": lambda w, v: w.queue.limit(concurrency=v, rate="5/s"),
        "queue.limit(rate=)": lambda w, v: w.queue.limit(rate=v, concurrency=1),
        "queue.limit(bucket=)": lambda w, v: w.queue.limit(group="g", bucket=v),
        "queue.unlimit(group=)": lambda w, v: w.queue.unlimit(group=v),
        "queue.pause(duration)": lambda w, v: w.queue.pause(v),
        "queue.pause(group=)": lambda w, v: w.queue.pause(group=v),
        "queue.resume(group=)": lambda w, v: w.queue.resume(group=v),
        "queue.change(id)": lambda w, v: w.queue.change(v, priority=1),
        "queue.change(payload=)": lambda w, v: w.queue.change("known", payload=v),
        "queue.clean(state)": lambda w, v: w.queue.clean(v),
        "queue.clean(older_than=)": lambda w, v: w.queue.clean("failed", older_than=v),
        "queue.clean(limit=)": lambda w, v: w.queue.clean("failed", limit=v),
        "queue.retry_all(limit=)": lambda w, v: w.queue.retry_all(limit=v),
        "queue.remove_all(state)": lambda w, v: w.queue.remove_all(v, task="nothing"),
        "queue.claim_many(count)": lambda w, v: w.queue.claim_many(v, wait=0),
        "queue.claim(lease=)": lambda w, v: w.queue.claim_one(lease=v, wait=0),
        "queue.claim(wait=)": claim_waiting,
        "queue.claim(worker=)": lambda w, v: w.queue.claim_one(worker=v, wait=0),
        "queue.remove_scheduler": lambda w, v: w.queue.remove_scheduler(v),
        "queue.pause_scheduler": lambda w, v: w.queue.pause_scheduler(v),
        "Dedup.simple": made(lambda w, v: Dedup.simple(v)),
        "Dedup.throttle": made(lambda w, v: Dedup.throttle("k", v)),
        "Dedup.debounce": made(lambda w, v: Dedup.debounce("k", v)),
        "App(url)": made(lambda w, v: App(v)),
        "App(namespace=)": made(lambda w, v: App("memory://", namespace=v)),
        "App(max_payload=)": made(lambda w, v: App("memory://", max_payload=v)),
        "App(serde=)": made(lambda w, v: App("memory://", serde=v)),
        "app.move_to": made(lambda w, v: App("memory://").move_to(v)),
        "app.enqueue_flow": lambda w, v: w.app.enqueue_flow(v),
        "app.enqueue_flows": lambda w, v: w.app.enqueue_flows(v),
        "chain": lambda w, v: chain(w.task.job("x"), v).enqueue(),
        "chain(on_failure=)": lambda w, v: chain(w.task.job("x"), w.task.job(), on_failure=v).enqueue(),
        "group": lambda w, v: group(v).enqueue(),
        "group([])": lambda w, v: group([w.task.job("x"), v]).enqueue(),
        "chord": lambda w, v: chord([w.task.job("x")], v).enqueue(),
        "Flow": lambda w, v: Flow(w.task.job("x"), v).enqueue(),
        "app.enqueue_middleware": made(lambda w, v: App("memory://").enqueue_middleware(v)),
        "app.task(function)": made(lambda w, v: App("memory://").task(v) if v is not None else None),
    }  # fmt: skip
    for name in ("cancel", "retry", "promote", "remove", "end_leases"):
        entries[f"queue.{name}"] = by_name(
            name, lambda w, v: next(getattr(w.queue, name)(id) for name, id in v.items())
        )
    for name in ("priority", "delay", "result_ttl", "failure_ttl"):
        entries[f"queue.change({name}=)"] = by_name(name, lambda w, v: w.queue.change("known", **v))
    from penstock.client.admin import Settings

    for name in Settings.__annotations__:
        entries[f"queue.configure({name}=)"] = by_name(name, lambda w, v: w.queue.configure(**v))
    return entries


def claimed() -> dict[str, Entry]:
    return {
        "claimed.complete": lambda w, v: w.claimed.complete(v),
        "claimed.complete(ttl=)": lambda w, v: w.claimed.complete(ttl=v),
        "claimed.fail": lambda w, v: w.claimed.fail(v),
        "claimed.fail(retry_in=)": lambda w, v: w.claimed.fail("x", retry_in=v),
        "claimed.rate_limited": lambda w, v: w.claimed.rate_limited(v),
        "claimed.rate_limited(scope=)": lambda w, v: w.claimed.rate_limited("1s", scope=v),
        "claimed.snooze": lambda w, v: w.claimed.snooze(v),
        "claimed.snooze(stage=)": lambda w, v: w.claimed.snooze("1s", stage=v),
        "claimed.suspend": lambda w, v: w.claimed.suspend(v),
        "claimed.suspend(timeout=)": lambda w, v: w.claimed.suspend("go", timeout=v),
        "claimed.extend": lambda w, v: w.claimed.extend(v),
        "claimed.progress": lambda w, v: w.claimed.progress(v),
        "claimed.log": lambda w, v: w.claimed.log(v),
        "claimed.update_payload": lambda w, v: w.claimed.update_payload(v),
        "claimed.use": lambda w, v: w.claimed.use(tokens=v),
        "claimed.add_children": lambda w, v: w.claimed.add_children(v),
    }


ENTRIES: dict[str, Entry] = {
    "task.enqueue(argument)": lambda w, v: w.task.enqueue(v),
    "task.enqueue_many": lambda w, v: w.task.enqueue_many(v),
    "task.enqueue_many([])": lambda w, v: w.task.enqueue_many([v]),
    "task.job": made(lambda w, v: w.task.job(v)),
    "queue.enqueue(payload)": lambda w, v: w.queue.enqueue(v),
    "queue.enqueue(task=)": lambda w, v: w.queue.enqueue("x", task=v),
    "queue.enqueue_many": lambda w, v: w.queue.enqueue_many(v),
    "queue.enqueue_many(ids=)": lambda w, v: w.queue.enqueue_many(["x", "y"], ids=v),
    **placements(),
    **worker_options(),
    **task_options(),
    **schedule_options(),
    **looking(),
    **operating(),
    **claimed(),
}


NO_STORE = ("App(", "Dedup.", "app.move_to", "app.task(", "task.options(", "worker(")
CASES = [
    pytest.param(engine, name, id=f"{engine}-{name}")
    for name in ENTRIES
    for engine in ("memory", "valkey")
    if engine == "memory" or not name.startswith(NO_STORE)
]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[World]:
    async with App(url, namespace=f"odd-{uuid7()}", max_payload="64KiB") as app:
        queue = app.queue("orders")

        @app.task(queue="orders")
        async def pack(item: Any, *, count: int = 1) -> None: ...

        await queue.enqueue("known", id="known")
        yield World(app, pack, queue, None)


@pytest.fixture
async def world(engine: str, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    url = "memory://" if engine == "memory" else request.getfixturevalue("valkey_url")
    async with opened(url) as made:
        yield made


async def claimed_job(world: World) -> ClaimedJob:
    queue = world.app.queue("claims")
    await queue.resume()
    await queue.enqueue("x")
    job: ClaimedJob | None = await queue.claim_one(wait=0)
    assert job is not None
    return job


@pytest.mark.parametrize(("engine", "name"), CASES)
async def test_odd_values_are_refused_by_an_error_of_ours_or_accepted(world: World, name: str) -> None:
    entry, leaks = ENTRIES[name], []
    for kind, value in VALUES.items():
        if name.startswith("claimed."):
            world = world._replace(claimed=await claimed_job(world))
        await world.queue.resume()
        before = await world.queue.counts()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await entry(world, value())
        except PenstockError as error:
            said = str(error)
            if len(said) > LONGEST_MESSAGE or not is_storable(said):
                leaks.append(f"{kind}: a message of {len(said)} characters: {said!r:.200}")
            if "enqueue" in name and (await world.queue.counts()).open != before.open:
                leaks.append(f"{kind}: refused, and written")
        except BaseException as error:
            leaks.append(f"{kind}: {type(error).__name__}: {error!s:.200}")
    assert not leaks, "\n".join(leaks)


odd_text = st.text(st.characters(exclude_categories=()) | st.sampled_from("\x00\x1b\x9b\u202e\udcff/{}*: "))
odd_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | odd_text | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(odd_text, inner),
    max_leaves=5,
)


@pytest.mark.parametrize("engine", ["memory", "valkey"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(id=odd_text, payload=odd_data, headers=st.dictionaries(odd_text, odd_text), key=odd_text)
def test_what_is_accepted_is_read_back_as_it_was(
    valkey_url: str, engine: str, id: str, payload: Any, headers: dict[str, str], key: str
) -> None:
    async def put_and_get() -> None:
        async with opened("memory://" if engine == "memory" else valkey_url) as world:
            queue = world.app.queue("orders", serde="msgpack")
            try:
                handle = await queue.enqueue(payload, id=id, headers=headers, group=key, dedup=key)
            except PenstockError:
                assert (await queue.counts()).open == 1
                return
            info = await handle.get()
            assert (info.id, dict(info.headers), info.group) == (id, headers, key)
            assert repr(info.payload) == repr(payload)
            assert await queue.dedup(key) == id

    asyncio.run(put_and_get())
