# /// script
# [tool.peers]
# part = "own"
# extras = ["spark", "cli", "valkey"]
# order = 1
# variants = { sqlite = { kind = "sqlite" }, valkey = { kind = "redis" } }
# note = "`process` on a warm session, with one warm worker process; every result is durable when its row ends"
# ///
import os
import subprocess
import sys

import duel

from penstock import App

app = App(os.environ["DUEL_URL"])


@app.task
async def work(key: int) -> int:
    return await duel.work(key)


class Penstock(duel.Contestant):
    def open(self):
        from penstock.spark import session

        self.spark = session("duel", cores=2)
        module = os.path.splitext(os.path.basename(__file__))[0]
        command = [sys.executable, "-m", "penstock", "worker", f"{module}:app", "-c", str(duel.IN_FLIGHT)]
        self.worker = subprocess.Popen([*command, "--no-live"], stderr=subprocess.DEVNULL)

    def run(self, rows, result):
        from penstock.spark import process

        table = self.spark.read.parquet(str(rows))
        process(table, work, key="key", output=result, progress="none")

    def close(self):
        self.worker.terminate()
        self.worker.wait()
        self.spark.stop()

    def keys(self, result):
        import pyarrow.dataset

        table = pyarrow.dataset.dataset(result, format="parquet").to_table(columns=["key", "penstock_state"])
        return [row["key"] for row in table.to_pylist() if row["penstock_state"] == "completed"]


if __name__ == "__main__":
    from penstock_peer import Penstock as Imported

    duel.main(Imported())
