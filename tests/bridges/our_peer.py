"""A process with our client in it, for tests that kill it; the same verbs as ``published_peer.py``."""

from __future__ import annotations

import json
import sys
from typing import Any

from redis import Redis

from penstock.bridges.redis_work_queue import Item, WorkQueue


class Peer:
    def __init__(self, host: str, port: int, prefix: str) -> None:
        self.db = Redis(host=host, port=port)
        self.queue = WorkQueue(f"valkey://{host}:{port}", prefix).sync

    def lease(self, seconds: int) -> list[str] | None:
        item = self.queue.lease(seconds, wait=0)
        return None if item is None else [item.id, item.data.decode()]

    def complete(self, id: str) -> bool:
        return self.queue.complete(Item(b"", id))

    def work(self, seconds: int, stop: str, runs: str) -> list[str]:
        done = []
        while not self.db.exists(stop):
            item = self.queue.lease(seconds, wait="50ms")
            if item is None:
                continue
            self.db.hincrby(runs, item.id, 1)
            if self.queue.complete(item):
                done.append(item.id)
        return done

    def clean(self, stop: str) -> None:
        while not self.db.exists(stop):
            self.queue.light_clean(grace="50ms")
            self.queue.deep_clean(grace="50ms")


def main() -> None:
    peer = Peer(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    for line in sys.stdin:
        verb, args = json.loads(line)
        answer: Any = getattr(peer, verb)(*args)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
