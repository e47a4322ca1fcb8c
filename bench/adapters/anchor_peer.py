# /// script
# dependencies = ["redis==8.1.0", "hiredis==3.5.0"]
# [tool.peers]
# name = "anchor:fcall"
# version_of = "redis"
# part = "anchor"
# order = 1
# n = 100000
# n_by = {one = 10000}
# skip = ["latency"]
# pending = [["LLEN", "wait"], ["ZCARD", "busy"], ["HLEN", "jobs"]]
# note = """\
#   not a queue, the limit: redis-py, one FCALL per 1000 jobs: add (INCRBY, HSET, RPUSH), take (LPOP \
#   n, HMGET, ZADD deadline), done (ZREM, HDEL)"""
# ///
"""The ceiling on this machine: the least a reliable queue has to do, batched, with no queue around it."""

import json
import time

import peer
from redis import Redis

BATCH = peer.opt("batch", 1000)
LIB = """#!lua name=anchor
redis.register_function('anchor_add', function(keys, args)
  local n = #args
  local id = redis.call('INCRBY', keys[1], n) - n
  local kv, ids = {}, {}
  for i = 1, n do
    id = id + 1
    ids[i] = id
    kv[2 * i - 1] = id
    kv[2 * i] = args[i]
  end
  redis.call('HSET', keys[3], unpack(kv))
  redis.call('RPUSH', keys[2], unpack(ids))
  return id
end)
redis.register_function('anchor_take', function(keys, args)
  local ids = redis.call('LPOP', keys[1], args[1])
  if not ids then return {} end
  local z = {}
  for i, id in ipairs(ids) do
    z[2 * i - 1] = args[2]
    z[2 * i] = id
  end
  redis.call('ZADD', keys[2], unpack(z))
  return {ids, redis.call('HMGET', keys[3], unpack(ids))}
end)
redis.register_function('anchor_done', function(keys, args)
  redis.call('HDEL', keys[2], unpack(args))
  return redis.call('ZREM', keys[1], unpack(args))
end)
"""


class Fcall(peer.Adapter):
    def open(self):
        self.db = Redis(port=peer.PORT)
        self.db.function_load(LIB, replace=True)

    def enqueue_one(self, payloads):
        for p in payloads:
            self.db.fcall("anchor_add", 3, "seq", "wait", "jobs", peer.dumps(p))

    def enqueue_bulk(self, payloads):
        for part in peer.chunks(payloads, BATCH):
            self.db.fcall("anchor_add", 3, "seq", "wait", "jobs", *map(peer.dumps, part))

    def worker(self):
        self.open()
        while True:
            got = self.db.fcall("anchor_take", 3, "wait", "busy", "jobs", BATCH, time.time() + 60)
            if not got:
                time.sleep(0.001)
                continue
            for raw in got[1]:
                peer.tick(json.loads(raw))
            self.db.fcall("anchor_done", 2, "busy", "jobs", *got[0])


if __name__ == "__main__":
    peer.main(Fcall)
