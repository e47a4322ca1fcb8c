"""Processes that wait for the write lock take turns: the one that has waited longest goes first."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from penstock.core.job import NewJob
from penstock.storage.sqlite import lock
from penstock.storage.sqlite.connection import file_identity
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.sqlite.lock import TURN_FILE, Turn, begin, open_turn
from penstock.storage.sqlite.wake import signal_directory


class Waiting:
    """A clock, and two processes that share a turn."""

    def __init__(self, path: Path) -> None:
        self.now = 1_000.0
        self.one, self.other = Turn(path), Turn(path)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    waiting = Waiting(tmp_path / TURN_FILE)
    monkeypatch.setattr(lock, "monotonic", waiting.monotonic)
    return waiting


def test_without_a_claim_everybody_may_try(waiting: Waiting) -> None:
    assert waiting.one.is_mine(1_000.0)


def test_the_longest_waiter_goes_first(waiting: Waiting) -> None:
    waiting.one.claim(999.5)
    assert waiting.one.is_mine(999.5)
    assert waiting.other.is_mine(999.0)
    assert not waiting.other.is_mine(1_000.0)


def test_nobody_waits_for_a_process_that_gave_up(waiting: Waiting) -> None:
    waiting.one.claim(999.5)
    waiting.one.give_up(999.5)
    assert waiting.other.is_mine(1_000.0)


def test_nobody_gives_up_for_another_process(waiting: Waiting) -> None:
    waiting.one.claim(999.5)
    waiting.other.give_up(1_000.0)
    assert not waiting.other.is_mine(1_000.0)


def test_nobody_waits_for_a_process_that_is_dead_or_suspended(waiting: Waiting) -> None:
    waiting.one.claim(999.5)
    waiting.now += 0.06
    assert waiting.other.is_mine(1_000.0)


def test_a_claim_from_before_a_reboot_counts_for_nothing(waiting: Waiting) -> None:
    waiting.one.claim(999.5)
    waiting.now = 5.0
    assert waiting.other.is_mine(1_000.0)


def test_a_free_lock_is_left_to_the_process_that_has_waited(tmp_path: Path) -> None:
    turn = Turn(tmp_path / TURN_FILE)
    turn.claim(time.monotonic() - 1)
    with closing(sqlite3.connect(tmp_path / "file.db", isolation_level=None)) as sql:
        assert begin(sql, timeout_s=5, turn=turn)


def test_a_process_that_waits_for_the_lock_goes_first_after_a_while(
    waiting: Waiting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, others_may_try = tmp_path / "file.db", []
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as holder,
        closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as sql,
    ):
        holder.execute("BEGIN IMMEDIATE")

        def sleep(seconds: float) -> None:
            others_may_try.append(waiting.other.is_mine(waiting.now))
            waiting.now += seconds
            if waiting.now > 1_000.1:
                holder.execute("ROLLBACK")

        monkeypatch.setattr(lock, "sleep", sleep)
        assert begin(sql, timeout_s=5, turn=waiting.one)
    assert others_may_try == sorted(others_may_try, reverse=True)
    assert (others_may_try[0], others_may_try[-1]) == (True, False)
    assert waiting.other.is_mine(waiting.now)


def test_a_process_that_waited_to_the_end_of_its_time_gives_up(tmp_path: Path) -> None:
    turn = Turn(tmp_path / TURN_FILE)
    path = tmp_path / "file.db"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as holder,
        closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as sql,
    ):
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            begin(sql, timeout_s=0.1, turn=turn)
    assert turn.is_mine(time.monotonic())


async def test_a_call_lets_a_process_go_first_and_is_answered(storage: SqliteStorage, path: Path) -> None:
    folder = signal_directory(file_identity(str(path)))
    assert folder is not None
    asked_at = time.monotonic()
    Turn(folder / TURN_FILE).claim(asked_at - 1)
    await storage.enqueue("q", [NewJob("job")])
    assert time.monotonic() - asked_at >= 0.05


def test_a_full_disk_leaves_processes_without_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    assert open_turn(tmp_path) is None
