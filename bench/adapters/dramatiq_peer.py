# /// script
# dependencies = ["dramatiq[redis]==2.2.1", "hiredis==3.5.0"]
# [tool.peers]
# order = 15
# acknowledges = true
# n = 6000
# pending = [["HLEN", "dramatiq:bench.msgs"]]
# env = {dramatiq_queue_prefetch = 256}
# note = """\
#   no bulk API; one process of 4 threads (-p 1 -t 4; 1, 4, 8 are within noise), queue prefetch 256; \
#   default middleware; no results by default (call: Results(RedisBackend))"""
# ///
import time

import dramatiq
import peer
from dramatiq.brokers.redis import RedisBroker

broker = RedisBroker(url=peer.URL)
if peer.RESULTS:
    from dramatiq.results import Results
    from dramatiq.results.backends import RedisBackend

    broker.add_middleware(Results(backend=RedisBackend(url=peer.URL), store_results=True))
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name=peer.QUEUE)
def noop(data):
    peer.tick()
    return data["id"] if peer.RESULTS else None


class Dramatiq(peer.Adapter):
    def enqueue_one(self, payloads):
        for p in payloads:
            noop.send(p)

    def worker(self):
        worker = dramatiq.Worker(broker, worker_threads=peer.opt("concurrency", 4))
        worker.start()
        while True:
            time.sleep(1)

    def roundtrip(self, p):
        return noop.send(p).get_result(block=True, timeout=10000)


if __name__ == "__main__":
    peer.main(Dramatiq)
