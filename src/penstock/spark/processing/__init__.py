"""The parts of ``penstock.spark.process``, which runs a task on every row of a table."""
