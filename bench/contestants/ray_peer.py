# /// script
# dependencies = ["ray[data]==2.60.0", "pyarrow==26.0.1"]
# [tool.peers]
# order = 30
# note = "a warm local cluster on 2 cores; one actor with an async method, batches of as many rows as are in flight"
# ///
import duel
import ray


class Work:
    async def __call__(self, batch):
        keys = batch["key"].tolist()
        yield {"key": keys, "value": await duel.answers(keys)}


class RayData(duel.Contestant):
    def open(self):
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False

    def run(self, rows, result):
        table = ray.data.read_parquet(str(rows))
        done = table.map_batches(Work, batch_size=duel.IN_FLIGHT, concurrency=1)
        done.write_parquet(str(result), mode="overwrite")

    def close(self):
        ray.shutdown()


if __name__ == "__main__":
    duel.main(RayData())
