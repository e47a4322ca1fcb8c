"""What the kills of the history's test are for: syncs until it is killed, or, to check, to the end and from scratch.

``python -m tests.slow.history_driver URL FOLDER sync|verify``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock.spark import history, session
from tests.slow.drivers import say_ready
from tests.spark.quick import QUICK


def main(url: str, folder: str, mode: str) -> None:
    spark = session("kills", cores=1, memory="1g", config=QUICK)
    say_ready(spark)
    while mode == "sync":
        print(history.sync(url, folder, spark=spark, max_events=60), flush=True)
    scratch = Path(folder).with_name("scratch")
    last = history.sync(url, folder, spark=spark)
    again = history.sync(url, folder, spark=spark)
    history.sync(url, scratch, spark=spark)
    ours, theirs = history.tables(spark, folder), history.tables(spark, scratch)
    tables = {
        name: [sorted(map(str, getattr(tables, name).collect())) for tables in (ours, theirs)]
        for name in ("silver", "gold", "causes")
    }
    numbers = [(row.queue, row.seq) for row in ours.bronze.select("queue", "seq").collect()]
    said = {"last": last.events, "again": again.events, "versions": [last.bronze, again.bronze]}
    Path(folder).with_name("verdict.json").write_text(
        json.dumps({**said, "numbers": numbers, "tables": tables})
    )
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
