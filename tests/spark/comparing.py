"""What is wrong with the tables of a history, at any size."""

from __future__ import annotations

from pyspark.sql import DataFrame, functions

from penstock.spark.store import Store

__all__ = ["differences", "events_by_queue"]

_SHOWN = 5


def events_by_queue(url: str, bronze: DataFrame) -> list[str]:
    """What is wrong with the numbers of events: each that the logs have is there once, if nothing was trimmed."""
    counted = bronze.groupBy("queue").agg(
        functions.count("*").alias("rows"),
        functions.countDistinct("seq").alias("numbers"),
        functions.min("seq").alias("least"),
        functions.max("seq").alias("most"),
    )
    found = {row["queue"]: row for row in counted.collect()}
    faults = []
    with Store(url) as store:
        for queue in sorted({*found, *store.run(store.storage.queues())}):
            last = store.run(store.storage.read_entries(queue, after=0, limit=1)).last
            row = found.get(queue)
            numbers = (0, 0, 0, 0) if row is None else tuple(row)[1:]
            if numbers != ((last, last, 1, last) if last else (0, 0, 0, 0)):
                faults.append(f"{queue}: the log ends at {last}, bronze has {numbers}")
    return faults


def differences(ours: DataFrame, theirs: DataFrame) -> list[str]:
    """Some rows that only one of two tables has. Sums of floats depend on the order of their parts: to 9 digits."""
    ours, theirs = _rounded(ours), _rounded(theirs)
    return [
        f"only {whose}: {row}"
        for whose, one, other in (("ours", ours, theirs), ("theirs", theirs, ours))
        for row in one.exceptAll(other).limit(_SHOWN).collect()
    ]


def _rounded(rows: DataFrame) -> DataFrame:
    doubles = [name for name, type in rows.dtypes if type == "double"]
    return rows.withColumns({name: functions.round(name, 9) for name in doubles})
