"""What is kept of what a run prints."""

from __future__ import annotations

import pytest

from penstock.worker.runners.sandbox import Output


def kept(*chunks: bytes) -> list[str]:
    output = Output()
    lines = [line for chunk in chunks for line in output.feed(chunk)]
    return lines + output.rest()


def test_lines_are_whole_however_the_bytes_come() -> None:
    text = "żółw\r\n\nno end".encode()
    for cut in range(len(text)):
        assert kept(text[:cut], text[cut:]) == ["żółw", "", "no end"]


def test_lines_come_as_soon_as_they_are_whole() -> None:
    output = Output()
    assert output.feed(b"one\ntw") == ["one"]
    assert output.feed(b"o\n") == ["two"]
    assert output.rest() == []


def test_bytes_that_are_not_text_are_shown_as_bytes() -> None:
    assert kept(b"\xff!\n") == ["�!"]


@pytest.mark.parametrize("count", [400, 401, 800, 801, 1_000, 50_000])
def test_every_line_is_shown_or_counted(count: int) -> None:
    lines = kept(*(b"%d\n" % number for number in range(count)))
    shown = [line for line in lines if "left out" not in line]
    assert len(lines) <= 801
    assert shown[:400] == [str(number) for number in range(400)]
    assert shown[-1] == str(count - 1)
    left_out = [int(line.split()[1]) for line in lines if "left out" in line]
    assert sum(left_out) + len(shown) == count


@pytest.mark.parametrize("chunk", [1_000, 65_536, 10_000_000])
def test_one_endless_line_takes_little_room(chunk: int) -> None:
    output = Output()
    for _ in range(20_000_000 // chunk):
        assert output.feed(b"x" * chunk) == []
    *before, last = output.rest()
    assert last.startswith("xxx")
    assert sum(map(len, [*before, last])) < 3_000
    assert "left out" in before[0]
