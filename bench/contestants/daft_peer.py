# /// script
# dependencies = ["daft==0.7.26"]
# [tool.peers]
# order = 10
# note = "an async `@daft.cls`, `write_parquet`. Its max_concurrency does not bound the calls, so a semaphore does"
# ///
import asyncio

import daft
import duel


@daft.cls
class Work:
    def __init__(self):
        self.places = asyncio.Semaphore(duel.IN_FLIGHT)

    async def __call__(self, key: int) -> int:
        async with self.places:
            return await duel.work(key)


class Daft(duel.Contestant):
    def run(self, rows, result):
        table = daft.read_parquet(str(rows))
        table.with_column("value", Work()(table["key"])).write_parquet(str(result), write_mode="overwrite")


if __name__ == "__main__":
    duel.main(Daft())
