# /// script
# dependencies = ["litequeue==0.9"]
# [tool.peers]
# order = 31
# acknowledges = true
# kind = "sqlite"
# n = 10000
# skip = ["latency"]
# pending = [["SQL", "q.db", "select count(*) from Queue where status < 2"]]
# note = """\
#   SQLite WAL, synchronous=NORMAL (its default); bulk: put() inside one transaction() per 1000; \
#   pop()/done() loop, 1 ms sleep when empty; has no results"""
# ///
import json
import os
import time

import peer
from litequeue import LiteQueue


class Lite(peer.Adapter):
    def open(self):
        self.q = LiteQueue(os.path.join(peer.DIR, "q.db"), timeout=30)

    def enqueue_one(self, payloads):
        for p in payloads:
            self.q.put(peer.dumps(p).decode())

    def enqueue_bulk(self, payloads):
        for part in peer.chunks(payloads, 1000):
            with self.q.transaction():
                for p in part:
                    self.q.put(peer.dumps(p).decode())

    def worker(self):
        self.open()
        while True:
            m = self.q.pop()
            if m is None:
                time.sleep(0.001)
                continue
            peer.tick(json.loads(m.data))
            self.q.done(m.message_id)


if __name__ == "__main__":
    peer.main(Lite)
