"""A driver whose fleet works until it is killed."""

from __future__ import annotations

import threading

import penstock.spark as ps
from tests.slow.spark_tasks import app
from tests.spark.quick import QUICK


def main() -> None:
    spark = ps.session("killed", cores=2, memory="1g", config=QUICK)
    ps.fleet(spark, app, queues=["worked"], size=2, until_drained=False, concurrency=5, lease="3s")
    threading.Event().wait()


if __name__ == "__main__":
    main()
