# /// script
# dependencies = ["saq[redis,hiredis]==0.26.4", "typing_extensions==4.16.0", "uvloop==0.23.0"]
# [tool.peers]
# order = 10
# dedups = true
# acknowledges = true
# n = 5000
# pending = [["ZCARD", "saq:bench:incomplete"]]
# note = "no bulk API: 20 concurrent enqueue(); Worker(concurrency=20); uvloop; result kept 600 s (default)"
# ///
import peer
from saq import Queue, Worker


async def noop(ctx, *, data):
    peer.tick(data)
    return data["id"]


class Saq(peer.Adapter):
    async def open(self):
        self.q = Queue.from_url(peer.URL, name=peer.QUEUE, max_concurrent_ops=peer.opt("width", 20))
        await self.q.connect()

    async def close(self):
        await self.q.disconnect()

    async def enqueue_one(self, payloads):
        for p in payloads:
            await self.q.enqueue("noop", data=p)

    async def enqueue_bulk(self, payloads):
        await peer.concurrently(lambda p: self.q.enqueue("noop", data=p), payloads, peer.opt("width", 20))

    async def worker(self):
        await self.open()
        await Worker(self.q, [noop], concurrency=peer.opt("concurrency", 20)).start()

    async def roundtrip(self, p):
        # Queue.apply() polls (poll_interval, 0.5 s) and sleeps once more after the result is there.
        return await self.q.apply("noop", poll_interval=0.001, data=p)


if __name__ == "__main__":
    peer.main(Saq)
