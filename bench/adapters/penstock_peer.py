# /// script
# dependencies = []
# [tool.peers]
# part = "own"
# extras = ["valkey", "fast"]
# dedups = true
# acknowledges = true
# pending = "adapter"
# [tool.peers.variants.valkey]
# order = 2
# n = 100000
# n_by = {one = 10000}
# note = """\
#   the ordinary worker and client: enqueue_many() of 1000; worker(concurrency=200); uvloop; results \
#   kept 1 h (default); call: call()"""
# [tool.peers.variants.sqlite]
# order = 3
# kind = "sqlite"
# n = 50000
# n_by = {one = 4000}
# note = "as penstock:valkey on a SQLite file with the engine's own durability settings"
# ///
"""Penstock itself, from this checkout's source: the API a user has, nothing made for the benchmark."""

import os

import peer

from penstock import App

URL = (
    f"valkey://{peer.HOST}:{peer.PORT}/0"
    if peer.VARIANT == "valkey"
    else "sqlite:///" + os.path.join(peer.DIR, "penstock.db")
)

app = App(URL)


@app.task(queue=peer.QUEUE)
async def noop(data: dict) -> int:
    peer.tick(data)
    return data["id"]


class Penstock(peer.Adapter):
    async def open(self):
        await self.pending()  # connects, and loads the library or the schema, outside the clock

    async def close(self):
        await app.close()

    async def enqueue_one(self, payloads):
        for p in payloads:
            await noop.enqueue(p)

    async def enqueue_bulk(self, payloads):
        for part in peer.chunks(payloads, peer.opt("batch", 1000)):
            await noop.enqueue_many([noop.job(data=p) for p in part])

    async def worker(self):
        await app.worker(queues=[peer.QUEUE], concurrency=peer.opt("concurrency", 200)).run()

    async def roundtrip(self, payload):
        return await noop.call(payload)

    async def pending(self):
        return (await app.queue(peer.QUEUE).counts()).open


if __name__ == "__main__":
    peer.main(Penstock)
