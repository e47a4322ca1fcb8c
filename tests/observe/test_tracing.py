"""OpenTelemetry: one trace from the enqueue through all runs, and metrics of both."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock import App, JobContext, RateLimited, Snooze, Suspend, WaitForChildren, chord, current_job
from penstock.observe.tracing import instrument
from tests.worker.conftest import until, working


class Telemetry:
    """What was exported."""

    def __init__(self, app: App) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meters = MeterProvider([self._reader])
        instrument(app, tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self, prefix: str = "") -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith(prefix)]

    def points(self, name: str) -> list[Any]:
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def close(self) -> None:
        self.tracers.shutdown()
        self.meters.shutdown()


@pytest.fixture
def telemetry(memory_app: App) -> Iterator[Telemetry]:
    telemetry = Telemetry(memory_app)
    yield telemetry
    telemetry.close()


def context_of(span: ReadableSpan | None) -> tuple[int, int]:
    assert span is not None
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return (span.parent.trace_id, span.parent.span_id) if span.parent else None


async def test_a_trace_goes_from_the_request_through_the_enqueue_to_the_run(
    memory_app: App, telemetry: Telemetry
) -> None:
    seen: list[int] = []

    @memory_app.task(queue="mail")
    def send(to: str) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    async with working(memory_app):
        with telemetry.tracers.get_tracer("web").start_as_current_span("request"):
            job = await send.options(headers={"mine": "kept"}).enqueue("ada")
        await job.result(timeout="10s")
        await until(lambda: telemetry.spans("run"))
    [request], [enqueue], [run] = (
        telemetry.spans("request"),
        telemetry.spans("enqueue"),
        telemetry.spans("run"),
    )
    assert (parent_of(enqueue), parent_of(run)) == (context_of(request), context_of(enqueue))
    assert (enqueue.kind, run.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert (enqueue.name, run.name) == ("enqueue mail", "run send")
    assert seen == [context_of(run)[1]]
    assert run.attributes is not None
    assert run.attributes["messaging.message.id"] == job.id
    info = await memory_app.queue("mail").get(job.id)
    assert info.headers["mine"] == "kept"


async def test_retries_are_linked_to_the_enqueue_and_to_the_run_before(
    memory_app: App, telemetry: Telemetry
) -> None:
    @memory_app.task(attempts=3, backoff=0)
    async def flaky() -> None:
        if len(telemetry.spans("run")) < 2:
            raise ValueError("not yet")

    async with working(memory_app):
        await flaky.options(wait="10s").call()
        await until(lambda: len(telemetry.spans("run")) == 3)
    [enqueue] = telemetry.spans("enqueue")
    first, second, third = telemetry.spans("run")
    assert {parent_of(run) for run in (first, second, third)} == {context_of(enqueue)}
    linked = [
        [(link.context.trace_id, link.context.span_id) for link in run.links]
        for run in (first, second, third)
    ]
    assert linked == [
        [],
        [context_of(enqueue), context_of(first)],
        [context_of(enqueue), context_of(second)],
    ]
    assert [run.status.status_code for run in (first, second, third)] == [
        StatusCode.ERROR,
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]
    [exception] = first.events
    assert exception.attributes is not None
    assert exception.attributes["exception.message"] == "not yet"


async def test_the_jobs_of_a_flow_are_in_the_trace_of_their_enqueuer(
    memory_app: App, telemetry: Telemetry
) -> None:
    @memory_app.task(queue="pages")
    def fetch(page: str) -> str:
        return page

    @memory_app.task(queue="sums")
    def count(pages: list[str]) -> int:
        return len(pages)

    async with working(memory_app):
        with telemetry.tracers.get_tracer("web").start_as_current_span("request"):
            flow = await chord([fetch.job("a"), fetch.job("b")], count.partial()).enqueue()
        assert await flow.result(timeout="10s") == 2
        await until(lambda: len(telemetry.spans("run")) == 3)
    [request] = telemetry.spans("request")
    traces = {context_of(span)[0] for span in telemetry.spans()}
    assert traces == {context_of(request)[0]}
    assert sorted(span.name for span in telemetry.spans("enqueue")) == ["enqueue pages", "enqueue sums"]


async def test_a_snooze_is_not_an_error(memory_app: App, telemetry: Telemetry) -> None:
    @memory_app.task
    async def later() -> None:
        if not telemetry.spans("run"):
            raise Snooze(0)

    async with working(memory_app):
        await later.options(wait="10s").call()
        await until(lambda: len(telemetry.spans("run")) == 2)
    first = telemetry.spans("run")[0]
    assert (first.status.status_code, first.events) == (StatusCode.UNSET, ())


async def test_a_suspended_run_is_not_an_error(memory_app: App, telemetry: Telemetry) -> None:
    @memory_app.task
    async def ask(context: JobContext) -> None:
        if context.signal is None:
            raise Suspend("answer")

    async with working(memory_app):
        job = await ask.enqueue()
        await job.signal("answer")
        await job.result(timeout="10s")
        await until(lambda: len(telemetry.spans("run")) == 2)
    first = telemetry.spans("run")[0]
    assert first.status.status_code is StatusCode.UNSET
    assert first.attributes
    assert first.attributes["penstock.outcome"] == "suspended"


async def test_waiting_for_children_or_a_rate_limit_is_not_an_error(
    memory_app: App, telemetry: Telemetry
) -> None:
    @memory_app.task
    async def child() -> None:
        if current_job().run == 1:
            raise RateLimited("10ms")

    @memory_app.task
    async def parent(context: JobContext) -> None:
        if not await context.children():
            await context.add_children([child.job()])
            raise WaitForChildren

    async with working(memory_app):
        job = await parent.enqueue()
        await job.result(timeout="10s")
        await until(lambda: len(telemetry.spans("run")) == 4)
    runs = telemetry.spans("run")
    assert {run.status.status_code for run in runs} == {StatusCode.UNSET}
    outcomes = [run.attributes["penstock.outcome"] for run in runs[:2] if run.attributes]
    assert outcomes == ["suspended", "limited"]


def test_without_opentelemetry_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "try:\n    import penstock.observe.tracing\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'penstock[otel]'" in done.stdout


async def test_many_jobs_of_one_call_share_its_span(memory_app: App, telemetry: Telemetry) -> None:
    @memory_app.task
    async def one(n: int) -> None: ...

    async with working(memory_app):
        handles = await one.enqueue_many([one.job(1), one.job(2)])
        for handle in handles:
            await handle.result(timeout="10s")
        await until(lambda: len(telemetry.spans("run")) == 2)
    [enqueue] = telemetry.spans("enqueue")
    assert enqueue.attributes is not None
    assert enqueue.attributes["messaging.batch.message_count"] == 2
    assert {parent_of(run) for run in telemetry.spans("run")} == {context_of(enqueue)}


async def test_metrics_count_answers_and_measure_runs(memory_app: App, telemetry: Telemetry) -> None:
    @memory_app.task(queue="mail", attempts=1)
    async def send(fails: bool) -> None:
        if fails:
            raise ValueError

    async with working(memory_app) as worker:
        await send.options(id="same", delay="1h").enqueue(False)
        await send.options(id="same").enqueue(False)
        await send.enqueue(False)
        await send.enqueue(True)
        await until(lambda: worker.stats.completed == 1 and worker.stats.failed == 1)
    answers = {
        point.attributes["penstock.status"]: point.value for point in telemetry.points("penstock.enqueued")
    }
    assert answers == {"queued": 3, "duplicate": 1}
    runs = {
        point.attributes["penstock.outcome"]: point.count
        for point in telemetry.points("penstock.run.duration")
    }
    assert runs == {"returned": 1, "raised": 1}
    assert sum(point.count for point in telemetry.points("penstock.wait.duration")) == 2


def test_enqueueing_from_sync_code_keeps_the_callers_trace() -> None:
    app = App("memory://")
    telemetry = Telemetry(app)

    @app.task
    def work() -> None: ...

    with telemetry.tracers.get_tracer("web").start_as_current_span("request"):
        work.sync.enqueue()
    [request], [enqueue] = telemetry.spans("request"), telemetry.spans("enqueue")
    assert parent_of(enqueue) == context_of(request)
    app.sync.close()
    telemetry.close()
