"""Spark plugin. Spark imports ``pyspark_*`` modules at startup, which registers the format ``penstock``."""

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
