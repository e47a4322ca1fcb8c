"""What a run prints, as log lines: the beginning as it comes, the end at the end, what is too much left out."""

from __future__ import annotations

from typing import Final

from penstock.core.size import describe_size

__all__ = ["Output"]

# Both parts and what the function itself logs are to fit into the 1000 lines that are kept per job.
_MOST_BYTES: Final = 64 * 1024
_MOST_LINES: Final = 400
_LONGEST_LINE: Final = 2_000


class Output:
    """Takes the bytes of one run and gives lines, at most 400 (64 KiB) of its beginning and of its end each."""

    def __init__(self) -> None:
        self._lines = 0
        self._bytes = 0
        # What has no end of line yet; once the beginning has had its room, all that is kept of the rest.
        self._kept = bytearray()
        self._full = False
        self._dropped_lines = 0
        self._dropped_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """Take the next bytes; the lines among them that belong to the beginning."""
        self._kept += chunk
        shown: list[str] = []
        while not self._full and (end := self._kept.find(b"\n")) >= 0:
            self._lines += 1
            self._bytes += end + 1
            self._full = self._lines > _MOST_LINES or self._bytes > _MOST_BYTES
            if not self._full:
                shown.append(_text(self._kept[:end]))
                del self._kept[: end + 1]
        if len(self._kept) > 2 * _MOST_BYTES:
            self._full = True
            self._drop(len(self._kept) - _MOST_BYTES)
        return shown

    def rest(self) -> list[str]:
        """The lines of the end, after one that says how much was left out before them. Call it once, at last."""
        self._drop(max(len(self._kept) - _MOST_BYTES, 0))
        lines = bytes(self._kept).split(b"\n")
        if not lines[-1]:
            lines.pop()
        surplus = max(len(lines) - _MOST_LINES, 0)
        self._dropped_lines += surplus
        self._dropped_bytes += sum(len(line) + 1 for line in lines[:surplus])
        shown = [_text(line) for line in lines[surplus:]]
        if self._dropped_bytes:
            size = describe_size(self._dropped_bytes)
            shown.insert(0, f"… {self._dropped_lines} lines ({size}) left out …")
        return shown

    def _drop(self, count: int) -> None:
        """Forget the oldest ``count`` bytes. Bytes, not lines: a run may print faster than lines can be made."""
        self._dropped_bytes += count
        self._dropped_lines += self._kept.count(b"\n", 0, count)
        del self._kept[:count]


def _text(line: bytes | bytearray) -> str:
    text = line.removesuffix(b"\r").decode("utf-8", "replace")
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} …"
