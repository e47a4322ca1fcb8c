# /// script
# dependencies = ["bullmq==3.4.4", "hiredis==3.5.0", "uvloop==0.23.0"]
# [tool.peers]
# name = "bullmq-py"
# version_of = "bullmq"
# order = 19
# optional = true
# dedups = true
# acknowledges = true
# n = 5000
# pending = [["LLEN", "bull:bench:wait"], ["LLEN", "bull:bench:active"]]
# note = """\
#   addBulk() of 500; Worker(concurrency=20); uvloop; completed jobs kept (default); call: QueueEvents \
#   'completed'"""
# ///
import asyncio
import json

import peer
from bullmq import Queue, Worker

OPTS = {"connection": {"host": peer.HOST, "port": peer.PORT}}


async def noop(job, token):
    peer.tick()
    return job.data["id"]


class Bull(peer.Adapter):
    async def open(self):
        self.q = Queue(peer.QUEUE, OPTS)
        self.waiting = {}
        if peer.RESULTS:
            from bullmq import QueueEvents

            self.events = QueueEvents(peer.QUEUE, OPTS)
            self.events.on("completed", self.completed)
            await asyncio.sleep(1)

    def completed(self, event, *_):
        f = self.waiting.pop(event["jobId"], None)
        value = event["returnvalue"]
        if f and not f.done():
            f.set_result(json.loads(value) if isinstance(value, str) else value)

    async def close(self):
        await self.q.close()

    async def enqueue_one(self, payloads):
        for p in payloads:
            await self.q.add("noop", p)

    async def enqueue_bulk(self, payloads):
        for part in peer.chunks(payloads, peer.opt("batch", 500)):
            await self.q.addBulk([{"name": "noop", "data": p} for p in part])

    async def worker(self):
        self.w = Worker(peer.QUEUE, noop, {**OPTS, "concurrency": peer.opt("concurrency", 20)})
        await asyncio.Event().wait()

    async def roundtrip(self, p):
        jid = f"j{p['id']}"
        f = self.waiting[jid] = asyncio.get_running_loop().create_future()
        await self.q.add("noop", p, {"jobId": jid})
        return await asyncio.wait_for(f, 10)


if __name__ == "__main__":
    peer.main(Bull)
