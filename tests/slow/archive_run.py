"""A call of ``archive`` that may be killed: ``python -m tests.slow.archive_run URL QUEUE OUTPUT``."""

from __future__ import annotations

import sys

import penstock.spark as ps
from tests.slow.drivers import say_ready
from tests.spark.quick import QUICK


def main(url: str, queue: str, output: str) -> None:
    spark = ps.session("killed", cores=2, memory="1g", config=QUICK)
    say_ready(spark)
    ps.archive(spark, url, queue, output, older_than=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
