// A process with the published Node client in it; see published_peer.py, its twin.
// node published_peer.cjs HOST PORT PREFIX [cluster], with the packages on NODE_PATH.

const readline = require('node:readline');
const Redis = require('ioredis');
const {Item, KeyPrefix, WorkQueue} = require('@mevitae/redis-work-queue/dist/WorkQueue.js');

const [host, port, prefix, cluster] = process.argv.slice(2);
const server = {host, port: Number(port)};
const db = cluster ? new Redis.Cluster([server]) : new Redis(server);
const queue = new WorkQueue(new KeyPrefix(prefix));

const told = item => (item === null ? null : [item.id, item.data.toString()]);

const verbs = {
  add: (id, data) => queue.addItem(db, new Item(data, id)).then(() => null),
  lease: async seconds => told(await queue.lease(db, seconds, false)),
  lease_and_wait: async (seconds, timeout) => told(await queue.lease(db, seconds, true, timeout)),
  complete: id => queue.complete(db, new Item('', id)),
  light_clean: () => queue.lightClean(db).then(() => null),
  lengths: async () => [await queue.queueLen(db), await queue.processing(db)],
  work: async (seconds, stop, runs) => {
    const done = [];
    while (!(await db.exists(stop))) {
      const item = await queue.lease(db, seconds, false);
      if (item === null) continue;
      if (item.data.length) await db.hincrby(runs, item.id, 1);
      if ((await queue.complete(db, item)) && item.data.length) done.push(item.id);
    }
    return done;
  },
  clean: async stop => {
    while (!(await db.exists(stop))) await queue.lightClean(db);
    return null;
  },
};

async function main() {
  for await (const line of readline.createInterface({input: process.stdin})) {
    const [verb, args] = JSON.parse(line);
    console.log(JSON.stringify(await verbs[verb](...args)));
  }
  process.exit(0);
}

main();
