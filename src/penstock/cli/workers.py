"""``penstock workers``: the workers of a store, each with its newest record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.output import print_json, print_table, span
from penstock.cli.parameters import command, json_option, queue_option
from penstock.cli.settings import Settings
from penstock.client.situation import SEEN_LATELY_MS, worker_command

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.info import WorkerInfo

_COLUMNS: Final = ("worker", "host", "pid", "state", "queues", "running", "seen")
_GONE: Final = ("dead", "silent")


async def read_workers(app: App, queue: str | None) -> list[dict[str, Any]]:
    """Return the workers of one queue or of all, each once with its newest record, the most recently seen first.

    Workers of queues that never had a job are included.
    """
    found: dict[str, dict[str, Any]] = {}
    attended = await (await app.connect()).attended() if queue is None else []
    for name in sorted({*await queues_of(app, queue), *attended}):
        for worker in await app.queue(name).workers():
            if worker.id in found and found[worker.id]["seen_ms_ago"] <= worker.raw.age_ms:
                continue
            info = worker.info
            found[worker.id] = {
                "worker": worker.id,
                "host": worker.host,
                "pid": worker.pid,
                "state": _state_of(worker),
                "queues": list(info.get("queues", ())),
                "active": info.get("active", 0),
                "concurrency": info.get("concurrency", 0),
                "running": info.get("running", []),
                "unknown": list(info.get("unknown", ())),
                "seen_ms_ago": worker.raw.age_ms,
            }
    return sorted(found.values(), key=lambda worker: worker["seen_ms_ago"])


def _state_of(worker: WorkerInfo) -> str:
    """Return the state that the worker reported; ``dead`` if it has died, ``silent`` if it has not been seen lately."""
    if worker.dead:
        return "dead"
    return str(worker.info.get("state", "")) if worker.raw.age_ms < SEEN_LATELY_MS else "silent"


@command("workers")
@queue_option
@json_option
def workers(settings: Settings, *, queue: str | None, as_json: bool) -> None:
    """List the workers of the store, on all machines, as of their last heartbeat."""
    records = run_with_app(settings, lambda app: read_workers(app, queue))
    if as_json:
        print_json(records)
        return
    rows = [
        (
            worker["worker"],
            worker["host"],
            worker["pid"],
            worker["state"],
            " ".join(worker["queues"]),
            "-" if worker["state"] in _GONE else f"{worker['active']}/{worker['concurrency']}",
            f"{span(worker['seen_ms_ago'])} ago",
        )
        for worker in records
    ]
    empty = f"no worker runs: {worker_command()} starts one"
    print_table(_COLUMNS, rows, empty=empty, spare=("host", "pid", "seen", "queues"))
