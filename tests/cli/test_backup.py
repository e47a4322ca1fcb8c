"""``penstock backup`` and ``penstock restore``, as users run them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Shell, until


def test_a_backup_brings_back_what_was_there(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "--id", "kept", "true")
    assert "jobs.backup" in penstock.ok("backup", "jobs.backup")
    penstock.ok("enqueue", "--id", "later", "true")

    assert "add --yes" in penstock.refused("restore", "jobs.backup", code=4)
    penstock.ok("restore", "jobs.backup", "--yes")

    assert [job["id"] for job in penstock.json("list", "waiting")] == ["kept"]
    assert (tmp_path / "jobs.backup").stat().st_mode & 0o777 == 0o600


def test_a_backup_overwrites_nothing_unless_asked(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "true")
    (tmp_path / "notes").write_text("precious")

    assert "--force" in penstock.refused("backup", "notes", code=4)
    assert (tmp_path / "notes").read_text() == "precious"
    penstock.ok("backup", "notes", "--force")

    assert (tmp_path / "notes").read_bytes().startswith(b"SQLite format 3")


def test_a_store_with_a_worker_is_backed_up_and_not_restored(penstock: Shell, tmp_path: Path) -> None:
    penstock.ok("enqueue", "--id", "ran", "true")
    worker = penstock.start("worker", "--commands")
    try:
        until(lambda: penstock.json("list", "completed"))
        penstock.ok("backup", "jobs.backup")
        said = penstock.refused("restore", "jobs.backup", "--yes", code=5)
        assert "another process uses it" in said
        assert "such as `penstock worker`, `penstock top`" in said
    finally:
        worker.terminate()
        worker.communicate(timeout=60)

    penstock.ok("restore", "jobs.backup", "--yes")
    assert [job["id"] for job in penstock.json("list", "completed")] == ["ran"]


def test_a_damaged_backup_leaves_the_store_as_it_is(penstock: Shell, tmp_path: Path) -> None:
    for _ in range(20):
        penstock.ok("enqueue", "true")
    penstock.ok("backup", "jobs.backup")
    content = (tmp_path / "jobs.backup").read_bytes()
    middle = len(content) // 2
    (tmp_path / "jobs.backup").write_bytes(content[:4096] + b"\xff" * middle + content[4096 + middle :])

    message = penstock.refused("restore", "jobs.backup", "--yes", code=5)
    assert "the backup jobs.backup is damaged; the store is unchanged. Use another backup." in message
    assert len(penstock.json("list", "waiting")) == 20


def test_a_backup_into_a_missing_folder_is_a_mistake_of_use(penstock: Shell) -> None:
    penstock.ok("enqueue", "true")
    assert "the folder nodir does not exist" in penstock.refused("backup", "nodir/b.db", code=2)


def test_a_missing_store_is_not_created(penstock: Shell, tmp_path: Path) -> None:
    assert "does not exist" in penstock.refused("backup", "jobs.backup", code=3)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_backup_is_reported_without_a_question(penstock: Shell) -> None:
    penstock.ok("enqueue", "true")
    assert "nosuch.db is not a file." in penstock.refused("restore", "nosuch.db", code=2)


def test_a_server_makes_its_own_backups(valkey_url: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path)

    assert "RDB" in shell.refused("backup", "jobs.backup", "--url", valkey_url, code=2)
    assert "appendonly" in shell.refused("restore", "jobs.backup", "--url", valkey_url, code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_goes_on_with_the_file_that_took_the_place_of_its_own(
    penstock: Shell, tmp_path: Path
) -> None:
    penstock.ok("enqueue", "--id", "before", "true")
    penstock.ok("backup", "jobs.backup")
    worker = penstock.start("worker", "--commands")
    try:
        until(lambda: penstock.json("list", "completed"))
        for name in ("penstock.db", "penstock.db-wal", "penstock.db-shm"):
            (tmp_path / name).unlink()
        (tmp_path / "jobs.backup").replace(tmp_path / "penstock.db")  # By hand, while the worker runs.
        until(lambda: "before" in [job["id"] for job in completed(penstock)])
        penstock.ok("enqueue", "--id", "after", "true")
        until(lambda: "after" in [job["id"] for job in completed(penstock)])
    finally:
        worker.terminate()
        said, _ = worker.communicate(timeout=60)

    assert worker.returncode == 0, said
    assert "while this process used it" in said  # It was deleted or replaced, whichever the worker saw.


def completed(penstock: Shell) -> list[dict[str, str]]:
    run = penstock("list", "completed", "--json")
    return list(json.loads(run.stdout)) if run.returncode == 0 else []
