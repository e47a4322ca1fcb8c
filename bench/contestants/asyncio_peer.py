# /// script
# dependencies = ["pyarrow==26.0.1"]
# [tool.peers]
# order = 0
# part = "anchor"
# note = "reads the file, runs a task per place in flight, writes the file at the end"
# ///
import asyncio

import duel
import pyarrow as pa
import pyarrow.parquet as pq


class Asyncio(duel.Contestant):
    def run(self, rows, result):
        keys = pq.read_table(rows, columns=["key"])["key"].to_pylist()
        table = pa.table({"key": keys, "value": asyncio.run(duel.answers(keys))})
        result.mkdir(exist_ok=True)
        pq.write_table(table, result / "part.parquet")


if __name__ == "__main__":
    duel.main(Asyncio())
