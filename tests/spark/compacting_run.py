"""A driver that is killed while it puts files together: ``python -m tests.spark.compacting_run OUTPUT CHANGE``.

It dies at the given change of the file system (a rename, counted from 1) that has to do with a fold.
"""

from __future__ import annotations

import os
import signal
import sys

from penstock.spark import compaction
from tests.spark.quick import QUICK


def main() -> None:
    import penstock.spark as ps
    from tests.slow.drivers import say_ready
    from tests.spark.table_tasks import double

    output, last = sys.argv[1], int(sys.argv[2])
    compaction._MANY = 2  # type: ignore[misc]
    spark = ps.session("compacting", cores=2, memory="1g", config=QUICK)
    say_ready(spark)
    seen = 0

    def count(event: str, given: tuple[object, ...]) -> None:
        nonlocal seen
        if event == "os.rename" and compaction.FOLDS in str(given[0]):
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    for number in range(1, 5):
        rows = spark.range(number).selectExpr("concat('k', id) AS k", "id AS n")
        ps.process(rows, double, key="k", output=output, workers=1, progress="none")


if __name__ == "__main__":
    main()
