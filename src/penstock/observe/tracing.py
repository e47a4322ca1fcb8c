"""OpenTelemetry: traces from the enqueue of a job through each of its runs, and metrics of both.

::

    from penstock.observe.tracing import instrument

    instrument(app)     # once per process, in producers and workers; needs penstock[otel]

An enqueue is a span of kind *producer*; its context travels in the job's headers (W3C ``traceparent``). A run is a
child span of kind *consumer*. Each later run is linked to the enqueue, and to the run before it if that was in the same
process. An app that is not instrumented has no overhead.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"penstock.observe.tracing needs {error.name}, which is not installed: pip install 'penstock[otel]'",
        name=error.name,
    ) from None

from penstock.core.job import EMPTY_EXTRAS
from penstock.errors import RateLimited, Snooze, Suspend, WaitForChildren

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import Tracer, TracerProvider

    from penstock.client.app import App
    from penstock.client.middleware import Answers, EnqueueCall, EnqueueNext
    from penstock.core.job import NewJob
    from penstock.worker.context import JobContext
    from penstock.worker.middleware import CallNext


_SYSTEM: Final = "messaging.system"
_DESTINATION: Final = "messaging.destination.name"
_OPERATION: Final = "messaging.operation.type"
_MESSAGE_ID: Final = "messaging.message.id"
_BATCH: Final = "messaging.batch.message_count"
# The number of runs whose spans are remembered, for links from later runs of the same job.
_REMEMBERED: Final = 10_000


def instrument(
    app: App, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> None:
    """Trace and measure the enqueues and runs of ``app``, by default with the global providers."""
    tracer = trace.get_tracer("penstock", tracer_provider=tracer_provider)
    instruments = _Instruments(tracer, metrics.get_meter("penstock", meter_provider=meter_provider))
    app.enqueue_middleware(instruments.trace_enqueue)
    app.middleware(instruments.trace_run)


class _Instruments:
    """The middleware of an app, which traces and measures its enqueues and runs."""

    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self._tracer = tracer
        self._earlier = _EarlierRuns()
        self._enqueued = meter.create_counter(
            "penstock.enqueued", unit="{job}", description="Jobs by answer."
        )
        self._run_time = meter.create_histogram(
            "penstock.run.duration", unit="s", description="How long runs took."
        )
        self._wait_time = meter.create_histogram(
            "penstock.wait.duration", unit="s", description="From the enqueue to the start of the first run."
        )

    async def trace_enqueue(self, call: EnqueueCall, call_next: EnqueueNext) -> Answers:
        """Enqueue the jobs in a span, and send its context in their headers."""
        with self._tracer.start_as_current_span(
            f"enqueue {call.queue}", kind=SpanKind.PRODUCER, attributes=_enqueue_attributes(call)
        ):
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            answers = await call_next(call.each(lambda job: _with_headers(job, carrier)))
        for answer in answers:
            self._enqueued.add(1, {_DESTINATION: call.queue, "penstock.status": answer.status})
        return answers

    async def trace_run(self, context: JobContext, call_next: CallNext) -> Any:
        """Run a job in a child span of its enqueue."""
        parent = propagate.extract(dict(context.headers))
        labels = {_DESTINATION: context.queue, "penstock.task": context.task}
        if context.run == 1:
            self._wait_time.record(max(0.0, time.time() - context.enqueued_at.timestamp()), labels)
        started = time.perf_counter()
        outcome = "returned"
        with self._tracer.start_as_current_span(
            f"run {context.task or context.queue}",
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes=_run_attributes(context),
            links=self._earlier.links(context, parent),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            self._earlier.note(context, span.get_span_context())
            try:
                return await call_next()
            except BaseException as error:
                outcome = _record(span, error)
                raise
            finally:
                run_s = time.perf_counter() - started
                self._run_time.record(run_s, {**labels, "penstock.outcome": outcome})


class _EarlierRuns:
    """The last runs of this process, by job."""

    def __init__(self) -> None:
        self._spans: OrderedDict[tuple[str, str], SpanContext] = OrderedDict()

    def links(self, context: JobContext, parent: Context) -> list[Link]:
        if context.run == 1:
            return []
        enqueue = trace.get_current_span(parent).get_span_context()
        before = self._spans.get((context.queue, context.id))
        return [Link(span) for span in (enqueue, before) if span is not None and span.is_valid]

    def note(self, context: JobContext, span: SpanContext) -> None:
        key = (context.queue, context.id)
        self._spans[key] = span
        self._spans.move_to_end(key)
        if len(self._spans) > _REMEMBERED:
            self._spans.popitem(last=False)


def _with_headers(job: NewJob, carrier: dict[str, str]) -> NewJob:
    extras = job.extras or EMPTY_EXTRAS
    return replace(job, extras=replace(extras, headers={**(extras.headers or {}), **carrier} or None))


def _enqueue_attributes(call: EnqueueCall) -> dict[str, Any]:
    attributes: dict[str, Any] = {_SYSTEM: "penstock", _DESTINATION: call.queue, _OPERATION: "send"}
    if len(call.jobs) == 1:
        attributes[_MESSAGE_ID] = call.jobs[0].id
        attributes["penstock.task"] = call.jobs[0].options.task
    else:
        attributes[_BATCH] = len(call.jobs)
    return attributes


def _run_attributes(context: JobContext) -> dict[str, Any]:
    return {
        _SYSTEM: "penstock",
        _DESTINATION: context.queue,
        _OPERATION: "process",
        _MESSAGE_ID: context.id,
        "penstock.task": context.task,
        "penstock.run": context.run,
        "penstock.failures": context.failures,
    }


def _record(span: Span, error: BaseException) -> str:
    """Record the outcome on the span and return it. A run that is postponed is not an error."""
    match error:
        case Snooze():
            outcome = "snoozed"
        case Suspend() | WaitForChildren():
            outcome = "suspended"
        case RateLimited():
            outcome = "limited"
        case _:
            outcome = "raised"
    if outcome != "raised":
        span.set_attribute("penstock.outcome", outcome)
        return outcome
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
    return outcome
