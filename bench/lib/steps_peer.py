"""What bench/steps runs with Penstock: a worker that drains plain jobs, or jobs of five durable steps.

Started with the URL of a store as `argv[1]`. The lines on stdin are `plain <jobs>` and `steps <steps>`; every answer is
a line of JSON with the seconds from the start of the worker to its end, and its CPU seconds.
"""

import asyncio
import json
import sys
import time

from penstock import App, JobContext

STEPS = 5
app = App(sys.argv[1])


@app.task(queue="plain")
async def plain(n: int) -> int:
    return n


async def one(n: int) -> int:
    return n + 1


@app.task(queue="steps")
async def five(context: JobContext, n: int) -> int:
    for k in range(STEPS):
        n = await context.step("one", one, n, key=k)
    return n


async def drain(task, jobs):
    await task.enqueue_many([task.job(i) for i in range(jobs)])
    began, cpu = time.perf_counter(), time.process_time()
    await app.worker(queues=[task.queue], burst=True, concurrency=100).run()
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}


async def main():
    loop = asyncio.get_running_loop()
    async with app:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            kind, count = line.split()
            spent = await (drain(plain, int(count)) if kind == "plain" else drain(five, int(count) // STEPS))
            print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
