// /// script
// dependencies = ["bullmq@6.7.0", "ioredis@5.11.1"]
// [tool.peers]
// name = "bullmq-node"
// version_of = "bullmq"
// order = 20
// dedups = true
// acknowledges = true
// n = 20000
// pending = [["LLEN", "bull:bench:wait"], ["LLEN", "bull:bench:active"]]
// note = """\
//   addBulk() of 1000; Worker concurrency 100; completed jobs kept (default); call: \
//   job.waitUntilFinished(queueEvents)"""
// ///
import { Queue, QueueEvents, Worker } from 'bullmq'
import * as peer from './peer.mjs'

const connection = { host: peer.HOST, port: peer.PORT }
let q, events

await peer.main({
  async open () {
    q = new Queue(peer.QUEUE, { connection })
    await q.waitUntilReady()
    if (peer.WORKLOAD === 'latency') {
      events = new QueueEvents(peer.QUEUE, { connection })
      await events.waitUntilReady()
    }
  },
  async close () { await events?.close(); await q.close() },
  async enqueueOne (payloads) { for (const p of payloads) await q.add('noop', p) },
  async enqueueBulk (payloads) {
    for (const part of peer.chunks(payloads, peer.opt('batch', 1000))) await q.addBulk(part.map(data => ({ name: 'noop', data })))
  },
  async worker () {
    new Worker(peer.QUEUE, async job => { peer.tick(); return job.data.id }, { connection, concurrency: peer.opt('concurrency', 100) })
    await new Promise(() => {})
  },
  async roundtrip (p) { return await (await q.add('noop', p)).waitUntilFinished(events) }
})
