"""``penstock spark``, ``history`` and ``archive``, called as the script calls them, in the session of these tests."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.cli.main import run
from penstock.spark import history
from tests.spark.busywork import happen
from tests.spark.stores import fill

# Many of Spark's small jobs, which take a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)

TASKS = "tests.spark.table_tasks"


class Command:
    """Runs one command after the other on a store, and keeps what was printed."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = url
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        # The Java of these tests is in another folder: paths that it sees are whole ones.
        whole = [
            str(Path.cwd() / text[2:] if text.startswith("./") else text) for text in map(str, arguments)
        ]
        found = run([*whole, "--url", self._url])
        printed = self._capsys.readouterr()
        assert found == code, printed
        self.said = printed.err
        return printed.out

    def json(self, *arguments: object, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture
def command(
    spark: SparkSession,
    file_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    # What a command sets for the processes that it starts is not for other tests.
    monkeypatch.setenv("PENSTOCK_URL", file_url)
    monkeypatch.chdir(tmp_path)
    return Command(file_url, capsys)


def test_a_csv_file_is_typed_by_the_task_and_what_holds_is_exported(
    spark: SparkSession, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "users.csv").write_text('user_id,zip,name\n1,00123,"a ""b"",\nc"\n3,00456,dan\n4,7,eve\n')
    process = ["spark", "process", "./users.csv", "./scores", "--task", f"{TASKS}:score", "--key", "user_id"]
    process += ["--key", "zip"]
    plan = command.json(*process, "--dry-run")["plan"]
    assert (plan["new"], plan["todo"]) == (3, 3)
    out = command(*process, "--workers", 1, "--export", "scores.csv", code=1)
    assert "2 completed, 1 failed, 0.04 usd" in out
    assert "1 rows have no result" in command.said
    assert "score: 3 of 3 done" in command.said

    schema = spark.read.parquet(str(tmp_path / "scores")).schema
    assert (schema["user_id"].dataType.simpleString(), schema["zip"].dataType.simpleString()) == (
        "bigint",
        "string",
    )
    with (tmp_path / "scores.csv").open(newline="") as file:
        rows = {row["user_id"]: row for row in csv.DictReader(file)}
    assert rows["1"]["zip"] == "00123"
    assert json.loads(rows["1"]["penstock_value"]) == {"points": 1.5, "label": 'A "B",\nC'}
    assert (rows["3"]["penstock_state"], rows["3"]["penstock_error"]) == ("failed", "no score for dan")
    assert rows["4"]["penstock_finished_at"].endswith("Z")

    # What has failed before is no better for being left alone, unless so much is said to be fine.
    command(*process, code=1)
    again = command.json(*process, "--max-failures", 1)
    assert (again["completed"], again["plan"]["done"], again["plan"]["failed"]) == (0, 2, 1)


def test_json_lines_are_input_output_and_ledger(command: Command, tmp_path: Path) -> None:
    lines = tmp_path / "numbers.jsonl"
    lines.write_text('{"k": "a", "n": 1}\n{"k": "b", "n": 2}\n')
    process = [
        "spark",
        "process",
        "./numbers.jsonl",
        "./doubled.json",
        "--task",
        f"{TASKS}:double",
        "--key",
        "k",
    ]
    first = command.json(*process, "--workers", 1, "--progress", "none")
    assert first["completed"] == 2
    lines.write_text('{"k": "a", "n": 1}\n{"k": "b", "n": 3}\n{"k": "c", "n": 4}\n')
    second = command.json(*process, "--workers", 1, "--export", "doubled.jsonl")
    plan = second["plan"]
    assert (plan["done"], plan["changed"], plan["new"], second["completed"]) == (1, 1, 1, 2)
    rows = [json.loads(line) for line in (tmp_path / "doubled.jsonl").read_text().splitlines()]
    assert {row["k"]: row["penstock_value"] for row in rows} == {"a": 2, "b": 6, "c": 8}
    assert all(row["penstock_usage"] == {} for row in rows)

    lines.write_text('{"k": 1, "n": 1}\n')
    command(*process, code=2)
    assert "has the key 'k' as string, but the table has it as bigint" in command.said


def test_catalog_tables_are_input_and_output_and_a_cost_cap_has_its_own_exit_code(
    spark: SparkSession, command: Command, database: str
) -> None:
    spark.range(5).selectExpr("id AS n").write.saveAsTable(f"{database}.numbers")
    process = ["spark", "process", f"table:{database}.numbers", f"table:{database}.spent"]
    process += ["--task", f"{TASKS}:spend", "--key", "n", "--workers", "1", "--concurrency", "1"]
    done = command.json(*process, "--max-cost", 2, code=7)
    assert done["stopped"] == "max_cost"
    assert 2 <= done["completed"] < 5
    assert "stopped by max_cost" in command.said
    command(*process)
    assert spark.table(f"{database}.spent").where("penstock_state = 'completed'").count() == 5


def test_what_cannot_be_is_refused_in_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text("user_id,name\n1,ada\nx7,bob\n")
    (tmp_path / "good.csv").write_text("user_id,name\n1,ada\n")
    (tmp_path / "torn.json").write_text('[\n{"user_id": 1,\n "name": "ada"}\n]\n')
    score = ["--task", f"{TASKS}:score", "--key", "user_id"]
    refusals: list[tuple[int, str, list[str]]] = [
        (2, "'user_id' must be bigint, but 1 rows have other values", ["./users.csv", "./out", *score]),
        (3, "/nothing.csv", ["./nothing.csv", "./out", *score]),
        (2, "--in-option multiLine=true", ["./torn.json", "./out", *score]),
        (2, "cannot be CSV", ["./users.csv", "./out.csv", *score]),
        (2, "the extension must be .csv", ["./users.csv", "./out", *score, "--export", "out.xlsx"]),
        (2, "no column 'id'", ["./good.csv", "./out", "--task", f"{TASKS}:score", "--key", "id"]),
        (3, "has no task", ["./users.csv", "./out", "--task", f"{TASKS}:nothing", "--key", "user_id"]),
        (3, "module 'nothing'", ["./users.csv", "./out", "--task", "nothing:at_all", "--key", "user_id"]),
        (2, "--schema", ["./users.csv", "./out", *score, "--schema", "user_id"]),
    ]
    for code, said, arguments in refusals:
        command("spark", "process", *arguments, code=code)
        assert said in command.said
        assert command.said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_history_is_synced_shown_and_made_a_page_and_jobs_are_archived(
    spark: SparkSession, command: Command, file_url: str, tmp_path: Path
) -> None:
    happen(file_url, seed=9, steps=30, queues=("mail",))
    first = command.json("history", "sync")
    assert first["events"] > 0
    assert history.tables(spark, tmp_path / "history").bronze.count() == first["events"]
    assert command("history", "sync").startswith("0 new events, in ")
    assert command("history", "report", "-o", "page.html", "--since", "1d") == "page.html\n"
    assert "</html>" in (tmp_path / "page.html").read_text()

    fill(file_url, "ended", completed=3, failed=1)
    assert command.json("archive", "ended", "./archive", "--older-than", "0s")["archived"] == 4
    assert spark.read.parquet(str(tmp_path / "archive")).count() == 4
    assert "ended: 0 jobs archived" in command("archive", "ended", "./archive", "--older-than", "0s")


def test_a_history_can_be_of_some_queues_and_a_part_at_a_time(
    spark: SparkSession, command: Command, file_url: str, tmp_path: Path
) -> None:
    for queue in ("mail", "main", "post"):
        fill(file_url, queue, waiting=10)
    sync = ["history", "sync", "./some", "--pattern", "mai.", "--upto", "bronze"]
    assert command.json(*sync, "--max-events", 7)["events"] == 7
    assert command.json(*sync)["events"] == 13
    events = history.tables(spark, tmp_path / "some").bronze
    assert {tuple(row) for row in events.groupBy("queue").count().collect()} == {("mail", 10), ("main", 10)}


def test_archives_go_into_a_table_of_the_catalog_with_their_journal_elsewhere(
    spark: SparkSession, command: Command, file_url: str, tmp_path: Path, database: str
) -> None:
    fill(file_url, "ended", completed=3, failed=2, waiting=1)
    archive = ["archive", "ended", f"table:{database}.archive", "--older-than", "0s"]
    command(*archive, code=2)
    assert "scratch" in command.said
    archive += ["--scratch", "./journal"]
    assert command.json(*archive, "--state", "completed")["archived"] == 3
    assert command.json(*archive, "--consumer", "nobody")["archived"] == 2
    assert command.json(*archive)["archived"] == 0
    archived = spark.table(f"{database}.archive")
    assert {tuple(row) for row in archived.groupBy("state").count().collect()} == {
        ("completed", 3),
        ("failed", 2),
    }
    assert list((tmp_path / "journal").iterdir())


def test_every_option_of_a_run_reaches_it(
    spark: SparkSession, command: Command, tmp_path: Path, database: str
) -> None:
    users = spark.range(5).selectExpr("id AS user_id", "concat('user', id) AS name", "id AS urgency")
    users.write.parquet(str(tmp_path / "users.data"))
    process = [
        "spark",
        "process",
        "./users.data",
        "./scores",
        "--in-format",
        "parquet",
        "--out-format",
        "json",
    ]
    process += ["--task", f"{TASKS}:score", "--key", "user_id", "--payload", "user_id", "--payload", "name"]
    process += ["--priority-column", "urgency", "--cost-name", "usd", "--progress", "none"]
    first = command.json(*process, "--fleet", "spark", "--fleet-size", "1", "--max-failures", "1")
    assert (first["completed"], first["failed"], first["cost"]) == (4, 1, pytest.approx(0.06))
    again = command.json(*process, "--retry-failed", "--workers", "1", code=1)
    assert (again["plan"]["done"], again["completed"], again["failed"]) == (4, 0, 1)

    users.selectExpr("user_id", "upper(name) AS name", "urgency").write.mode("overwrite").parquet(
        str(tmp_path / "users.data")
    )
    assert command.json(*process, "--dry-run", "--on-change", "keep")["plan"]["todo"] == 0
    command(*process, "--on-change", "error", code=2)
    assert "have results for another payload" in command.said

    process[3:4] = [f"table:{database}.scores", "--scratch", "./scratch"]
    done = command.json(*process, "--out-format", "parquet", "--workers", "1", "--limit", "2")
    assert done["completed"] == 2
    assert spark.table(f"{database}.scores").count() == 2
    assert (tmp_path / "scratch").exists()
