# /// script
# [tool.peers]
# name = "mapInPandas"
# part = "own"
# extras = ["spark"]
# order = 20
# version_of = "pyspark"
# note = "a warm session on 2 cores; each partition runs asyncio with its share in flight"
# ///
import asyncio

import duel

CORES = 2


def partition(frames):
    for frame in frames:
        values = asyncio.run(duel.answers(frame["key"].tolist(), duel.IN_FLIGHT // CORES))
        yield frame[["key"]].assign(value=values)


class MapInPandas(duel.Contestant):
    def open(self):
        from penstock.spark import session

        self.spark = session("duel", cores=CORES)

    def run(self, rows, result):
        table = self.spark.read.parquet(str(rows)).repartition(CORES)
        done = table.mapInPandas(partition, "key long, value long")
        done.write.mode("overwrite").parquet(str(result))

    def close(self):
        self.spark.stop()


if __name__ == "__main__":
    duel.main(MapInPandas())
