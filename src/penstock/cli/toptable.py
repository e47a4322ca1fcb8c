"""The tables of ``penstock top``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from penstock.cli.output import STATE_STYLES, TROUBLE, prose_widths
from penstock.core.text import visible_in_line


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
