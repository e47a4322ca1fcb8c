"""The progress display of a run: a bar on a terminal, a live cell in a notebook, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from penstock.core.text import get_logger, visible
from penstock.errors import InvalidOption

ProgressStyle: TypeAlias = Literal["auto", "bar", "notebook", "lines", "none"]
logger = get_logger("penstock.spark")

_EVERY_S: Final = 5.0
_REDRAW_S: Final = 0.5


class Tally(msgspec.Struct):
    """The counts of a run so far. ``reused`` rows got a result that the store had before the run. ``rate`` is rows per
    second."""

    total: int
    completed: int = 0
    reused: int = 0
    failed: int = 0
    cancelled: int = 0
    cost: float = 0.0
    began_at: float = msgspec.field(default_factory=time.monotonic)

    @property
    def ended(self) -> int:
        return self.completed + self.reused + self.failed + self.cancelled

    @property
    def rate(self) -> float:
        return self.ended / max(time.monotonic() - self.began_at, 1e-9)

    @property
    def eta_s(self) -> float | None:
        """Return the remaining seconds at this rate; ``None`` before the first row."""
        return (self.total - self.ended) / self.rate if self.ended else None

    def __str__(self) -> str:
        left = "" if self.eta_s is None else f", {_clock(self.eta_s)} left"
        cost = f", cost {self.cost:g}" if self.cost else ""
        # These are jobs of a stopped run. Their rows are not done.
        dropped = f", {self.cancelled:,} cancelled" if self.cancelled else ""
        reused = f", {self.reused:,} reused" if self.reused else ""
        done = (
            f"{self.ended - self.cancelled:,} of {self.total:,} done, {self.failed:,} failed{reused}{dropped}"
        )
        return f"{done}, {self.rate:,.0f}/s{left}{cost}"


class Progress(Protocol):
    """A display of the tally."""

    def show(self, tally: Tally) -> None: ...

    def warn(self, text: str) -> None:
        """Show a line that stays, and log it as a warning."""
        ...

    def close(self, tally: Tally) -> None: ...


def open_progress(style: ProgressStyle, title: str) -> Progress:
    """Return the display of this style; ``auto`` chooses one. Raise ``InvalidOption`` for an unknown style."""
    match style:
        case "auto":
            return open_progress(_auto_style(), title)
        case "bar":
            return _Bar(title)
        case "notebook":
            return _Notebook(title)
        case "lines":
            return _Lines(title)
        case "none":
            return _Silent()
        case _:
            raise InvalidOption(f"progress must be auto, bar, notebook, lines or none, got {style!r}.")


def _auto_style() -> ProgressStyle:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # Hosted notebooks use subclasses.
    if any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__):
        return "notebook"
    if not sys.stderr.isatty():
        return "lines"
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return "lines"
    return "bar"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Silent:
    def show(self, tally: Tally) -> None: ...

    def warn(self, text: str) -> None:
        logger.warning("%s", text)

    def close(self, tally: Tally) -> None: ...


class _Visible:
    """A visible display. It also logs warnings, unless the log has no handlers: Python would then print them on stderr,
    between the lines of the display."""

    def say(self, text: str) -> None:
        """Show a line that stays."""
        raise NotImplementedError

    def warn(self, text: str) -> None:
        if logger.hasHandlers():
            logger.warning("%s", text)
        self.say(text)


class _Lines(_Visible):
    """A line on stderr every few seconds."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._shown_at = time.monotonic()

    def show(self, tally: Tally) -> None:
        if time.monotonic() - self._shown_at >= _EVERY_S:
            self._shown_at = time.monotonic()
            self.say(str(tally))

    def say(self, text: str) -> None:
        print(visible(f"{self._title}: {text}"), file=sys.stderr, flush=True)

    def close(self, tally: Tally) -> None:
        self.say(str(tally))


class _Bar(_Visible):
    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rest]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(escape(visible(title)), total=None, rest="")
        self._bar.start()

    def show(self, tally: Tally) -> None:
        cost = f" cost {tally.cost:g}" if tally.cost else ""
        dropped = f" {tally.cancelled:,} cancelled" if tally.cancelled else ""
        rest = f"[red]{tally.failed:,} failed[/]{dropped} {tally.rate:,.0f}/s{cost}"
        done = tally.ended - tally.cancelled
        self._bar.update(self._task, total=tally.total, completed=done, rest=rest)

    def say(self, text: str) -> None:
        from rich.text import Text

        self._bar.console.print(Text(visible(text), style="yellow"))

    def close(self, tally: Tally) -> None:
        self.show(tally)
        self._bar.stop()


class _Notebook(_Visible):
    def __init__(self, title: str) -> None:
        from IPython.display import display

        self._title = title
        self._messages: list[str] = []
        self._shown_at = 0.0
        handle = display({"text/plain": title}, raw=True, display_id=True)  # type: ignore[no-untyped-call, unused-ignore]
        self._handle: Any = handle

    def show(self, tally: Tally) -> None:
        if time.monotonic() - self._shown_at >= _REDRAW_S:
            self._draw(tally)

    def say(self, text: str) -> None:
        self._messages.append(text)

    def close(self, tally: Tally) -> None:
        self._draw(tally)

    def _draw(self, tally: Tally) -> None:
        from html import escape

        self._shown_at = time.monotonic()
        notes = "".join(f"<br><small>{escape(text)}</small>" for text in self._messages)
        html = (
            f"<b>{escape(self._title)}</b> <progress max='{max(tally.total, 1)}' value='{tally.ended}'></progress> "
            f"{escape(str(tally))}{notes}"
        )
        self._handle.update({"text/html": html, "text/plain": f"{self._title}: {tally}"}, raw=True)
