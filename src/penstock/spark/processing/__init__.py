"""A table in, a table out: what ``penstock.spark.process`` is made of."""
