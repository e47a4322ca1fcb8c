"""What bench/features runs for each checkout and engine: enqueue and drain by storage calls, feature by feature.

Started with the URL of a store as `argv[1]`. The lines on stdin are `begin <feature> <jobs>`, then `enqueue` and
`drain`; every answer is a line of JSON, with the CPU time of this process. Limits are set and jobs are made by
`begin`. Only what plain jobs need is imported at the top: other checkouts may not have the rest.
"""

import asyncio
import gc
import json
import sys
import time
import uuid

from penstock.core.job import NewJob, Options
from penstock.core.outcome import Complete
from penstock.storage import open_storage
from penstock.storage.values import Settlement, Take

ENQUEUED_AT_ONCE = 500
TAKE = Take("w", 200, 60_000)
GROUPS = 100
CHILDREN = 10
STEPS = 5
OPTIONS = Options(task="noop")
PAYLOAD = b"x" * 100


class Plain:
    """Jobs without a feature; the others say what they do differently. One per round, on a queue of its own."""

    def __init__(self, storage, n):
        self.storage, self.n, self.queue = storage, n, f"q{uuid.uuid4().hex[:12]}"

    async def prepare(self):
        """What is set before there are jobs."""

    def job(self, i):
        return NewJob(str(i), PAYLOAD, OPTIONS)

    def batches(self):
        """Calls to make, as what put() takes."""
        jobs = [self.job(i) for i in range(self.n)]
        return [jobs[i : i + ENQUEUED_AT_ONCE] for i in range(0, self.n, ENQUEUED_AT_ONCE)]

    async def put(self, batch):
        await self.storage.enqueue(self.queue, batch)

    async def work(self, leases):
        """What running jobs do before they complete."""


class Grouped(Plain):
    def job(self, i):
        from penstock.core.job import Extras

        return NewJob(str(i), PAYLOAD, OPTIONS, extras=Extras(group=f"g{i % GROUPS}"))


class Capped(Grouped):
    async def prepare(self):
        await self.storage.limit(self.queue, "*", limit(concurrency=5))


class QueueRate(Plain):
    async def prepare(self):
        from penstock.core.limits import Rate

        await self.storage.limit(self.queue, "", limit(rate=Rate(count=1_000_000_000, per_ms=60_000)))


class QueueConcurrency(Plain):
    async def prepare(self):
        await self.storage.limit(self.queue, "", limit(concurrency=TAKE.count))


class Flows(Plain):
    """Parents, each with children in the same queue. What does not fill a flow is left out."""

    def batches(self):
        flows = [self.flow(i) for i in range(self.n // (CHILDREN + 1))]
        self.n = len(flows) * (CHILDREN + 1)
        at_once = ENQUEUED_AT_ONCE // (CHILDREN + 1)
        return [flows[i : i + at_once] for i in range(0, len(flows), at_once)]

    def flow(self, i):
        from penstock.core.flow import Node, woven
        from penstock.core.job import Dependency

        children = [NewJob(f"{i}.{j}", PAYLOAD, OPTIONS) for j in range(CHILDREN)]
        after = tuple(Dependency(self.queue, child.id) for child in children)
        parent = NewJob(str(i), PAYLOAD, OPTIONS, after=after)
        return woven([Node(self.queue, job) for job in (parent, *children)], flow=f"f{i}")

    async def put(self, batch):
        await self.storage.enqueue_flows(self.queue, batch)


class Deduped(Plain):
    def job(self, i):
        from penstock import Dedup

        return NewJob(str(i), PAYLOAD, OPTIONS, dedup=Dedup(f"k{i}"))


class UsageReported(Plain):
    async def work(self, leases):
        from penstock.storage.values import Report

        reports = [Report(lease.id, lease.token, usage={"tokens": 1_000_000}) for lease in leases]
        await self.storage.report(self.queue, reports)


class Stepped(Plain):
    async def work(self, leases):
        from penstock.core.step import NewStep

        for n in range(STEPS):
            steps = [NewStep(lease.id, lease.token, f"step[{n}]", result=b"1") for lease in leases]
            await self.storage.record_steps(self.queue, steps, lease_ms=TAKE.lease_ms)


class Budgeted(Plain):
    async def prepare(self):
        from penstock.storage.values import Budget

        await self.storage.set_budget(self.queue, Budget("tokens", micros=10**15))


class BudgetedFlows(Budgeted, Flows):
    """Whether a job of a flow may begin is a question of its flow's budget as well."""


class Traced(Plain):
    def job(self, i):
        from penstock.core.job import Extras

        headers = {"traceparent": f"00-{i:032x}-{i:016x}-01"}
        return NewJob(str(i), PAYLOAD, OPTIONS, extras=Extras(headers=headers))


def limit(**bounds):
    from penstock.core.limits import Limit

    return Limit(**bounds)


FEATURES = {
    "plain": Plain,
    "groups": Grouped,
    "groups-capped": Capped,
    "queue-rate": QueueRate,
    "queue-concurrency": QueueConcurrency,
    "flows": Flows,
    "flows-budget": BudgetedFlows,
    "dedup": Deduped,
    "usage": UsageReported,
    "steps": Stepped,
    "budget": Budgeted,
    "tracing": Traced,
}


async def begin(storage, feature, n):
    round_ = FEATURES[feature](storage, int(n))
    await round_.prepare()
    round_.made = round_.batches()
    # The jobs that were made ahead would be walked by every collection inside the clock.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return round_


async def enqueue(round_):
    began = time.process_time()
    for batch in round_.made:
        await round_.put(batch)
    return time.process_time() - began


async def drain(round_):
    began, done = time.process_time(), 0
    leases = (await round_.storage.claim(round_.queue, TAKE)).leases
    while leases:
        done += len(leases)
        await round_.work(leases)
        outcomes = [Settlement(lease.id, lease.token, Complete(b"")) for lease in leases]
        batch = await round_.storage.settle(round_.queue, outcomes, take=TAKE)
        leases = batch.claimed.leases
    seconds = time.process_time() - began
    if done != round_.n:
        raise RuntimeError(f"{done} of {round_.n} jobs came out")
    return seconds


async def main():
    storage = open_storage(sys.argv[1])
    await storage.open()
    loop, round_ = asyncio.get_running_loop(), None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        verb, *words = line.split()
        seconds = 0
        if verb == "begin":
            round_ = await begin(storage, *words)
        else:
            seconds = await {"enqueue": enqueue, "drain": drain}[verb](round_)
        print(json.dumps({"cpu": seconds, "jobs": round_.n}), flush=True)
    await storage.close()


if __name__ == "__main__":
    asyncio.run(main())
