"""A process with the published Python client in it: reads a JSON request per line, answers with one.

``python published_peer.py HOST PORT PREFIX``. Ends with its standard input. ``published_peer.cjs`` is its twin.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from redis import Redis
from redis_work_queue import Item, KeyPrefix, WorkQueue


class Peer:
    def __init__(self, host: str, port: int, prefix: str) -> None:
        self.db = Redis(host=host, port=port)
        self.queue = WorkQueue(KeyPrefix(prefix))

    def add(self, id: str, data: str) -> None:
        self.queue.add_item(self.db, Item(data, id=id))

    def lease(self, seconds: int) -> list[str] | None:
        item = self.queue.lease(self.db, seconds, block=False)
        return None if item is None else [item.id(), item.data().decode()]

    def lease_and_wait(self, seconds: int, timeout: int) -> list[str] | None:
        item = self.queue.lease(self.db, seconds, block=True, timeout=timeout)
        return None if item is None else [item.id(), item.data().decode()]

    def complete(self, id: str) -> bool:
        return bool(self.queue.complete(self.db, Item(b"", id=id)))

    def light_clean(self) -> None:
        self.queue.light_clean(self.db)

    def lengths(self) -> list[int]:
        return [self.queue.queue_len(self.db), self.queue.processing(self.db)]

    def work(self, seconds: int, stop: str, runs: str) -> list[str]:
        """Until the key ``stop`` is there: lease, count the run in the hash ``runs``, complete.

        Answers with the ids of those it was told it completed.
        """
        done = []
        while not self.db.exists(stop):
            item = self.queue.lease(self.db, seconds, block=False)
            if item is None:
                continue
            # An item without data is none: this client hands out ids of finished items too.
            if item.data():
                self.db.hincrby(runs, item.id(), 1)
            if self.queue.complete(self.db, item) and item.data():
                done.append(item.id())
        return done

    def clean(self, stop: str) -> None:
        while not self.db.exists(stop):
            self.queue.light_clean(self.db)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # the client prints what it does
    peer = Peer(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    for line in sys.stdin:
        verb, args = json.loads(line)
        answer: Any = getattr(peer, verb)(*args)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
