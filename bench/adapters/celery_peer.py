# /// script
# dependencies = ["celery[redis]==5.7.0", "hiredis==3.5.0"]
# [tool.peers]
# order = 14
# acknowledges = true
# pending = [["LLEN", "bench"], ["HLEN", "unacked"]]
# [tool.peers.variants.prefork]
# n = 4000
# note = """\
#   redis broker; no bulk API (one producer connection re-used); worker -P prefork -c 2, acks_late, \
#   prefetch x64, no gossip/mingle/heartbeat; no result backend by default (call: redis backend)"""
# [tool.peers.variants.threads]
# optional = true
# n = 4000
# note = "as prefork with -P threads -c 2 (1, 2, 8 are within noise)"
# ///
import peer
from celery import Celery

app = Celery("bench", broker=peer.URL, backend=peer.URL if peer.RESULTS else None)
app.conf.update(
    task_default_queue=peer.QUEUE,
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    task_acks_late=True,
    worker_prefetch_multiplier=peer.opt("prefetch", 64),
    task_reject_on_worker_lost=True,
    worker_send_task_events=False,
    task_send_sent_event=False,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
    result_expires=600,
)
mp = peer.VARIANT == "prefork"


@app.task(name="noop")
def noop(data):
    (peer.tick_mp if mp else peer.tick)()
    return data["id"]


class CeleryPeer(peer.Adapter):
    def open(self):
        self.producer = app.producer_pool.acquire(block=True)
        app.connection_for_write().ensure_connection()

    def enqueue_one(self, payloads):
        for p in payloads:
            noop.delay(p)

    def enqueue_bulk(self, payloads):
        for p in payloads:
            noop.apply_async((p,), producer=self.producer)

    def worker(self):
        app.worker_main(
            [
                "worker",
                "-P",
                peer.VARIANT,
                "-c",
                str(peer.opt("concurrency", 2)),
                "-l",
                "ERROR",
                "--without-gossip",
                "--without-mingle",
                "--without-heartbeat",
            ]
        )

    def roundtrip(self, p):
        return noop.apply_async((p,)).get(timeout=10)


if __name__ == "__main__":
    peer.main(CeleryPeer)
