"""The tables of a history as DataFrames."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession

from penstock.spark.history.events import listed_events
from penstock.spark.history.folder import open_history
from penstock.spark.history.gold import gold_rows
from penstock.spark.history.silver import silver_rows

__all__ = ["Tables", "tables"]


class Tables(NamedTuple):
    """``bronze``: events. ``silver``: jobs. ``gold``: measures by period and name. ``causes``: failures by class."""

    bronze: DataFrame
    silver: DataFrame
    gold: DataFrame
    causes: DataFrame


def tables(spark: SparkSession, path: str | Path) -> Tables:
    """The newest version of each. They stay readable for an hour after a sync has replaced them.

    Raises:
        InvalidOption: the folder holds no history.
    """
    history = open_history(path, create=False)
    bronze, silver, gold = history.bronze.newest(), history.silver.newest(), history.gold.newest()
    return Tables(
        bronze=listed_events(spark, history, bronze, bronze.files).drop("place"),
        silver=silver_rows(spark, history, silver),
        gold=gold_rows(spark, history, gold, "metrics"),
        causes=gold_rows(spark, history, gold, "causes"),
    )
