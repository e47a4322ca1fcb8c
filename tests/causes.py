"""One store in which jobs wait for every cause that Penstock names: ``plant`` puts them in."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from penstock import App, Flow
from penstock.core.job import NewJob
from penstock.core.outcome import Snooze
from penstock.storage.values import Settlement, Take

__all__ = ["CAUSES", "Cause", "plant"]


class Cause(NamedTuple):
    """A job, why it does not run, and words that the answer must have."""

    queue: str
    id: str
    kind: str
    words: tuple[str, ...]
    remedy: str


CAUSES: Final = (
    Cause(
        "paused",
        "stopped",
        "paused",
        ("Queue paused has been paused since 20",),
        "`penstock resume -q paused`",
    ),
    Cause(
        "resting",
        "rested",
        "paused",
        ("Queue resting has been paused since 20", ", until 20", "(in 59m"),
        "`penstock resume",
    ),
    Cause(
        "alone",
        "orphan",
        "no worker",
        ("No worker runs for queue alone",),
        '@app.handler("alone")',
    ),
    Cause(
        "capped",
        "second",
        "queue limit",
        ("Queue capped is at its limit of 1: first-of-queue",),
        "limit set -q capped --concurrency 2`",
    ),
    Cause(
        "grouped",
        "behind",
        "group limit",
        ("Group tenant 7 is at its limit of 1: first-of-group",),
        "--group 'tenant 7' --concurrency 2`",
    ),
    Cause("grouped", "quiet", "group paused", ("Group other has been paused since 20",), "--group other`"),
    Cause(
        "rated",
        "later",
        "rate limit",
        ("limited to 1 start in 1h", "until 20", "(in 59m"),
        "`penstock limit set -q rated --rate 2/h`",
    ),
    Cause(
        "costly",
        "poor",
        "budget",
        ("budget 'usd' of queue costly is spent: 3 of 2",),
        "`penstock budget set usd 6 -q costly`",
    ),
    Cause(
        "flows",
        "parent",
        "children",
        ("waits for 2 jobs to finish", "flows/child-1"),
        "`penstock why flows/child-1`",
    ),
    Cause(
        "signals", "asks", "signal", ("waits for the signal 'paid'",), "`penstock signal signals/asks paid`"
    ),
    Cause(
        "known",
        "foreign",
        "unknown task",
        ("No live worker of queue known knows task 'other.task'",),
        "Import",
    ),
    Cause(
        "returned",
        "shy",
        "unknown task",
        (
            "The worker that took it last does not know task 'new.task' and handed it back. The next try is at 20",
        ),
        "Import",
    ),
    Cause(
        "timed",
        "tomorrow",
        "not due",
        ("not due until 20", "(in 23h59m"),
        "`penstock promote timed/tomorrow`",
    ),
    Cause("staging", "half", "staged", ("its write 'w-1' is not complete",), "when that write commits"),
)
_ATTENDED: Final = sorted({cause.queue for cause in CAUSES} - {"alone"})


async def plant(app: App) -> None:
    """Put in a job for each of ``CAUSES``. A worker record stands for a live worker; no worker runs."""
    await _stop(app)
    await _limit(app)
    await _tie(app)
    await app.queue("alone").enqueue(1, id="orphan")
    await app.queue("known").enqueue(1, id="foreign", task="other.task")
    await app.queue("timed").enqueue(1, id="tomorrow", delay="1d")
    storage = await app.connect()
    await storage.enqueue("staging", [NewJob("half", staged=True, write_id="w-1")])
    returned = app.queue("returned")
    await returned.enqueue(1, id="shy", task="new.task")
    [lease] = (await storage.claim("returned", Take("w-old", 1, 60_000))).leases
    await storage.settle("returned", [Settlement(lease.id, lease.token, Snooze(3_600_000, unknown=True))])
    worker = {"queues": _ATTENDED, "concurrency": 8, "consuming": True, "unknown": ["other.task"]}
    info = json.dumps(worker)
    for queue in _ATTENDED:
        await storage.extend(queue, [], worker="w-live", lease_ms=3_600_000, info=info.encode())


async def _stop(app: App) -> None:
    await app.queue("paused").enqueue(1, id="stopped")
    await app.queue("paused").pause()
    await app.queue("resting").enqueue(1, id="rested")
    await app.queue("resting").pause("1h")


async def _limit(app: App) -> None:
    capped, rated, grouped, costly = (app.queue(name) for name in ("capped", "rated", "grouped", "costly"))
    await capped.limit(concurrency=1)
    await rated.limit(rate="1/1h")
    for queue, first in ((capped, "first-of-queue"), (rated, "first-of-rate")):
        await queue.enqueue(1, id=first)
        assert await queue.claim_one(lease="1h", wait=0, worker="w-live") is not None
    await capped.enqueue(1, id="second")
    await rated.enqueue(1, id="later")
    await grouped.limit(group="tenant 7", concurrency=1)
    await grouped.enqueue(1, id="first-of-group", group="tenant 7")
    assert await grouped.claim_one(lease="1h", wait=0, worker="w-live") is not None
    await grouped.enqueue(1, id="behind", group="tenant 7")
    await grouped.pause(group="other")
    await grouped.enqueue(1, id="quiet", group="other")
    await costly.set_budget("usd", 2)
    await costly.enqueue(1, id="rich")
    spender = await costly.claim_one(lease="1h", wait=0, worker="w-live")
    assert spender is not None
    await spender.use(usd=3)
    await costly.enqueue(1, id="poor")


async def _tie(app: App) -> None:
    flows, signals = app.queue("flows"), app.queue("signals")
    children = [flows.prepare(number, id=f"child-{number}") for number in (1, 2)]
    await app.enqueue_flow(Flow(flows.prepare(0, id="parent"), children))
    await signals.enqueue(1, id="asks")
    asking = await signals.claim_one(lease="1h", wait=0, worker="w-live")
    assert asking is not None
    await asking.suspend("paid")
