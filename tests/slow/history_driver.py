"""What the kills of the history's test are for: syncs until it is killed, or, to check, to the end and from scratch.

``python -m tests.slow.history_driver URL FOLDER EVENTS sync|verify``: a sync takes at most EVENTS.
"""

from __future__ import annotations

import json
import sys

from penstock.spark import history, session
from tests.slow.drivers import say_ready
from tests.spark.comparing import differences, events_by_queue
from tests.spark.quick import QUICK


def main(url: str, folder: str, events: str, mode: str) -> None:
    is_many = int(events) > 1000
    # Over a few rows, compiling code takes longer than going without.
    spark = session("kills", cores=1, memory="1g", config={} if is_many else QUICK)
    say_ready(spark)
    while mode == "sync":
        print(history.sync(url, folder, spark=spark, max_events=int(events)), flush=True)
    last = history.sync(url, folder, spark=spark)
    again = history.sync(url, folder, spark=spark)
    history.sync(url, f"{folder}-scratch", spark=spark)
    ours, theirs = (history.tables(spark, path) for path in (folder, f"{folder}-scratch"))
    faults = events_by_queue(url, ours.bronze)
    for name in ("silver", "gold", "causes"):
        faults += [f"{name}: {row}" for row in differences(getattr(ours, name), getattr(theirs, name))]
    verdict = {"faults": faults, "again": again.events, "versions": [last.bronze, again.bronze]}
    print("verdict", json.dumps(verdict), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
