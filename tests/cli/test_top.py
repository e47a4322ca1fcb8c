from __future__ import annotations

import termios
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import DataTable, Static, Tab, TabbedContent, Tabs

from penstock import App
from penstock.cli.output import sparkline
from penstock.cli.topdetails import Details
from penstock.cli.topscreen import Confirm, Help, TopScreen
from penstock.core.job import Options
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Fail, Failure
from penstock.errors import StorageUnavailable
from penstock.storage.values import Settlement, Take
from tests.cli.conftest import Shell, until
from tests.cli.terminal import Terminal

# Some start the script, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    async with App(f"sqlite:///{tmp_path}/penstock.db") as app:
        yield app


class Screen:
    """``top`` of an app, looked at and used in this process. It shows changes when asked to."""

    def __init__(self, top: TopScreen, pilot: Pilot[None]) -> None:
        self.top = top
        self._pilot = pilot

    async def press(self, *keys: str) -> None:
        await self._pilot.press(*keys)
        await self._pilot.pause()

    async def type(self, *keys: str) -> None:
        """Press keys faster than they are handled, as a slow connection delivers them."""
        for key in keys:
            self.top.post_message(Key(key, key if len(key) == 1 else None))
        await self._pilot.pause()
        await self._pilot.pause()

    async def reload(self) -> None:
        await self.top.reload()
        await self._pilot.pause()

    def rows(self, table: str = "jobs") -> list[list[str]]:
        shown = self.top.query_one(f"#{table}", DataTable)
        return [[str(cell) for cell in shown.get_row_at(at)] for at in range(shown.row_count)]

    def tabs(self) -> list[str]:
        """Return the labels of the tabs, which all fit into the window."""
        bar = self.top.query_one(Tabs)
        assert bar.query_one("#tabs-list").virtual_size.width <= self.top.size.width
        return [str(tab.label) for tab in bar.query(Tab)]

    @property
    def ids(self) -> list[str]:
        return [row[0] for row in self.rows()]

    def text(self, part: str) -> str:
        return str(self.top.screen.query_one(f"#{part}", Static).render())

    @property
    def chosen(self) -> str | None:
        table = self.top.query_one("#jobs", DataTable)
        return self.ids[table.cursor_row] if table.show_cursor and self.ids else None


class Opened:
    """Opens ``Screen`` of a given size."""

    def __init__(self, app: App, **size: int) -> None:
        self._top = TopScreen(app, every=3600)
        self._context = self._top.run_test(size=(size.get("columns", 100), size.get("lines", 30)))

    async def __aenter__(self) -> Screen:
        return Screen(self._top, await self._context.__aenter__())

    async def __aexit__(self, *error: Any) -> None:
        await self._context.__aexit__(*error)


async def fail_one(app: App, id: str, *, queue: str = "mail") -> None:
    await app.queue(queue).enqueue({"to": id}, id=id, attempts=1)
    storage = await app.connect()
    (lease,) = (await storage.claim(queue, Take("w", 1, 30_000))).leases
    failure = Failure("ValueError", "no such address", traceback="Traceback: line 7\nValueError")
    await storage.settle(queue, [Settlement(lease.id, lease.token, Fail(failure, final=True))])


async def test_it_shows_queues_jobs_and_their_workers(app: App) -> None:
    await fail_one(app, "bad-one")
    await app.queue("reports").enqueue(1, id="next-one")
    async with Opened(app) as screen:
        assert screen.ids == ["bad-one", "next-one"]
        assert [row[0] for row in screen.rows("queues")] == ["mail", "reports"]
        assert "no worker" in screen.text("head")
        assert str(screen.top.query_one("#failed", Tab).label) == "failed 1"


async def test_keys_act_on_the_chosen_job(app: App) -> None:
    await fail_one(app, "bad-one")
    async with Opened(app) as screen:
        await screen.press("r")
        assert screen.text("message") == "bad-one waits again"
        assert screen.rows()[0][2] == "waiting"
        await screen.press("c")
        assert screen.text("message") == "bad-one cancelled"
        info = await app.queue("mail").get("bad-one")
        assert info.state == "cancelled"


async def test_keys_typed_at_once_act_on_the_job_that_the_cursor_has_reached(app: App) -> None:
    for id in ("a-job", "b-job", "c-job"):
        await app.queue("mail").enqueue(1, id=id)
    async with Opened(app) as screen:
        await screen.type("down", "c")
        assert screen.text("message") == "b-job cancelled"
        # The cancelled job is the last one now, and the cursor is still on it.
        await screen.type("up", "enter")
        assert isinstance(screen.top.screen, Details)
        assert "c-job" in screen.text("facts-text")
        await screen.press("escape")
        await screen.type("tab", "enter")
        assert not isinstance(screen.top.screen, Details)
        assert str(screen.top.query(Tab).first().label) == "mail"


async def test_removing_asks_first(app: App) -> None:
    await app.queue("mail").enqueue(1, id="dear-one")
    async with Opened(app) as screen:
        await screen.press("x")
        assert isinstance(screen.top.screen, Confirm)
        assert "Remove dear-one from mail?" in screen.text("question")
        await screen.press("n")
        assert screen.ids == ["dear-one"]
        await screen.press("x", "y")
        assert screen.text("message") == "dear-one removed"
        assert screen.ids == []


async def test_one_queue_is_paused_immediately_and_all_queues_after_a_question(app: App) -> None:
    for name in ("mail", "reports"):
        await app.queue(name).enqueue(1)
    async with Opened(app) as screen:
        await screen.press("p")
        assert screen.text("message") == "mail paused"
        await screen.press("p")
        assert screen.text("message") == "mail resumed"
        await screen.press("P")
        assert "Pause all 2 queues?" in screen.text("question")
        await screen.press("y")
        assert [(await app.queue(name).counts()).paused for name in ("mail", "reports")] == [True, True]
        assert all("paused" in row for row in screen.rows("queues"))
        await screen.press("P", "y")
        assert screen.text("message") == "all queues resumed"


async def test_the_cursor_follows_the_chosen_job_to_its_new_row(app: App) -> None:
    await app.queue("mail").enqueue(1, id="chosen-one")
    async with Opened(app) as screen:
        await app.queue("mail").enqueue(1, id="urgent-one", priority=-5)
        await screen.reload()
        assert screen.ids == ["urgent-one", "chosen-one"]
        assert screen.chosen == "chosen-one"


async def test_keys_do_nothing_when_the_job_that_the_user_chose_is_gone(app: App) -> None:
    for id in ("a-job", "b-job", "c-job"):
        await app.queue("mail").enqueue(1, id=id)
    async with Opened(app) as screen:
        await screen.press("down")
        assert screen.chosen == "b-job"
        await app.queue("mail").remove("b-job")
        await screen.reload()
        assert screen.chosen is None
        await screen.press("c")
        assert "b-job is no longer listed" in screen.text("message")
        assert (await app.queue("mail").counts()).waiting == 2
        await screen.reload()
        assert screen.chosen == "a-job"


async def test_details_open_for_a_chosen_job_that_has_left_the_list(app: App) -> None:
    await app.queue("mail").enqueue(1, id="first")
    await app.queue("mail").enqueue(1, id="chosen")
    async with Opened(app) as screen:
        await screen.press("down")
        await app.queue("mail").cancel("chosen")
        await screen.reload()
        await screen.press("enter")
        assert isinstance(screen.top.screen, Details)
        assert "cancelled" in screen.text("facts-text")


async def test_the_cursor_stays_on_a_job_until_the_user_chooses_one(app: App) -> None:
    await app.queue("mail").enqueue(1, id="a-job")
    await app.queue("mail").enqueue(1, id="b-job")
    async with Opened(app) as screen:
        await app.queue("mail").remove("a-job")
        await screen.reload()
        assert screen.chosen == "b-job"
        await screen.press("c")
        assert "Cancel b-job of mail?" in screen.text("question")
        await screen.press("y")
        assert screen.text("message") == "b-job cancelled"


async def test_the_list_does_not_follow_a_job_that_the_user_has_not_chosen(app: App) -> None:
    for number in range(40):
        await app.queue("mail").enqueue(1, id=f"job-{number:02}")
    storage = await app.connect()
    async with Opened(app, columns=80, lines=24) as screen:
        await screen.press("tab")
        for number in range(30):
            (lease,) = (await storage.claim("mail", Take("w", 1, 30_000))).leases
            await screen.reload()
            assert screen.chosen == lease.id == f"job-{number:02}"
            await storage.settle("mail", [Settlement(lease.id, lease.token, Complete(b"1"))])
        await screen.reload()
        assert screen.chosen == "job-30"
        assert screen.top.query_one("#jobs", DataTable).scroll_offset.y == 0


async def test_the_cursor_follows_a_job_that_the_user_has_acted_on(app: App) -> None:
    for id in ("a-job", "b-job"):
        await app.queue("mail").enqueue(1, id=id)
    async with Opened(app) as screen:
        await screen.press("c")
        assert screen.text("message") == "a-job cancelled"
        assert screen.chosen == "a-job"


async def test_tabs_are_shortened_until_all_fit(app: App) -> None:
    await app.queue("mail").enqueue_many([{"payload": n} for n in range(12)])
    await fail_one(app, "bad-one")
    names = ["all", *(state.value for state in State)]
    async with Opened(app, columns=80) as screen:
        assert [label.split()[0] for label in screen.tabs()] == names
    async with Opened(app, columns=76) as screen:
        assert [label.split()[0] for label in screen.tabs()] == names
    async with Opened(app, columns=60) as screen:
        assert screen.tabs()[2:4] == ["waiti… 12", "block…"]


async def test_arrows_turn_to_the_jobs_of_another_state(app: App) -> None:
    await fail_one(app, "bad-one")
    await app.queue("mail").enqueue(1, id="later-one", delay="1h")
    async with Opened(app) as screen:
        await screen.press("right")
        assert screen.ids == ["later-one"]
        await screen.press("left")
        assert screen.ids == ["bad-one", "later-one"]


async def test_enter_on_a_queue_shows_its_jobs_alone(app: App) -> None:
    await app.queue("mail").enqueue(1, id="a-mail")
    await app.queue("reports").enqueue(1, id="a-report")
    async with Opened(app) as screen:
        await screen.press("right", "tab", "down", "enter")
        assert screen.ids == ["a-report"]
        assert screen.top.query_one(Tabs).active == "all"
        await screen.press("escape")
        assert screen.ids == ["a-mail", "a-report"]


async def test_escape_goes_back_and_a_question_mark_shows_the_keys(app: App) -> None:
    await app.queue("mail").enqueue(1, id="a-mail")
    async with Opened(app) as screen:
        await screen.press("right")
        assert screen.ids == []
        await screen.press("escape")
        assert screen.ids == ["a-mail"]
        await screen.press("tab", "escape")
        assert screen.top.focused is screen.top.query_one("#jobs", DataTable)
        await screen.press("question_mark")
        assert isinstance(screen.top.screen, Help)
        assert "pause or resume its queue" in screen.text("keys")
        await screen.press("escape")
        assert screen.ids == ["a-mail"]
        await screen.press("right", "question_mark", "escape")
        assert screen.top.query_one(Tabs).active == "scheduled"


@pytest.mark.parametrize(("lines", "hidden"), [(30, "+11 more"), (18, "+15 more"), (90, "")])
async def test_as_many_queues_are_shown_as_the_window_has_room_for(app: App, lines: int, hidden: str) -> None:
    for number in range(20):
        await app.queue(f"queue-{number:02}").enqueue(1)
    async with Opened(app, lines=lines) as screen:
        more = screen.top.query_one("#more", Static)
        assert (screen.text("more") if more.display else "") == hidden
        assert not more.display or more.region.y == screen.top.query_one("#queues", DataTable).region.bottom


async def test_paused_queues_without_room_are_counted(app: App) -> None:
    for number in range(12):
        await app.queue(f"queue-{number:02}").enqueue(1)
    await app.queue("queue-11").pause()
    async with Opened(app, lines=24) as screen:
        assert screen.text("more") == "+5 more, 1 paused"


async def test_details_have_facts_timeline_log_and_traceback(app: App) -> None:
    await fail_one(app, "bad-one")
    async with Opened(app) as screen:
        await screen.press("enter")
        assert isinstance(screen.top.screen, Details)
        assert "ValueError: no such address" in screen.text("facts-text")
        assert "enqueued" in screen.text("facts-text")
        await screen.press("t")
        assert screen.top.screen.query_one(TabbedContent).active == "traceback"
        assert "line 7" in screen.text("traceback-text")
        await screen.press("l")
        assert screen.text("log-text") == "The job has logged nothing."
        await screen.press("escape")
        assert screen.ids == ["bad-one"]


async def test_control_characters_of_jobs_are_shown_as_escapes(app: App) -> None:
    storage = await app.connect()
    from penstock.core.job import NewJob

    await storage.enqueue("mail", [NewJob("evil", b'"\\u001b[2J"', Options(task="a\x1b[2Jb"))])
    async with Opened(app) as screen:
        assert "a\\x1b[2Jb" in screen.rows()[0][3]
        await screen.press("enter")
        assert "\x1b" not in screen.text("facts-text")


async def test_it_fits_80_columns(app: App) -> None:
    await fail_one(app, "0" * 32)
    async with Opened(app, columns=80, lines=24) as screen:
        for name in ("queues", "jobs"):
            table = screen.top.query_one(f"#{name}", DataTable)
            assert table.virtual_size.width <= 80
        assert screen.ids == ["0" * 8]


async def test_80_columns_show_blocked_jobs_and_the_whole_head(app: App) -> None:
    queue = app.queue("reports-of-the-night")
    await queue.enqueue(1, id="first")
    await queue.enqueue(1, after=[("reports-of-the-night", "first")])
    async with Opened(app, columns=80, lines=24) as screen:
        columns = screen.top.query_one("#queues", DataTable).columns.values()
        assert "blocked" in [str(column.label) for column in columns]
        head = screen.top.query_one("#head", Static)
        assert len(screen.text("head")) <= head.content_size.width * head.content_size.height


async def test_the_head_counts_the_slots_of_live_workers_and_says_when_the_store_was_read(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    await app.queue("mail").enqueue(1)
    storage = await app.connect()
    info = b'{"state": "running", "queues": ["mail"], "active": 1, "concurrency": 4}'
    await storage.extend("mail", [], worker="gone", lease_ms=60_000, info=info)
    await storage.shift_clock("mail", 61_000)
    await storage.extend("mail", [], worker="here", lease_ms=60_000, info=info)
    async with Opened(app) as screen:
        assert "1 worker, 1 of 4 slots busy; 1 silent for 1m: gone" in screen.text("head")

        async def away(*_: object, **__: object) -> None:
            raise StorageUnavailable("the store is away")

        monkeypatch.setattr("penstock.cli.topscreen.read_status", away)
        await screen.top.reload()
        assert "the store has not been read since 2" in screen.text("head")
        assert screen.text("message") == "the store is away"


def test_a_sparkline_is_flat_without_values_and_full_at_the_most() -> None:
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([0, 1, 50, 100]) == "▁▂▅█"


def test_at_a_terminal_keys_act_and_q_leaves(on_both: Shell) -> None:
    on_both.ok("enqueue", "exit 3", "--id", "failed-one", "--attempts", "1")
    on_both.ok("worker", "--burst", "--commands")
    with Terminal(on_both, "top", "--every", "0.2") as terminal:
        terminal.read_until("failed-one")
        terminal.press("r")
        terminal.read_until("failed-one waits again")
        assert on_both.json("show", "failed-one")["state"] == "waiting"
        terminal.press("q")
        assert terminal.wait() == 0


def test_ctrl_c_leaves_the_terminal_as_it_was(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "waiting-one")
    with Terminal(penstock, "top") as terminal:
        before = termios.tcgetattr(terminal.descriptor)
        terminal.read_until("waiting-one")
        terminal.press("\x03")
        assert terminal.wait() == 0
        assert "\x1b[?1049l" in terminal.raw
        assert until(lambda: termios.tcgetattr(terminal.descriptor)[3] & termios.ECHO)
        assert termios.tcgetattr(terminal.descriptor)[3] == before[3] | termios.ECHO


def test_without_a_terminal_it_names_the_command_for_pipes(penstock: Shell) -> None:
    assert "penstock status --watch" in penstock.refused("top", code=2)
