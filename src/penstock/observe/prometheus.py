"""The Prometheus metrics of a worker: its counts, run times, and the state of its queues.

Counters and gauges are read on each scrape; only the histogram of run times observes each run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.lifecycle import State
from penstock.core.text import get_logger

if TYPE_CHECKING:
    from penstock.storage.values import Counts
    from penstock.worker.events import WorkerEvent
    from penstock.worker.worker import Worker


logger = get_logger("penstock.observe")

RUN_OUTCOMES: Final = ("completed", "failed", "retrying", "snoozed", "released", "cancelled", "stalled")
_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_STORE_TIMEOUT_S: Final = 2.0


def exposition(worker: Worker) -> Callable[[], tuple[bytes, str]]:
    """Return a function that returns the text for Prometheus and its content type.

    Call this on the worker's loop. Any thread may call the returned function.
    """
    registry = CollectorRegistry()
    registry.register(_WorkerCollector(worker, asyncio.get_running_loop()))
    _observe_runs(worker, registry)
    return lambda: (generate_latest(registry), CONTENT_TYPE_LATEST)


def _observe_runs(worker: Worker, registry: CollectorRegistry) -> None:
    run_seconds = Histogram(
        "penstock_run_seconds",
        "How long runs took, from the claim to their accepted outcome.",
        ("queue", "task", "outcome"),
        registry=registry,
        buckets=_BUCKETS_S,
    )

    def observe(event: WorkerEvent) -> None:
        run_seconds.labels(event.queue, event.task, event.type).observe(event.run_ms / 1000)

    for outcome in RUN_OUTCOMES:
        worker.on(outcome, observe)


class _WorkerCollector(Collector):
    """Reads the worker's counts and, through its loop, those of its queues."""

    def __init__(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        self._worker = worker
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because otherwise registering would query the store."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics except the histogram."""
        yield from self._of_worker()
        counts = self._counts()
        yield GaugeMetricFamily(
            "penstock_store_up", "Whether the store answered just now.", value=float(counts is not None)
        )
        if counts is not None:
            yield from _of_queues(counts)

    def _of_worker(self) -> Iterable[Metric]:
        health, stats = self._worker.health(), self._worker.stats
        runs = CounterMetricFamily("penstock_worker_runs", "Runs by outcome.", labels=("outcome",))
        for outcome, count in msgspec.structs.asdict(stats).items():
            if outcome in RUN_OUTCOMES:
                runs.add_metric((outcome,), count)
        yield runs
        yield CounterMetricFamily("penstock_worker_claimed", "Jobs claimed.", value=stats.claimed)
        yield CounterMetricFamily(
            "penstock_worker_errors", "Errors of the worker itself.", value=stats.errors
        )
        for name, help_text, value in (
            ("active", "Jobs that occupy a slot.", len(health.active)),
            ("stuck", "Active jobs that are settled although their handler still runs.", health.stuck),
            ("concurrency", "Maximum number of jobs that run at a time.", health.concurrency),
            ("consuming", "Whether the worker takes jobs.", health.consuming),
            ("heartbeat_age_seconds", "Time since the last heartbeat.", health.last_heartbeat_age_s),
        ):
            yield GaugeMetricFamily(f"penstock_worker_{name}", help_text, value=float(value))

    def _counts(self) -> dict[str, Counts] | None:
        future = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        try:
            return future.result(_STORE_TIMEOUT_S)
        except Exception as error:
            future.cancel()
            logger.debug("the queues could not be counted: %s", error)
            return None

    async def _ask(self) -> dict[str, Counts]:
        storage = await self._worker.app.connect()
        names = list(self._worker.options.queues)
        return dict(zip(names, await asyncio.gather(*map(storage.counts, names)), strict=True))


def _of_queues(counts: dict[str, Counts]) -> Iterable[Metric]:
    jobs = GaugeMetricFamily("penstock_queue_jobs", "Jobs by state.", labels=("queue", "state"))
    oldest = GaugeMetricFamily(
        "penstock_queue_oldest_waiting_seconds",
        "How long the next job in line has waited.",
        labels=("queue",),
    )
    paused = GaugeMetricFamily("penstock_queue_paused", "Whether the queue is paused.", labels=("queue",))
    for queue, count in counts.items():
        for state in State:
            jobs.add_metric((queue, state.value), getattr(count, state.value))
        oldest.add_metric((queue,), count.oldest_waiting_ms / 1000)
        paused.add_metric((queue,), float(count.paused))
    yield from (jobs, oldest, paused)
