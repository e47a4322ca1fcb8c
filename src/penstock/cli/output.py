"""Output of commands: tables for people at a terminal, plain columns for pipes, JSON for programs.

Control characters in anything that a command prints become escapes: ``guarded()`` puts a guard in front of stdout and
stderr. Two kinds of output bypass the guard: that of rich, whose ``console()`` escapes everything but rich's own
styling, and that of the user's own code, within ``unguarded()``.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from penstock.core.text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class ReaderGone(Exception):
    """The program that reads the output has exited. This is not an ``OSError``, which click turns into exit code 1."""


class _Guard(io.TextIOBase):
    """A text stream that shows control characters as escapes, also those of bytes written to its ``buffer``."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.buffer = _GuardedBuffer(self)

    def write(self, text: str, /) -> int:
        escaped = visible(text)
        try:
            self.stream.write(escaped)
        except UnicodeEncodeError:
            # The terminal does not use UTF-8.
            encoding = self.stream.encoding
            self.stream.write(escaped.encode(encoding, "backslashreplace").decode(encoding))
        except BrokenPipeError as error:
            raise ReaderGone from error
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError as error:
            raise ReaderGone from error

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors


class _GuardedBuffer(io.RawIOBase):
    """The ``buffer`` of a guard: click writes bytes to it, unless the terminal does not use UTF-8."""

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard

    def write(self, data: Any, /) -> int:
        self._guard.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._guard.flush()


def raw(stream: TextIO | _Guard | None) -> TextIO:
    """Return the stream behind a guard. For a closed stream (``>&-``), return one that discards everything."""
    if stream is None:
        return open(os.devnull, "w")  # Stays open until the process exits.
    return stream.stream if isinstance(stream, _Guard) else stream


@contextmanager
def guarded() -> Iterator[None]:
    """Guard stdout and stderr within the block."""
    with _replaced(_Guard(raw(sys.stdout)), _Guard(raw(sys.stderr))):
        yield


@contextmanager
def unguarded() -> Iterator[None]:
    """Remove the guards within the block, in which the user's own code may print styled text."""
    with _replaced(raw(sys.stdout), raw(sys.stderr)):
        yield


@contextmanager
def _replaced(out: TextIO | _Guard, err: TextIO | _Guard) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


# Tables


# Colours of the terminal's own palette that are readable on black and on white.
TROUBLE: Final = "bold red"
STATE_STYLES: Final = {
    "scheduled": "magenta",
    "blocked": "magenta",
    "active": "bold green",
    "completed": "green",
    "failed": TROUBLE,
    "cancelled": "dim",
}
_BLOCKS: Final = "▁▂▃▄▅▆▇█"

_PROSE: Final = frozenset(
    {"what", "why", "found", "advice", "meaning", "value", "from", "options", "store", "log", ""}
)
"""Columns whose cells may wrap. Ids and states stay in one line, so that they can be read and copied."""
_LEAST_OF_PROSE: Final = 14
_GAP: Final = 2
_WORDS: Final = re.compile(r"(?:`[^`]*`|[^\s`])+").findall
_NOT_ESCAPED: Final = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def at_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def console(*, stderr: bool = False) -> Console:
    """Return a console of rich that shows control characters as escapes, except those of its own styling."""
    return _console_class()(file=raw(sys.stderr if stderr else sys.stdout), highlight=False)


@cache
def _console_class() -> type[Console]:
    # Imported here, because only commands at a terminal need rich.
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class VisibleConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    return VisibleConsole


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str = "", spare: Sequence[str] = ()
) -> None:
    """Print a table at a terminal, else aligned lines with a header. Without rows, print ``empty`` to stderr.

    ``spare`` are the columns that a narrow terminal drops, in this order.
    """
    if not rows:
        if empty:
            click.echo(empty, err=True)
        return
    if at_terminal():
        out = console()
        out.print(rich_table(*fitted(columns, rows, width=out.width, spare=spare)))
        return
    texts = [[_cell(value) for value in row] for row in (columns, *rows)]
    widths = [max(len(row[at]) for row in texts) for at in range(len(columns))]
    for row in texts:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def fitted(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, width: int, spare: Sequence[str]
) -> tuple[list[str], list[list[Any]]]:
    """Return the columns that fit into ``width``, and the rows with these columns.

    Of the ``spare`` columns, empty ones are dropped first, then the others in their order.
    """
    fitting = list(range(len(columns)))
    filled = [at for at, name in enumerate(columns) if any(row[at] not in ("", None, 0) for row in rows)]
    droppable = [columns.index(name) for name in spare if name in columns]
    for at in sorted(droppable, key=lambda at: at in filled):
        if sum(_width(columns[i], [row[i] for row in rows]) + _GAP for i in fitting) - _GAP <= width:
            break
        fitting.remove(at)
    return [columns[at] for at in fitting], [[row[at] for at in fitting] for row in rows]


def _width(name: str, cells: Sequence[Any]) -> int:
    natural = max(len(_cell(cell)) for cell in (name, *cells))
    return min(natural, _LEAST_OF_PROSE) if name in _PROSE else natural


def rich_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    title: str | None = None,
    width: int | None = None,
) -> Table:
    """Return a table of rich, with coloured states. With a ``width``, each row is one line, cut to it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shares = {} if width is None else prose_widths(columns, rows, width)
    table = Table(
        box=SIMPLE_HEAD,
        title=None if title is None else Text(visible(title), style="table.title"),
        title_justify="left",
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for at, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[at], int | float) for row in rows)
        wraps = name in _PROSE and width is None
        table.add_column(
            name,
            justify="right" if numeric else "left",
            overflow="fold" if wraps else "ellipsis",
            no_wrap=not wraps,
            max_width=shares.get(at),
        )
    for row in rows:
        table.add_row(*(Text(_cell(value), style=STATE_STYLES.get(str(value), "")) for value in row))
    return table


def prose_widths(columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int) -> dict[int, int]:
    """Return the width of each column of prose, so that all other columns have room."""
    needs = [
        max(len(_cell(cell)) for cell in (name, *(row[at] for row in rows)))
        for at, name in enumerate(columns)
    ]
    prose = sorted((at for at, name in enumerate(columns) if name in _PROSE), key=needs.__getitem__)
    left = width - _GAP * (len(columns) - 1) - sum(need for at, need in enumerate(needs) if at not in prose)
    shares: dict[int, int] = {}
    for position, at in enumerate(prose):
        shares[at] = max(min(needs[at], left // (len(prose) - position)), 1)
        left -= shares[at]
    return shares


def print_sentences(text: str) -> None:
    """Print sentences, wrapped at spaces at a terminal."""
    click.echo(wrapped(text, shutil.get_terminal_size().columns) if at_terminal() else text)


def wrapped(text: str, width: int, *, indent: int = 0) -> str:
    """Return ``text`` in lines of ``width``, the others indented. A command in backticks stays whole, to be pasted."""
    lines = [""]
    for word in _WORDS(text):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width - indent:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip()
    return f"\n{' ' * indent}".join(lines)


def print_json(value: Any) -> None:
    """Print one line of JSON, or a list with an item per line."""
    if isinstance(value, list) and value:
        lines = ",\n".join(map(json_text, value))
        click.echo(f"[\n{lines}\n]")
    else:
        click.echo(json_text(value))


def json_text(value: Any) -> str:
    """Return ``value`` as JSON without control characters."""
    import msgspec

    plain = jsonable(value)
    try:
        text = msgspec.json.encode(plain).decode()
    except UnicodeEncodeError:
        # JSON can escape lone surrogates, which a user may have typed. msgspec cannot.
        text = json.dumps(plain)
    # JSON escapes C0 controls only. All others occur only in its strings, where JSON escapes are valid.
    return _NOT_ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def jsonable(value: Any) -> Any:
    """Return ``value`` as JSON types, with the ``repr`` of everything else."""
    import msgspec

    return msgspec.to_builtins(value, str_keys=True, enc_hook=repr)


def span(ms: float) -> str:
    """Return a duration for people, in two units at most."""
    if ms < 1000:
        return f"{ms:.0f}ms"
    seconds = ms / 1000
    if seconds < 60:
        return f"{seconds:.1f}s"
    for size, unit, lesser, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            whole, rest = divmod(int(seconds), size)
            return f"{whole}{unit}{rest // lesser}{name}" if rest // lesser else f"{whole}{unit}"
    return f"{seconds:.0f}s"


def ago(at_ms: int, now_ms: int) -> str:
    """Return the distance of an instant from now, such as ``3m ago`` or ``in 2h``."""
    if not at_ms:
        return ""
    return f"{span(now_ms - at_ms)} ago" if at_ms <= now_ms else f"in {span(at_ms - now_ms)}"


def when(at_ms: int) -> str:
    """Return an instant for people, in local time to the second: ``2026-11-18 09:30:00``."""
    return datetime.fromtimestamp(at_ms // 1000).isoformat(" ") if at_ms else ""


def exact(at_ms: int) -> str:
    """Return an instant for JSON, in UTC to the millisecond."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if at_ms else ""


def sparkline(values: Sequence[float]) -> str:
    """Return a block for each value, scaled to the largest value; the lowest block is zero."""
    most = max(values, default=0) or 1
    return "".join(_BLOCKS[math.ceil(value / most * (len(_BLOCKS) - 1))] for value in values)


def in_one_line(text: str) -> str:
    """Return ``text`` with each run of white space as one space, and control characters as escapes."""
    return " ".join(visible(text).split())


def _cell(value: Any) -> str:
    return "" if value is None else in_one_line(str(value))
