"""A run of ``process`` that may be killed: ``python -m tests.slow.table_run ROWS OUTPUT``."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from penstock import App
from penstock.worker.context import current_job

QUEUE = "killed"
WORKERS, CONCURRENCY = 2, 20

app = App(os.environ.get("PENSTOCK_URL", "memory://"))


@app.task(queue=QUEUE, attempts=3, backoff="10ms", max_stalls=1000)
async def work(n: int) -> int:
    """Every hundredth row fails once. Each call is a line, written at once: a killed process has written its own."""
    fd = os.open(os.environ["CALLS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\n" % n)
    os.close(fd)
    await asyncio.sleep(0.002)
    if n % 100 == 0 and current_job().failures == 0:
        raise RuntimeError("fails once")
    return 2 * n


def main() -> None:
    import penstock.spark as ps
    from tests.slow.drivers import say_ready
    from tests.slow.table_run import work as task
    from tests.spark.quick import QUICK

    rows, output = int(sys.argv[1]), Path(sys.argv[2])
    spark = ps.session("killed", cores=2, memory="1g", config=QUICK)
    say_ready(spark)
    df = spark.range(rows).selectExpr("id AS n")
    format = sys.argv[3] if len(sys.argv) > 3 else "parquet"
    ps.process(
        df,
        task,
        key="n",
        output=output,
        workers=WORKERS,
        concurrency=CONCURRENCY,
        progress="none",
        format=format,
    )


if __name__ == "__main__":
    main()
