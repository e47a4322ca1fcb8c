# /// script
# dependencies = [
#   "taskiq==0.13.0", "taskiq-redis==1.2.4", "hiredis==3.5.0", "uvloop==0.23.0", "orjson==3.13.0",
# ]
# [tool.peers]
# order = 13
# n = 8000
# [tool.peers.variants.list]
# pending = [["LLEN", "taskiq"]]
# note = """\
#   ListQueueBroker (BRPOP: NOT crash-safe); no bulk API: 20 concurrent kiq(); 1 receiver, \
#   max_async_tasks=100, prefetch 100; no result backend by default (call: RedisAsyncResultBackend, \
#   wait_result poll 1 ms)"""
# [tool.peers.variants.stream]
# acknowledges = true
# pending = [["XPENDING", "taskiq", "taskiq"]]
# note = "RedisStreamBroker (acknowledged); otherwise as list"
# ///
import peer
from taskiq.api import run_receiver_task
from taskiq.serializers import ORJSONSerializer
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend, RedisStreamBroker

if peer.VARIANT == "stream":
    broker = RedisStreamBroker(peer.URL, consumer_id="0", xread_count=peer.opt("count", 100))
else:
    broker = ListQueueBroker(peer.URL)
broker = broker.with_serializer(ORJSONSerializer())
if peer.RESULTS:
    broker = broker.with_result_backend(RedisAsyncResultBackend(peer.URL, result_ex_time=600))


@broker.task(task_name="noop")
async def noop(data: dict) -> int:
    peer.tick()
    return data["id"]


class Taskiq(peer.Adapter):
    async def open(self):
        await broker.startup()

    async def close(self):
        await broker.shutdown()

    async def enqueue_one(self, payloads):
        for p in payloads:
            await noop.kiq(p)

    async def enqueue_bulk(self, payloads):
        await peer.concurrently(noop.kiq, payloads, peer.opt("width", 20))

    async def worker(self):
        await run_receiver_task(
            broker,
            run_startup=True,
            max_async_tasks=peer.opt("concurrency", 100),
            max_prefetch=peer.opt("prefetch", 100),
        )

    async def roundtrip(self, p):
        task = await noop.kiq(p)
        return (await task.wait_result(check_interval=0.001, timeout=5)).return_value


if __name__ == "__main__":
    peer.main(Taskiq)
