"""The screen of ``penstock top`` with the details of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static, TabbedContent, TabPane

from penstock.cli.jobview import facts, timeline
from penstock.cli.output import TROUBLE
from penstock.cli.waiting import LogFollower, dropped_lines_note
from penstock.client.why import explain
from penstock.core.text import visible, visible_in_line
from penstock.errors import EventsLost

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.info import JobInfo


class Details(Screen[None]):
    """The details of a job: its facts and timeline, its log, and the traceback of its last failure."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter", "app.pop_screen", "back", key_display="esc"),
        Binding("s", "show('facts')", "show"),
        Binding("l", "show('log')", "log"),
        Binding("t", "show('traceback')", "traceback"),
    ]

    def __init__(self, app: App, ref: str, *, every: float) -> None:
        super().__init__()
        self._store = app
        self._handle = app.job(ref)
        self._every = every

    def compose(self) -> ComposeResult:
        """Return a tab for each part."""
        with TabbedContent(id="parts"):
            for name in ("facts", "log", "traceback"):
                with TabPane(name, id=name), VerticalScroll():
                    yield Static(id=f"{name}-text")
        yield Footer()

    async def on_mount(self) -> None:
        """Show the job, and refresh it at each interval."""
        await self.reload()
        self.set_interval(self._every, self.reload)

    def action_show(self, part: str) -> None:
        """Go to a tab."""
        self.query_one(TabbedContent).active = part

    async def reload(self) -> None:
        """Read the job and show it."""
        info = await self._handle.get_or_none()
        if info is None:
            self._put("facts", Text(visible(f"{self._handle.id} is gone."), style=TROUBLE))
            return
        rows = facts(info, await explain(await self._store.connect(), info.raw))
        lines = [Text.assemble((f"{name:12} ", "bold"), visible(str(value))) for name, value in rows]
        lines += [Text(""), *[Text(line) for line in await self._timeline(info)]]
        self._put("facts", Text("\n").join(lines))
        dropped, log = await LogFollower(self._handle).new_lines()
        log = [dropped_lines_note(dropped), *log] if dropped else log
        self._put("log", Text(visible("\n".join(log)) if log else "The job has logged nothing."))
        trace = info.failure.traceback if info.failure is not None else ""
        self._put("traceback", Text(visible(trace) if trace else "The job has no traceback."))

    async def _timeline(self, info: JobInfo) -> list[str]:
        try:
            return timeline([event async for event in self._handle.events(follow=False)], info.raw)
        except EventsLost as lost:
            return [visible_in_line(str(lost))]

    def _put(self, part: str, text: Text) -> None:
        self.query_one(f"#{part}-text", Static).update(text)
