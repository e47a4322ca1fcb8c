"""Found by Spark by its name: makes the format ``penstock`` known in every session that has Penstock installed."""

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
