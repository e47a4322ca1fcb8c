"""The screens of ``penstock top``: the overview with its tables, a confirmation, and the help."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from rich.text import Text
from textual.app import App as TextualApp
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static, Tab, Tabs

from penstock.cli.jobs import Reasons, read_reasons
from penstock.cli.jobview import JOB_COLUMNS, SPARE_JOB_COLUMNS, cut, job_row, short_ids
from penstock.cli.operate import in_words
from penstock.cli.output import STATE_STYLES, TROUBLE, fitted, prose_widths, span, sparkline
from penstock.cli.status import KEYS, read_pauses, read_status, workers_line
from penstock.cli.topdetails import Details
from penstock.client.session import shown_store
from penstock.client.situation import at_second
from penstock.core.lifecycle import State
from penstock.core.text import visible, visible_in_line
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.info import JobInfo


_MOST_JOBS: Final = 200
_ALL: Final = ("active", "failed", "waiting", "blocked", "scheduled", "completed", "cancelled")
_QUEUE_COLUMNS: Final = (
    "queue", "waiting", "active", "scheduled", "blocked", "failed", "oldest", "done/min", "", "last 20 min",
)  # fmt: skip
_LEAST_QUEUES: Final = 3
_QUEUE_SPARE: Final = ("last 20 min", "oldest", "done/min", "scheduled", "blocked")
_CSS: Final = """
* { scrollbar-size-vertical: 1; }
Screen, DataTable, Tabs, Footer, TabPane, Static, VerticalScroll { background: ansi_default; color: ansi_default; }
#head { height: auto; max-height: 4; padding: 0 1; text-style: bold; }
#queues { height: auto; }
Tabs { margin: 1 0 0 0; }
.narrow Tab { padding: 0 1 0 0; }
#jobs { height: 1fr; }
#more, #message { height: 1; padding: 0 1; }
DataTable > .datatable--header { background: ansi_default; color: ansi_default; text-style: bold underline; }
DataTable > .datatable--cursor { background: ansi_default; color: ansi_default; text-style: none; }
DataTable:focus > .datatable--cursor { background: ansi_default; color: ansi_default; text-style: reverse; }
Confirm, Help { align: center middle; }
#question, #keys { width: 64; max-width: 90%; height: auto; border: round ansi_default; padding: 1 2; }
"""


class TopScreen(TextualApp[None]):
    """The overview. The cursor follows the chosen job, so keys never act on another job that took its row."""

    CSS = _CSS
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "act('retry')", "retry"),
        Binding("c", "act('cancel')", "cancel"),
        Binding("x", "remove", "remove"),
        Binding("p", "pause", "pause"),
        Binding("P", "pause_all", "pause all", show=False),
        Binding("escape", "back", "", show=False),
        Binding("question_mark", "help", "keys", key_display="?"),
        Binding("q,ctrl+c", "quit", "quit", key_display="q"),
    ]

    def __init__(self, app: App, *, every: float) -> None:
        super().__init__(ansi_color=True)
        self._app = app
        self._every = every
        self._read_since = ""
        self._queues: list[dict[str, Any]] = []
        self._jobs: dict[str, JobInfo] = {}
        self._reasons: Reasons = {}
        self._chosen: str | None = None
        self._chosen_by: Literal["start", "user", "refresh"] = "start"
        self._chosen_state = ""
        self._only_queue: str | None = None

    def compose(self) -> ComposeResult:
        """Return the parts of the overview, from top to bottom."""
        yield Static(id="head")
        yield Table(id="queues", cursor_type="row")
        yield Static(id="more")
        yield Tabs(Tab("all", id="all"), *(Tab(state.value, id=state.value) for state in State))
        yield Table(id="jobs", cursor_type="row")
        yield Static(id="message")
        yield Footer()

    async def on_mount(self) -> None:
        """Show everything, and refresh it at each interval."""
        self.theme = "ansi-dark"
        self.query_one(Tabs).can_focus = False
        self.query_one("#jobs", Table).focus()
        await self.reload()
        self.set_interval(self._every, self.reload)

    # Reading and drawing

    async def reload(self) -> None:
        """Read everything and show it."""
        try:
            status = await read_status(self._app, None, explained=False)
            self._queues = status["queues"]
            jobs = await self._list_jobs()
            self._reasons = await read_reasons(self._app, jobs)
        except PenstockError as error:
            self._say(str(error), trouble=True)
            self._draw_head(f"the store has not been read{self._read_since}", trouble=True)
            return
        self._read_since = f" since {at_second(time.time_ns() // 1_000_000)}"
        is_trouble = not status["workers"] or bool(status["unattended"] or status["dead"])
        self._draw_head(workers_line(status), trouble=is_trouble)
        self._draw_queues()
        self._draw_tabs()
        self._draw_jobs(jobs)

    async def _list_jobs(self) -> list[JobInfo]:
        tab = self.query_one(Tabs).active
        names = [self._only_queue] if self._only_queue else [row["queue"] for row in self._queues]
        jobs: list[JobInfo] = []
        for state in _ALL if tab in ("", "all") else (tab,):
            for name in names:
                if (left := _MOST_JOBS - len(jobs)) > 0:
                    reverse = state in ("failed", "completed", "cancelled")
                    page = self._app.queue(name).list_jobs(State(state), limit=left, reverse=reverse)
                    jobs += [job async for job in page]
        return jobs

    def _draw_head(self, line: str, *, trouble: bool) -> None:
        text = Text(f"{shown_store(self._app.url, self._app.namespace)}  ")
        self.query_one("#head", Static).update(text.append(line, style=TROUBLE if trouble else ""))

    def _draw_queues(self) -> None:
        rows = [_queue_row(row) for row in self._queues]
        columns, cells = fitted(_QUEUE_COLUMNS, rows, width=self.size.width - 2, spare=_QUEUE_SPARE)
        self.query_one("#queues", Table).fill(columns, cells, [row["queue"] for row in self._queues])
        self._fit_queues()

    def _fit_queues(self) -> None:
        """Give the queues a third of the window, and say how many do not fit."""
        room = max(_LEAST_QUEUES, self.size.height // 3 - 1)
        self.query_one("#queues", Table).styles.max_height = room + 1
        hidden, more = self._queues[room:], self.query_one("#more", Static)
        more.display, paused = bool(hidden), sum(row["paused"] for row in hidden)
        more.update(f"+{len(hidden)} more" + (f", {paused} paused" if paused else ""))

    def on_resize(self) -> None:
        """Fit the queues into the new height."""
        self._fit_queues()

    def _draw_tabs(self) -> None:
        rows = [row for row in self._queues if self._only_queue in (None, row["queue"])]
        counts = {state.value: sum(row[state.value] for row in rows) for state in State}
        names = {"all": self._only_queue or "all"} | {state.value: state.value for state in State}
        longest = max(map(len, names.values()))
        # If the tabs do not fit, first narrow their margins, then cut their names, but never their counts.
        for margin, most in [(2, longest), *((1, length) for length in range(longest, 2, -1))]:
            labels = [f"{cut(name, most)} {counts.get(tab) or ''}".strip() for tab, name in names.items()]
            if sum(len(label) + margin for label in labels) <= self.size.width:
                break
        self.query_one(Tabs).set_class(margin == 1, "narrow")
        for tab, label in zip(names, labels, strict=True):
            self.query_one(f"#{tab}", Tab).label = label

    def _draw_jobs(self, jobs: Sequence[JobInfo]) -> None:
        self._jobs = {job.ref: job for job in jobs}
        self._choose_first_if_needed()
        shorts = short_ids(job.id for job in jobs)
        rows = [job_row(job, self._reasons.get((job.queue, job.id)), shown_id=shorts[job.id]) for job in jobs]
        columns, cells = fitted(JOB_COLUMNS, rows, width=self.size.width - 2, spare=SPARE_JOB_COLUMNS)
        table = self.query_one("#jobs", Table)
        table.fill(columns, cells, list(self._jobs), chosen=self._chosen)
        table.show_cursor = self._chosen in self._jobs

    def _choose_first_if_needed(self) -> None:
        """Choose the first job, unless the user has chosen one, or the last choice is still in its state.

        Otherwise, the list would follow a job that has ended, down to the completed ones.
        """
        known = self._jobs.get(self._chosen or "")
        is_same = known is not None and known.state.value == self._chosen_state
        if self._chosen is not None and (self._chosen_by == "user" or is_same):
            return
        self._chosen_by = "start" if self._chosen is None else "refresh"
        self._chosen = next(iter(self._jobs), None)
        self._chosen_state = self._jobs[self._chosen].state.value if self._chosen else ""

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Choose the job under the cursor."""
        if event.data_table.id == "jobs" and event.row_key is not None:
            event.data_table.show_cursor = True
            self._choose_at_cursor()

    def _choose_at_cursor(self) -> None:
        at_cursor = self.query_one("#jobs", Table).key_at_cursor()
        if at_cursor not in (None, self._chosen):
            self._chosen, self._chosen_by = at_cursor, "user"

    async def on_tabs_tab_activated(self) -> None:
        """Show the jobs of the chosen state."""
        self._chosen = None
        await self.reload()

    def _say(self, text: str, *, trouble: bool = False) -> None:
        line = Text(visible_in_line(text), style=TROUBLE if trouble else "")
        self.query_one("#message", Static).update(line)

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow the keys of the overview only on the overview."""
        return action in ("quit", "pop_screen") or len(self.screen_stack) == 1

    def action_turn(self, step: int) -> None:
        """Go to the next or the previous state."""
        tabs = self.query_one(Tabs)
        tabs.action_next_tab() if step > 0 else tabs.action_previous_tab()

    async def action_open(self) -> None:
        """Show the details of the chosen job. On a queue, show only its jobs, or all jobs again."""
        self._choose_at_cursor()
        if (queue := self._focused_queue()) is not None:
            await self._show_only(None if self._only_queue == queue else queue)
        elif self._chosen and self._chosen_by == "user":
            # The job may have left the list.
            self.push_screen(Details(self._app, self._chosen, every=self._every))
        elif job := self._chosen_job():
            self.push_screen(Details(self._app, job.ref, every=self._every))

    async def _show_only(self, queue: str | None) -> None:
        """Show the jobs of all states, of this queue or of all queues."""
        self._only_queue, self._chosen = queue, None
        self.query_one(Tabs).active = "all"
        self.query_one("#jobs", Table).focus()
        await self.reload()

    async def action_back(self) -> None:
        """Go back one step: from the queues to the jobs, or from a selection to all jobs."""
        if self._focused_queue() is not None:
            self.query_one("#jobs", Table).focus()
        elif self._only_queue is not None or self.query_one(Tabs).active != "all":
            await self._show_only(None)

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(Help())

    async def action_act(self, verb: str) -> None:
        """Retry or cancel the chosen job. Ask first if it is running, or if a refresh moved the cursor to it."""
        if not (job := self._chosen_job()):
            return

        async def act() -> str:
            queue = self._app.queue(job.queue)
            answers = await (queue.retry(job.id) if verb == "retry" else queue.cancel(job.id))
            return f"{job.id} {in_words(answers[job.id])}"

        if self._chosen_by == "refresh" or job.state == "active":
            self._ask(f"{verb.capitalize()} {job.id} of {job.queue}?", act)
            return
        self._chosen_by = "user"
        self._say(await act())
        await self.reload()

    def action_remove(self) -> None:
        """Ask, then remove the chosen job."""
        if not (job := self._chosen_job()):
            return

        async def remove() -> str:
            return f"{job.id} {in_words((await self._app.queue(job.queue).remove(job.id))[job.id])}"

        self._ask(f"Remove {job.id} from {job.queue}? This cannot be undone.", remove)

    async def action_pause(self) -> None:
        """Pause or resume the queue under the cursor, or the queue of the chosen job."""
        name = self._focused_queue()
        if name is None:
            if not (job := self._chosen_job()):
                return
            name = job.queue
        queue = self._app.queue(name)
        storage, is_paused = await self._app.connect(), (await queue.counts()).paused
        was_paused = any(not pause.group for pause in await read_pauses(storage, name, is_paused=is_paused))
        await (queue.resume() if was_paused else queue.pause())
        self._say(f"{name} {'resumed' if was_paused else 'paused'}")
        await self.reload()

    def action_pause_all(self) -> None:
        """Ask, then pause all queues; resume them if all are paused."""
        resume = all(row["paused"] for row in self._queues)
        names = [row["queue"] for row in self._queues]

        async def act() -> str:
            for name in names:
                queue = self._app.queue(name)
                await (queue.resume() if resume else queue.pause())
            return f"all queues {'resumed' if resume else 'paused'}"

        self._ask(f"{'Resume' if resume else 'Pause'} all {len(names)} queues?", act)

    def _ask(self, question: str, act: Callable[[], Awaitable[str]]) -> None:
        async def decide(is_sure: bool | None) -> None:
            if is_sure:
                self._say(await act())
                await self.reload()

        self.push_screen(Confirm(question), decide)

    def _focused_queue(self) -> str | None:
        table = self.query_one("#queues", Table)
        is_there = self.focused is table and table.cursor_row < len(self._queues)
        return str(self._queues[table.cursor_row]["queue"]) if is_there else None

    def _chosen_job(self) -> JobInfo | None:
        """Return the chosen job. If it is gone, say so and forget the choice."""
        # The message that the cursor has moved comes after keys that were typed at once.
        self._choose_at_cursor()
        job = self._jobs.get(self._chosen or "")
        if job is None:
            lost, self._chosen = self._chosen, None
            self._say(
                f"{lost.partition('/')[2]} is no longer listed. Nothing was done; choose another job."
                if lost and self._jobs
                else "No jobs are listed.",
                trouble=True,
            )
        return job


class Confirm(ModalScreen[bool]):
    """A question that the user must answer with ``y`` before a drastic step."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,escape,q", "dismiss(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Return the question."""
        yield Static(Text(f"{visible(self._question)}\n\ny yes   n no"), id="question")


class Help(ModalScreen[None]):
    """The list of keys. Any key closes it."""

    def compose(self) -> ComposeResult:
        """Return the keys."""
        yield Static(Text(KEYS), id="keys")

    def on_key(self, event: Key) -> None:
        """Close the help, and do nothing else with the key."""
        event.stop()
        self.dismiss()


def _queue_row(row: dict[str, Any]) -> tuple[Any, ...]:
    counts = (row[name] for name in ("waiting", "active", "scheduled", "blocked", "failed"))
    oldest = span(row["oldest_waiting_ms"]) if row["waiting"] else ""
    rate, paused = row["completed_per_minute"], "paused" if row["paused"] else ""
    return (row["queue"], *counts, oldest, rate, paused, sparkline(row["completed_by_minute"]))


class Table(DataTable[Text]):
    """A table with a row per queue or job. Its keys take effect after those that moved its cursor before."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "app.open", "details"),
        Binding("left", "app.turn(-1)", "", show=False),
        Binding("right", "app.turn(1)", "states", key_display="←→"),
    ]

    def key_at_cursor(self) -> str | None:
        """Return the key of the row under the cursor, if the cursor is shown."""
        if not self.show_cursor or not self.is_valid_row_index(self.cursor_row):
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def fill(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        keys: Sequence[str],
        *,
        chosen: str | None = None,
    ) -> None:
        """Replace the content. The cursor stays on its row, or goes to the row of ``chosen``."""
        at = keys.index(chosen) if chosen in keys else min(self.cursor_row, len(keys) - 1)
        with self.prevent(DataTable.RowHighlighted):
            self.clear(columns=True)
            widths = prose_widths(columns, rows, self.app.size.width - 2)
            for number, name in enumerate(columns):
                self.add_column(name, width=widths.get(number))
            for key, row in zip(keys, rows, strict=True):
                self.add_row(*(_cell(name, value) for name, value in zip(columns, row, strict=True)), key=key)
            if at >= 0:
                self.move_cursor(row=at)


def _cell(column: str, value: Any) -> Text:
    text = Text(visible_in_line("" if value is None else str(value)), no_wrap=True)
    if isinstance(value, int | float):
        text.justify = "right"
    if value == "paused" or (column == "failed" and value):
        text.stylize(TROUBLE)
    elif column == "state":
        text.stylize(STATE_STYLES.get(str(value), ""))
    return text
