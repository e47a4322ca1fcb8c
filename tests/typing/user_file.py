"""A user's file with planted mistakes. Type checkers must report every line with a comment that begins with "wrong".

It is never run, and the project's own mypy run leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from penstock import (
    App,
    Dag,
    Dedup,
    Flow,
    JobContext,
    JobHandle,
    JobSpec,
    Middleware,
    SchedulerInfo,
    State,
    Task,
    TaskOptions,
    Unique,
    WorkerOptions,
    chain,
    chord,
    group,
)


@dataclass
class Order:
    number: int
    total: float


app = App("memory://")


@app.task
async def send(to: str, template: str = "hello", *, copies: int = 1) -> int:
    return len(to) + copies


@app.task(queue="numbers", attempts=5)
def add(x: int, y: int) -> int:
    return x + y


@app.task(queue="numbers")
async def total(numbers: list[int]) -> float:
    return float(sum(numbers))


@app.task
async def ship(context: JobContext, order: Order) -> str:
    return f"{context.id}: {order.number}"


@app.task(queue="numbers", timeout="5s")
def report(context: JobContext, month: str) -> list[str]:
    return [context.id, month]


@app.task(batch=50)
async def embed(texts: list[str]) -> list[float]:
    return [0.5 for _ in texts]


@app.task
async def tidy() -> None: ...


@app.task
async def store(payload: dict[str, Any], table: str) -> dict[str, Any]:
    return {**payload, "table": table}


@app.task
async def anything(payload: Any, table: str) -> int:
    return 1


# Async code


async def correct_calls() -> None:
    job = await send.enqueue("ada@example.org", template="bye", copies=2)
    assert_type(job, JobHandle[int])
    assert_type(await job.result(timeout="5s"), int)
    assert_type(await send.call("ada@example.org"), int)
    assert_type(await send.options(wait="5s", id="a", attempts=3).call(to="ada@example.org"), int)
    assert_type(await add.enqueue(1, y=2), JobHandle[int])
    assert_type(await ship.enqueue(Order(1, 2.5)), JobHandle[str])
    assert_type(await report.options(queue="other").enqueue("may"), JobHandle[list[str]])
    assert_type(await embed.enqueue("one text"), JobHandle[float])
    assert_type(await tidy.options(delay="5m", priority=-1).enqueue(), JobHandle[None])
    await tidy.options(delay=None, run_at=None, group=None, headers=None).enqueue()
    assert_type(await store.call({"a": 1}, "orders"), dict[str, Any])
    assert_type(send.job("ada"), JobSpec[int])
    assert_type(
        await send.enqueue_many([send.job("ada"), send.options(id="b").job("bob")]), list[JobHandle[int]]
    )
    await anything.enqueue(payload=3, table="t")
    often = report.options(cron="0 3 * * *", tz="Europe/Berlin", priority=-1)
    assert_type(await often.schedule("nightly", "may"), SchedulerInfo)
    assert_type(await send.options(every="1h", wait=None).schedule("hourly", "ada", copies=2), SchedulerInfo)


async def wrong_calls() -> None:
    often_wrong = report.options(every="1h")
    await send.enqueue(5)  # wrong: type
    await send.enqueue()  # wrong: missing
    await send.enqueue("ada", "hello", 2)  # wrong: surplus
    await send.enqueue("ada", template=None)  # wrong: type
    await send.enqueue("ada", tempalte="bye")  # wrong: misspelt
    await send.enqueue("ada", id="a")  # wrong: an option among the arguments
    await send.call(5)  # wrong: type
    await send.call("ada", timeout="5s")  # wrong: an option among the arguments
    await send.options(id="a").enqueue(5)  # wrong: type
    await send.options(wait="5s").call()  # wrong: missing
    await add.enqueue("1", 2)  # wrong: type
    await add.enqueue(1)  # wrong: missing
    await ship.enqueue("order")  # wrong: type
    await ship.enqueue()  # wrong: missing
    await report.enqueue("may", "june")  # wrong: surplus
    await embed.enqueue(["one", "two"])  # wrong: type
    await store.enqueue({}, 5)  # wrong: type
    await often_wrong.schedule("nightly", 5)  # wrong: type
    await often_wrong.schedule("nightly")  # wrong: missing
    await often_wrong.schedule(5, "may")  # wrong: the name
    await report.schedule("nightly", "may", cron="@daily")  # wrong: an option among the arguments
    report.options(every=["1h"])  # wrong: type
    report.options(missed="later")  # wrong: value
    send.job(5)  # wrong: type
    send.job("ada", cpoies=3)  # wrong: misspelt
    await send.enqueue_many([("ada",)])  # wrong: a tuple
    await send.enqueue_many([{"to": "ada"}])  # wrong: a dict
    await send.enqueue_many([send.job("ada"), send.job(5)])  # wrong: type
    await total.enqueue_many([ship.job(Order(1, 2.5))])  # wrong: jobs of another result
    await send.delay("ada")  # wrong: a method of other queues
    send.options(delay="5m").apply_async("ada")  # wrong: a method of other queues


async def wrong_results() -> None:
    job = await send.enqueue("ada")
    text: str = await job.result()  # wrong: result type
    other: str = await send.call("ada")  # wrong: result type
    handles: list[JobHandle[str]] = await send.enqueue_many([send.job("ada")])  # wrong: result type
    print(text, other, handles)


async def wrong_options() -> None:
    send.options(dely="5m")  # wrong: misspelt
    send.options(attempts="3")  # wrong: type
    send.options(id=7)  # wrong: type
    send.options(on_conflict="replace")  # wrong: value
    send.options(wait=[1])  # wrong: type
    await app.queue("mail").enqueue({"to": "ada"}, prioritty=1)  # wrong: misspelt


# Direct calls


async def pay(order: Order, tip: float = 0) -> str:
    return f"{order.number}: {tip}"


async def durable_steps(context: JobContext) -> None:
    assert_type(await context.step("charge", pay, Order(1, 2.5), attempts=8, backoff="10s"), str)
    assert_type(await context.step("charge", pay, Order(1, 2.5), 1.5, key=7), str)
    assert_type(await context.step("report", report, context, "may"), list[str])
    assert_type(context.sync.step("report", report, context, "may"), list[str])
    assert_type(await context.wait_for("approved", timeout="1d", type=Order), Order)
    assert_type(context.step_key, str)
    await context.sleep("3d")
    await context.step("charge", pay, "order")  # wrong: not an order
    await context.step("charge", pay)  # wrong: the order is missing
    await context.step("charge", pay, Order(1, 2.5), tries=3)  # wrong: no such option
    await context.step("charge", pay, Order(1, 2.5), on_divergence="ignore")  # wrong: not a choice
    context.sync.step("report", report, context, 5)  # wrong: not a month


async def direct_calls(context: JobContext) -> None:
    assert_type(await send("ada"), int)
    coroutine = send("ada")
    assert_type(await coroutine, int)
    assert_type(add(1, 2), int)
    assert_type(await ship(context, Order(1, 2.5)), str)
    assert_type(report(context, "may"), list[str])
    await send(5)  # wrong: type
    add(1)  # wrong: missing
    add(1, 2, 3)  # wrong: surplus
    await ship(Order(1, 2.5))  # wrong: the context is missing
    text: str = add(1, 2)  # wrong: result type
    print(text)


# Synchronous code


def correct_sync_calls() -> None:
    assert_type(add.sync.enqueue(1, 2).result(), int)
    assert_type(send.sync.call("ada"), int)
    assert_type(send.sync.options(id="a", wait="5s").call("ada"), int)
    assert_type(report.sync.options(every="1h").schedule("hourly", "may"), SchedulerInfo)
    assert_type([job.id for job in add.sync.enqueue_many([add.job(1, 2)])], list[str])


def wrong_sync_calls() -> None:
    add.sync.enqueue("1", 2)  # wrong: type
    add.sync.enqueue(1)  # wrong: missing
    add.sync.enqueue(1, 2, 3)  # wrong: surplus
    add.sync.enqueue(1, z=2)  # wrong: misspelt
    add.sync.call(1, "2")  # wrong: type
    add.sync.options(delay="5m").enqueue(1, "2")  # wrong: type
    add.sync.options(dleay="5m")  # wrong: misspelt
    report.sync.options(every="1h").schedule("hourly", 5)  # wrong: type
    add.sync.enqueue_many([(1, 2)])  # wrong: a tuple
    add.sync.job(1, "2")  # wrong: type
    add.sync.delay(1, 2)  # wrong: a method of other queues
    text: str = add.sync.call(1, 2)  # wrong: result type
    other: str = add.sync.enqueue(1, 2).result()  # wrong: result type
    print(text, other)


# Flows


async def correct_flows() -> None:
    assert_type(add.partial(2), JobSpec[int])
    one = await chain(send.job("ada"), add.partial(2), add.partial(y=3)).enqueue()
    assert_type(await one.result(), int)
    both = await group([add.job(1, 2), add.job(3, 4)]).enqueue()
    assert_type(await (await group(add.job(1, 2), add.job(3, 4)).enqueue()).result(), list[int])
    assert_type(await both.result(), list[int])
    summed = await chord([add.job(1, 2), add.job(3, 4)], total.partial()).enqueue()
    assert_type(await summed.result(), float)
    parent = await Flow(report.job("may"), [add.job(1, 2), both.root]).enqueue()
    assert_type(await parent.result(), list[str])
    nested = await app.enqueue_flow(chain(group([add.job(1, 2)]), total.partial()))
    assert_type(await nested.result(), float)
    await chain(*[tidy.job() for _ in range(3)]).enqueue()
    await Dag().add("a", add.job(1, 2)).add("b", total.partial(), after=["a"]).enqueue()
    assert_type(chain(add.job(1, 2), add.partial(3)).sync.enqueue().result(), int)


async def wrong_flows() -> None:
    chain(send.job("ada"), add.partial("2"))  # wrong: type
    chain(send.job("ada"), add.partial())  # wrong: missing
    chain(send.job("ada"), add.partial(1, 2))  # wrong: surplus
    chain(send.job("ada"), add.job(2))  # wrong: missing
    chain(send.job("ada"), add)  # wrong: a task
    flow = await chain(send.job("ada"), add.partial(2)).enqueue()
    text: str = await flow.result()  # wrong: result type
    Flow(report.job("may"), [add.job(1, 2)], on_failure="retry")  # wrong: value
    print(text)


# Definitions of tasks and workers


app.worker(concurrency=10, queues=["numbers"], burst=True)
app.worker(concurency=10)  # wrong: misspelt
app.worker(concurrency="10")  # wrong: type
app.worker(queues=[1])  # wrong: type
app.worker(queues="numbers")  # wrong: a text
app.worker(queues=("numbers",))
app.worker(queues={"numbers": 2})
App(include="mail")  # wrong: a text
App(include=("mail", "reports"))

worker_options: WorkerOptions = {"concurrency": 10, "lease": "30s"}
app.worker(**worker_options)
task_options: TaskOptions = {"attempts": 3, "runner": "thread", "wait": "5s", "headers": {"a": "b"}}


@app.task(**task_options)
def chosen(n: int) -> int:
    return n


@app.task(atempts=3)  # wrong: misspelt
def misspelt(n: int) -> int:
    return n


App("memory://", wait=[1])  # wrong: type
App("memory://", id="a")  # wrong: an option of single jobs


def number_of(order: Order) -> int:
    return order.number


def soon(order: Order) -> timedelta:
    return timedelta(seconds=order.number)


def by_order(order: Order) -> str | None:
    return None if order.total < 1 else f"order-{order.number}"


@app.task(
    group=by_order,
    cost="{copies}",
    priority=number_of,
    dedup=Dedup.throttle("o-{order.number}", "1h"),
    deadline="10m",
)
async def ruled(order: Order, copies: int = 1) -> None: ...


@app.task(unique=Unique(by=["order"], period="1h", on_conflict="raise"))
async def once(order: Order) -> None: ...


@app.task(unique=True, deadline=soon)
def once_by_all(order: Order) -> None: ...


@app.handler("orders", attempts=5)
async def take(order: Order) -> str:
    return str(order.number)


@app.handler("orders-in-context", runner="thread")
def take_in_context(context: JobContext, order: Order) -> str:
    return f"{context.id} {order.number}"


@app.handler("texts", batch=10)
async def measure(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@app.handler("wrong")  # wrong: it takes two payloads
def take_two(first: int, second: int) -> None: ...


@app.handler("misspelt", atempts=3)  # wrong: misspelt
def take_misspelt(payload: str) -> None: ...


@app.handler(5)  # wrong: the queue
def take_of_number(payload: str) -> None: ...


async def correct_handlers() -> None:
    assert_type(await take.enqueue(Order(1, 2.5)), JobHandle[str])
    assert_type(await take_in_context.options(delay="1h").call(Order(1, 2.5)), str)
    assert_type(measure.sync.enqueue("one text").result(), int)


async def wrong_handlers() -> None:
    await take.enqueue("order")  # wrong: type
    await take_in_context.enqueue()  # wrong: missing
    await measure.enqueue(["one", "two"])  # wrong: type


def is_busy(error: BaseException) -> bool:
    return "busy" in str(error)


@app.task(retry_on=[ConnectionError, is_busy], give_up_on=KeyError)
def choosy(n: int) -> None: ...


@app.task(retry_on={ConnectionError: "10s", is_busy: None}, give_up_on=[is_busy])
def choosy_about_delays(n: int) -> None: ...


@app.task(give_up_on=[5])  # wrong: type
def gives_up(n: int) -> None: ...


@app.task(retry_on="ConnectionError")  # wrong: type
def retries(n: int) -> None: ...


@app.task(retry_on={ConnectionError: [1]})  # wrong: type
def delays(n: int) -> None: ...


@app.task(group=5)  # wrong: type
def grouped(n: int) -> None: ...


@app.task(cost=1.5)  # wrong: type
def costly(n: int) -> None: ...


@app.task(unique=7)  # wrong: type
def unique_by_number(n: int) -> None: ...


def text_of(n: int) -> str:
    return str(n)


@app.task(priority=text_of)  # wrong: a function of another result
def urgent(n: int) -> None: ...


@app.task(deadline=text_of(5), dedup=["k"])  # wrong: type
def late(n: int) -> None: ...


Unique(period=[1])  # wrong: type
Unique(on_conflict="replace it")  # wrong: value
Unique(states=[5])  # wrong: type
Unique(states=["waiting", State.ACTIVE], period="1h", on_conflict="replace")
ruled.options(unique=["order"], deadline=datetime.now(UTC))
ruled.options(unique=5)  # wrong: type


@app.task(runner="fiber")  # wrong: value
def fiber(n: int) -> int:
    return n


@app.middleware
async def timed(context: JobContext, call_next: Any) -> Any:
    return await call_next()


layer: Middleware = timed


def run_later(task: Task[[str], int], to: str) -> JobSpec[int]:
    return task.job(to)


@app.task
def length(text: str) -> int:
    return len(text)


run_later(length, "ada")
run_later(add, "ada")  # wrong: a task with other parameters


@app.scheduled(cron="0 3 * * *")
@app.task
def nightly(limit: int = 100) -> None: ...


@app.scheduled(cron="0 3 * * *")  # wrong: the task needs an argument
@app.task
def monthly(month: str) -> None: ...


nightly.job(5)
nightly.job("five")  # wrong: a scheduled task keeps its types
