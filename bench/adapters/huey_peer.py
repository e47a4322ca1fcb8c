# /// script
# dependencies = ["huey==3.5.4", "redis==8.1.0", "hiredis==3.5.0"]
# [tool.peers]
# order = 17
# [tool.peers.variants.redis]
# n = 8000
# pending = [["LLEN", "huey.redis.bench"]]
# note = """\
#   RedisHuey (BRPOP: NOT crash-safe); no bulk API; consumer with 2 threads (best of 1, 2, 4); results \
#   stored (default); call: notify_result=True"""
# [tool.peers.variants.sqlite]
# kind = "sqlite"
# n = 4000
# pending = [["SQL", "huey.db", "select count(*) from task"]]
# note = """\
#   SqliteHuey, WAL, synchronous=FULL (library default: pragma left alone); consumer with 1 thread, \
#   delay 0.01 s; results stored"""
# ///
import os

import peer

if peer.VARIANT == "sqlite":
    from huey import SqliteHuey

    huey = SqliteHuey(peer.QUEUE, filename=os.path.join(peer.DIR, "huey.db"))
else:
    from huey import RedisHuey

    huey = RedisHuey(peer.QUEUE, port=peer.PORT, notify_result=peer.RESULTS)


@huey.task(name="noop")
def noop(data):
    peer.tick()
    return data["id"]


class Huey(peer.Adapter):
    def enqueue_one(self, payloads):
        for p in payloads:
            noop(p)

    def worker(self):
        huey.create_consumer(
            workers=peer.opt("concurrency", 1 if peer.VARIANT == "sqlite" else 2),
            worker_type="thread",
            initial_delay=0.01,
            max_delay=0.01,
            periodic=False,
        ).run()

    def roundtrip(self, p):
        return noop(p).get(blocking=True, timeout=10, backoff=1, max_delay=0.002)


if __name__ == "__main__":
    peer.main(Huey)
