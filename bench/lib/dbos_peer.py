"""What bench/steps runs with DBOS, on SQLite: workflows of five steps. Started with the path of a file as `argv[1]`.

The lines on stdin are `steps <steps>`; every answer is a line of JSON with the seconds and the CPU seconds.
"""

import asyncio
import json
import os
import sys
import time

from dbos import DBOS

STEPS = 5
DBOS(
    config={
        "name": "bench",
        "system_database_url": f"sqlite:///{sys.argv[1]}",
        "log_level": "ERROR",
        "run_admin_server": False,
    }
)


@DBOS.step()
async def one(n: int) -> int:
    return n + 1


@DBOS.workflow()
async def five(n: int) -> int:
    for _ in range(STEPS):
        n = await one(n)
    return n


async def drain(jobs):
    began, cpu = time.perf_counter(), time.process_time()
    handles = [await DBOS.start_workflow_async(five, i) for i in range(jobs)]
    for handle in handles:
        await handle.get_result()
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}


async def main():
    DBOS.launch()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await drain(int(line.split()[1]) // STEPS)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)  # its threads would go on
