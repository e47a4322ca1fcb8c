"""Rules of a task: options that are computed from the arguments of each job."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

from penstock import (
    App,
    Conflict,
    Dedup,
    InvalidInput,
    InvalidOption,
    JobContext,
    JobExists,
    JobInfo,
    JobSpec,
    State,
    Unique,
    chain,
)
from penstock.client.rules import Rules
from penstock.client.task import Task
from penstock.core.job import EMPTY_EXTRAS, NewJob
from penstock.core.lifecycle import OPEN
from penstock.core.outcome import wall_clock


@dataclass
class Order:
    number: int
    customer: str
    total: float = 1.0


PENDING = (State.SCHEDULED, State.WAITING, State.BLOCKED)


class Ruled:
    """An app with a task for each kind of rule."""

    def __init__(self) -> None:
        self.app = app = App("memory://")

        @app.task(group="customer-{order.customer}", cost="{pages}", priority="{urgency}", deadline="{until}")
        async def ship(
            context: JobContext, order: Order, pages: int = 2, urgency: int = 5, until: datetime | None = None
        ) -> None: ...

        @app.task(unique=["order"], queue="orders")
        async def charge(order: Order, note: str = "") -> None: ...

        self.ship = ship
        self.charge = charge


@pytest.fixture
def ruled() -> Ruled:
    return Ruled()


def job_of(spec: JobSpec[Any]) -> NewJob:
    return spec.job


def group_of(job: NewJob) -> str:
    return (job.extras or EMPTY_EXTRAS).group


ORDER = Order(7, "ada")


# Templates and functions


def test_templates_compute_group_cost_and_priority_from_arguments_and_defaults(ruled: Ruled) -> None:
    job = job_of(ruled.ship.job(ORDER))
    assert job.extras is not None
    assert (job.extras.group, job.extras.cost, job.priority, job.ttl_ms) == ("customer-ada", 2, 5, 0)
    job = job_of(ruled.ship.job(ORDER, pages=9, urgency=-1))
    assert job.extras is not None
    assert (job.extras.cost, job.priority) == (9, -1)


def test_functions_take_the_arguments_they_name_in_their_types() -> None:
    app = App("memory://")
    seen: list[Any] = []

    def by_customer(order: Order) -> str | None:
        seen.append(order)
        return f"vip-{order.customer}" if order.total > 10 else None

    def all_of_it(**arguments: Any) -> int:
        return len(arguments)

    @app.task(group=by_customer, cost=lambda pages, factor=3: pages * factor, priority=all_of_it)
    async def ship(order: Order, pages: int = 2) -> None: ...

    job = job_of(ship.job(Order(7, "ada", 11)))
    assert job.extras is not None
    assert (job.extras.group, job.extras.cost, job.priority) == ("vip-ada", 6, 2)
    assert group_of(job_of(ship.job(ORDER))) == ""
    assert seen == [Order(7, "ada", 11), ORDER]


@pytest.mark.parametrize(
    ("hint", "value", "text"),
    [
        (int, 5, "5"),
        (bool, True, "true"),
        (float, 2.0, "2"),
        (float, 2.5, "2.5"),
        (UUID, UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (datetime, datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00Z"),
        (str, "{x}", "{x}"),
    ],
)
def test_a_template_shows_a_value_as_json_has_it(hint: Any, value: Any, text: str) -> None:
    app = App("memory://")

    async def send(x: Any) -> None: ...

    send.__annotations__["x"] = hint
    task: Any = app.task(group="g {x} {{x}}")(send)
    assert group_of(task.job(value).job) == f"g {text} {{x}}"


@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_a_value_without_a_text_is_refused(value: Any) -> None:
    app = App("memory://")

    @app.task(group="customer-{x}")
    async def send(x: Any = None) -> None: ...

    with pytest.raises(
        InvalidInput, match=r"group of task 'send' cannot be computed: x is .* Use a function"
    ):
        send.job(value)


def test_a_rule_that_fails_names_itself_and_its_cause() -> None:
    app = App("memory://")

    @app.task(group=lambda names: names["first"], dedup="{names.second}")
    async def send(names: dict[str, str]) -> None: ...

    with pytest.raises(InvalidInput, match="group of task 'send' cannot be computed: KeyError: 'first'"):
        send.job({})
    with pytest.raises(
        InvalidInput, match=r"dedup of task 'send' cannot be computed: names.second is missing"
    ):
        send.job({"first": "ada"})
    with pytest.raises(InvalidInput, match="is not allowed as group: it is empty"):
        send.job({"first": "", "second": "x"})


def test_dedup_keys_may_be_templates_with_a_mode_and_functions() -> None:
    app = App("memory://")

    @app.task(dedup=Dedup.throttle("shop-{shop}", "1h"))
    async def index(shop: str) -> None: ...

    @app.task(dedup=lambda shop: Dedup.debounce(shop, "5s") if shop else None)
    async def redraw(shop: str) -> None: ...

    @app.task(dedup="one at a time")
    async def tidy() -> None: ...

    assert job_of(index.job("berlin")).dedup == Dedup("shop-berlin", "throttle", 3_600_000)
    job = job_of(redraw.job("rome"))
    assert (job.dedup, job.delay_ms) == (Dedup("rome", "debounce", 5000), 5000)
    assert job_of(redraw.job("")).dedup is None
    assert job_of(tidy.job()).dedup == Dedup("one at a time")


def test_a_deadline_is_a_time_or_a_duration() -> None:
    app = App("memory://")
    now = datetime(2026, 5, 1, tzinfo=UTC)

    @app.task(deadline="{until}")
    async def remind(until: datetime | None) -> None: ...

    @app.task(deadline=lambda minutes: timedelta(minutes=minutes))
    async def cook(minutes: int) -> None: ...

    @app.task(deadline="10m")
    async def poll() -> None: ...

    token = wall_clock.set(lambda: now)
    try:
        assert job_of(remind.job(now + timedelta(hours=1))).ttl_ms == 3_600_000
        assert job_of(remind.job(now - timedelta(hours=1))).ttl_ms == 1
        assert job_of(remind.job(None)).ttl_ms == 0
        assert job_of(cook.job(5)).ttl_ms == 300_000
        assert job_of(poll.job()).ttl_ms == 600_000
        assert job_of(poll.options(deadline=now + timedelta(seconds=1)).job()).ttl_ms == 1000
        assert job_of(remind.options(ttl="1s").job(now)).ttl_ms == 1000
        assert job_of(poll.options(ttl="1s").job()).ttl_ms == 1000
    finally:
        wall_clock.reset(token)
    with pytest.raises(InvalidOption, match="has no time zone"):
        poll.options(deadline=datetime(2026, 1, 1))
    with pytest.raises(InvalidOption, match="ttl and deadline both say"):
        poll.options(ttl="1s", deadline="1s")


# What is nearer


def test_options_of_a_job_win_over_rules(ruled: Ruled) -> None:
    job = job_of(ruled.ship.options(group="other", priority=1).job(ORDER))
    assert job.extras is not None
    assert (job.extras.group, job.extras.cost, job.priority) == ("other", 2, 1)
    assert job_of(ruled.charge.options(dedup="mine").job(ORDER)).dedup == Dedup("mine")
    assert job_of(ruled.charge.options(unique=False).job(ORDER)).dedup is None
    by_all = job_of(ruled.charge.options(unique=True).job(ORDER)).dedup
    assert by_all is not None
    assert by_all != job_of(ruled.charge.job(ORDER)).dedup
    assert by_all != job_of(ruled.charge.options(unique=True).job(ORDER, "note")).dedup


def test_unique_may_be_an_option_of_any_task() -> None:
    app = App("memory://")

    @app.task
    async def send(to: str, copies: int = 1) -> None: ...

    assert job_of(send.job("ada")).dedup is None
    once = send.options(unique="to")
    assert job_of(once.job("ada")).dedup == job_of(once.job("ada", copies=5)).dedup is not None


# Unique


async def test_a_job_with_the_same_arguments_is_a_duplicate_while_the_first_is_open(app: App) -> None:
    @app.task(unique=["order"], queue="mail")
    async def charge(order: Order, note: str = "") -> None: ...

    first = await charge.enqueue(ORDER, "first")
    again = await charge.enqueue(Order(7, "ada"), note="again")
    other = await charge.enqueue(Order(8, "ada"))
    assert [job.status for job in (first, again, other)] == ["queued", "duplicate", "queued"]
    assert again.id == first.id
    many = await charge.enqueue_many(
        [charge.job(ORDER), charge.job(Order(9, "bob")), charge.job(Order(9, "bob"))]
    )
    assert [job.status for job in many] == ["duplicate", "queued", "duplicate"]
    await first.cancel()
    assert (await charge.enqueue(ORDER)).status == "queued"


def test_defaults_and_types_do_not_make_a_job_another_one() -> None:
    app = App("memory://")

    @app.task(unique=True)
    async def send(to: str, share: float = 1.0) -> None: ...

    @app.task(unique=True)
    async def other(to: str, share: float = 1.0) -> None: ...

    keys = {
        job_of(spec).dedup for spec in (send.job("ada"), send.job("ada", 1), send.job(to="ada", share=1.0))
    }
    assert len(keys) == 1
    assert job_of(other.job("ada")).dedup not in keys
    assert job_of(send.job("bob")).dedup not in keys


async def test_a_period_ends_uniqueness_early(app: App) -> None:
    @app.task(unique=Unique(by="to", period="1h"), queue="mail")
    async def send(to: str, text: str) -> None: ...

    await send.enqueue("ada", "one")
    assert (await send.enqueue("ada", "two")).status == "duplicate"
    await (await app.connect()).shift_clock("mail", 3_600_001)
    assert (await send.enqueue("ada", "three")).status == "queued"


@pytest.mark.parametrize(
    ("unique", "dedup"),
    [
        (Unique(states="pending"), Dedup("", "simple", 0, PENDING)),
        (Unique(states="any", period="1s"), Dedup("", "throttle", 1000)),
        (Unique(states=["waiting", State.ACTIVE]), Dedup("", "simple", 0, (State.WAITING, State.ACTIVE))),
        (
            Unique(states=[*OPEN, "completed"], period="1m"),
            Dedup("", "simple", 60_000, (*PENDING, State.ACTIVE, State.COMPLETED)),
        ),
        (Unique(on_conflict="replace"), Dedup("", "debounce", 0, (State.ACTIVE,))),
        (Unique(on_conflict="replace", states="pending"), Dedup("", "debounce")),
    ],
)
def test_unique_is_a_dedup_key_with_a_mode_and_states(unique: Unique, dedup: Dedup) -> None:
    key = job_of(Ruled().ship.options(unique=unique).job(ORDER)).dedup
    assert key is not None
    assert key.key.startswith("ship:")
    assert replace(key, key="") == dedup


async def test_a_job_may_replace_the_one_that_has_not_started(app: App) -> None:
    @app.task(unique=Unique(by="doc", on_conflict="replace"), queue="mail")
    async def render(doc: str, text: str) -> None: ...

    first = await render.enqueue("a", "old")
    second = await render.enqueue("a", "new")
    assert (await first.refresh(), second.status) == (State.CANCELLED, "queued")
    assert await app.queue("mail").claim_one() is not None
    assert (await render.enqueue("a", "newer")).id == second.id


async def test_completed_jobs_may_count_for_a_period(app: App) -> None:
    once = Unique(states=["waiting", "active", "completed"], period="1d")

    @app.task(unique=once, queue="mail", attempts=1)
    async def bill(customer: str) -> None: ...

    for end in ("fail", "complete"):
        job = await bill.enqueue("ada")
        assert job.status == "queued"
        claimed = await app.queue("mail").claim_one()
        assert claimed is not None
        await (claimed.complete(None) if end == "complete" else claimed.fail("boom"))
    assert (await bill.enqueue("ada")).status == "duplicate"
    await (await app.connect()).shift_clock("mail", 86_400_001)
    assert (await bill.enqueue("ada")).status == "queued"


async def test_a_conflict_may_be_an_error(memory_app: App) -> None:
    @memory_app.task(unique=Unique(on_conflict="raise"))
    async def send(to: str) -> None: ...

    first = await send.enqueue("ada")
    for again in (
        lambda: send.enqueue("ada"),
        lambda: send.call("ada"),
        lambda: memory_app.queue("default").enqueue({"to": "ada"}, task="send"),
        lambda: memory_app.queue("default").call({"to": "ada"}, task="send"),
    ):
        with pytest.raises(
            JobExists, match=r"'send' is unique, and job .* \(waiting\)\. Nothing was"
        ) as caught:
            await again()
        assert caught.value.job_id == first.id
    # Many jobs are not refused for one of them: their handles say so.
    assert [job.status for job in await send.enqueue_many([send.job("ada")])] == ["duplicate"]
    assert (await send.options(unique=True).enqueue("ada")).status == "duplicate"


# Every way in


async def test_a_payload_by_name_follows_the_same_rules(ruled: Ruled) -> None:
    queue = ruled.app.queue("default")
    order = {"number": 7, "customer": "ada"}
    job = await (await queue.enqueue({"order": order, "urgency": 3}, task="ship")).get()
    assert (job.group, job.cost, job.priority) == ("customer-ada", 2, 3)
    job = await (await queue.enqueue({"order": order}, task="ship", group="g")).get()
    assert (job.group, job.cost) == ("g", 2)
    orders = ruled.app.queue("orders")
    first = await ruled.charge.enqueue(ORDER)
    same = await orders.enqueue_many([{"order": order}, {"order": order | {"number": 8}}], task="charge")
    assert [(handle.status, handle.id == first.id) for handle in same] == [
        ("duplicate", True),
        ("queued", False),
    ]
    assert (await orders.enqueue({"order": order}, task="other")).status == "queued"
    with pytest.raises(InvalidInput, match="missing required field `order`"):
        await orders.enqueue({}, task="charge")
    await ruled.app.close()


async def test_a_payload_by_name_may_say_what_is_unique(ruled: Ruled) -> None:
    orders = ruled.app.queue("orders")
    payload = {"order": {"number": 7, "customer": "ada"}}
    first = await ruled.charge.enqueue(ORDER)
    assert (await orders.enqueue(payload, task="charge", unique="order")).id == first.id
    assert (await orders.enqueue(payload, task="charge", unique=False)).status == "queued"
    assert orders.prepare(payload, task="charge", unique=False).job.dedup is None
    [job] = await orders.enqueue_many([payload], task="charge", unique=False)
    assert job.status == "queued"
    assert (await orders.enqueue(payload, task="other", unique=False)).status == "queued"
    assert (await orders.enqueue(payload, unique=False)).status == "queued"
    for task in ("other", ""):
        with pytest.raises(InvalidOption, match=r"unique=True compares the arguments of a task.* Use dedup="):
            await orders.enqueue(payload, task=task, unique=True)
    await ruled.app.close()


async def test_schedules_and_sync_code_follow_the_rules(ruled: Ruled) -> None:
    info = await ruled.app.schedule("s", ruled.charge.job(ORDER), every="1h")
    assert info.spec.job.dedup == job_of(ruled.charge.job(ORDER)).dedup is not None
    assert group_of(ruled.ship.sync.job(ORDER).job) == "customer-ada"
    await ruled.app.close()


async def test_a_schedule_refuses_a_deadline_that_is_one_time(ruled: Ruled) -> None:
    @ruled.app.task(deadline=lambda: datetime.now(UTC))
    async def tidy() -> None: ...

    payload, queue = {"order": {"number": 7, "customer": "ada"}}, ruled.app.queue("default")
    until = datetime(2027, 1, 1, tzinfo=UTC)
    for schedule in (
        lambda: ruled.app.schedule("s", ruled.ship.job(ORDER), every="1h"),
        lambda: ruled.app.schedule("s", queue.prepare(payload, task="ship"), every="1h"),
        lambda: ruled.ship.options(every="1h").schedule("s", ORDER),
        lambda: queue.schedule("s", payload, task="ship", every="1h"),
    ):
        with pytest.raises(InvalidInput, match=r"deadline of task 'ship' would be computed once"):
            await schedule()
    with pytest.raises(InvalidInput, match=r"deadline of task 'tidy' would be computed once"):
        ruled.app.scheduled(every="1h")(tidy)
    for schedule in (
        lambda: ruled.app.schedule("s", ruled.ship.options(deadline=until).job(ORDER), every="1h"),
        lambda: queue.schedule("s", payload, task="ship", deadline=until, every="1h"),
    ):
        with pytest.raises(
            InvalidOption, match=r"deadline=2027-01-01.* is a single time, but the job repeats"
        ):
            await schedule()
    await queue.schedule("s", payload, task="ship", deadline="10m", every="1h")
    await ruled.app.close()


async def test_jobs_of_flows_follow_the_rules(memory_app: App) -> None:
    @memory_app.task
    async def fetch(url: str) -> str:
        return url

    @memory_app.task(group="{kind}")
    async def store(text: str, kind: str = "plain") -> str:
        return text

    @memory_app.task(group="{text}")
    async def late(text: str) -> str:
        return text

    @memory_app.task(unique=True)
    async def once(text: str) -> str:
        return text

    flow = await chain(fetch.job("x"), store.partial(kind="fast")).enqueue()
    infos: list[JobInfo] = [await job.get() for job in flow.jobs]
    assert [info.group for info in infos if info.task == "store"] == ["fast"]
    with pytest.raises(InvalidInput, match=re.escape("give the option: options(group=...)")):
        late.partial()
    assert late.options(group="g").partial().takes_result
    with pytest.raises(InvalidInput, match=re.escape("once.options(unique=False)")):
        await chain(fetch.job("x"), once.options(queue="q").job("x")).enqueue()
    await chain(fetch.job("x"), once.options(unique=False).job("x")).enqueue()


def test_rules_of_templates_can_be_pickled(ruled: Ruled) -> None:
    rules: Any = ruled.charge.declared_rules
    again: Rules = pickle.loads(pickle.dumps(rules))
    payload = b'{"order":{"number":7,"customer":"ada"}}'
    assert again.options(payload, ruled.charge.serde) == rules.options(payload, ruled.charge.serde)


@pytest.mark.parametrize("serde", ["msgpack", "raw", "custom"])
def test_rules_read_payloads_of_every_serde(serde: str) -> None:
    class Custom:
        name = "custom"

        def encode(self, value: Any) -> bytes:
            return repr(value).encode()

        def decode(self, data: bytes, type: Any = Any) -> Any:
            return {"data": data}

    app = App("memory://")

    @app.task(serde=Custom() if serde == "custom" else serde, group=lambda data: f"{len(data)} bytes")
    async def send(data: bytes) -> None: ...

    assert group_of(job_of(send.job(b"abc"))).endswith("bytes")


# What is refused where the task is defined


def task(**options: Any) -> Task[..., Any]:
    async def send(context: JobContext, order: Order, pages: int = 2) -> None: ...

    defined: Task[..., Any] = App("memory://").task(**options)(send)
    return defined


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"group": "c-{customer}"},
            "group of task 'send' reads 'customer', which is not a parameter of its function. The",
        ),
        ({"group": "c-{context}"}, "The parameters are: order, pages."),
        ({"group": "c-{order.name}"}, "reads 'order.name', and Order has no field 'name'"),
        ({"group": "c-{"}, "the template 'c-{' is not valid"),
        ({"group": "c-{order!r}"}, "may have only names of parameters in braces"),
        ({"group": "c-{pages:>5}"}, "may have only names of parameters in braces"),
        ({"group": "c-{}"}, "may have only names of parameters in braces"),
        ({"group": "c-{order[0]}"}, "may have only names of parameters in braces"),
        ({"group": lambda customer: "x"}, "reads 'customer', which is not a parameter"),
        ({"group": lambda *order: "x"}, "takes them by position"),
        ({"cost": "5"}, "cost of task 'send' must be an integer, a template such as '{size}', or a function"),
        ({"cost": "{pages}0"}, "must be one name in braces"),
        ({"priority": "high"}, "priority of task 'send' must be an integer"),
        ({"unique": ["ordre"]}, "unique of task 'send' reads 'ordre', which is not a parameter"),
        ({"unique": 5}, "unique must be a list of parameters, got 5"),
        ({"unique": Unique(period="0s")}, "period of unique of task 'send' must be longer than 0"),
        ({"unique": Unique(states="any")}, "so it needs a period"),
        (
            {"unique": Unique(states=["done"])},
            "states of unique of task 'send' must be 'open', 'pending', 'any' or a list",
        ),
        ({"unique": Unique(states=())}, "must not be empty"),
        ({"unique": Unique(on_conflict="replace", period="1s")}, "Leave out the period"),
        (
            {"unique": Unique(on_conflict="replace", period="1s", states="any")},
            "cannot replace jobs that are",
        ),
        (
            {"unique": Unique(on_conflict="wait")},  # type: ignore[arg-type]
            "on_conflict of unique of task 'send' must be 'skip', 'raise' or 'replace', got 'wait'",
        ),
        (
            {"unique": True, "dedup": "k"},
            "dedup and unique of task 'send' exclude each other. Give one of them.",
        ),
        ({"ttl": "1s", "deadline": "1s"}, "deadline and ttl of task 'send' exclude each other"),
        ({"dedup": Dedup("k-{x}")}, "the key of dedup of task 'send' reads 'x'"),
        ({"deadline": "soon"}, "deadline"),
        ({"deadline": datetime(2026, 1, 1, tzinfo=UTC)}, "deadline of task 'send' is a single time"),
    ],
)
def test_a_wrong_rule_is_refused_where_the_task_is_defined(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(said)):
        task(**options)


def test_a_rule_of_options_is_refused_there(ruled: Ruled) -> None:
    with pytest.raises(InvalidOption, match="unique of task 'ship' reads 'ordre'"):
        ruled.ship.options(unique="ordre")
    with pytest.raises(InvalidOption, match=r"It belongs to the task: @app\.task\(unique=\.\.\.\)"):
        App("memory://", unique=True)  # type: ignore[call-arg]


def test_rules_do_not_change_what_a_plain_task_is(memory_app: App) -> None:
    @memory_app.task(priority=3, on_conflict=Conflict(mode="absent"))
    async def plain(n: int) -> None: ...

    assert plain.declared_rules is plain.rules is None
    assert job_of(plain.job(1)).priority == 3
