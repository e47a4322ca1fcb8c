"""The scripts in ``examples/`` are run as a user runs them, and their output is read."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock import App
from tests.spark.versions import needs_streams

# Spark takes its time to start, on a machine that has much to do more than that.
pytestmark = pytest.mark.timeout(300)

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str, folder: Path, **environment: str) -> str:
    """What a script prints, without line breaks that depend on the width of the terminal."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def number(pattern: str, said: str) -> float:
    found = re.search(pattern, said)
    assert found is not None, f"{pattern} is not in:\n{said}"
    return float(found[1])


def test_inference_keeps_to_its_cap_and_pays_for_no_ticket_twice(tmp_path: Path) -> None:
    said = run("inference.py", "--rows", "150", "--cap", "0.02", folder=tmp_path)
    assert "stopped by max_cost" in said
    assert "nothing is left to do" in said
    assert "Tickets it answered twice: 0." in said
    assert number(r"(\d+) × 200", said) == 147
    assert number(r"(\d+) × 429", said) > 0

    rows = pq.read_table(tmp_path / "penstock-inference/labels").to_pylist()
    assert sorted(row["ticket_id"] for row in rows) == list(range(150))
    assert Counter(row["penstock_state"] for row in rows) == {"completed": 147, "failed": 3}
    assert {row["penstock_error"] for row in rows if row["penstock_state"] == "failed"} == {
        "this is not talked about"
    }
    costs = [row["penstock_cost"] or 0 for row in rows]
    first = number(r"for (\S+) of at most 0\.02 USD", said)
    # Eight calls may be under way when the money is spent.
    assert 0.02 <= first < 0.02 + 8 * max(costs)
    assert sum(costs) == pytest.approx(first + number(r"for (\S+) of at most 0\.4 USD", said), abs=1e-4)
    assert sum(costs) == pytest.approx(number(r"It wants (\S+) USD", said), abs=1e-4)


@needs_streams
def test_streaming_makes_every_order_a_job_once_and_every_result_a_row_once(tmp_path: Path) -> None:
    said = run("streaming.py", "--orders", "80", folder=tmp_path)
    assert "80 rows of orders, 78 of quotes; 2 jobs failed: no carrier goes there." in said
    assert "128 rows of orders, 117 of quotes; 3 jobs failed: no carrier goes there." in said
    quotes = pq.read_table(tmp_path / "penstock-streaming/quotes").to_pylist()
    assert sorted(row["order_id"] for row in quotes) == [n for n in range(120) if n % 40 != 7]
    assert {row["order_id"]: row["price"] for row in quotes}[9] == 14.4
    log = App(f"sqlite:///{tmp_path}/penstock-streaming/penstock.db").sync
    assert (log.queue("orders").counts().completed, log.queue("orders").counts().failed) == (117, 3)
    log.close()


def test_orders_ends_with_a_line_for_every_order(tmp_path: Path) -> None:
    said = run("orders.py", "--jobs", "300", "--url", f"sqlite:///{tmp_path}/orders.db", folder=tmp_path)
    assert "Enqueued 300 jobs" in said
    assert "30 were duplicates and are not run twice" in said
    found = re.search(r"one line each: (\S+)", said)
    assert found is not None
    with Path(found[1]).open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert sorted(line["id"] for line in lines) == sorted(f"order-{n}" for n in range(300))
    refused = [line for line in lines if line["error"] == "no carrier goes there"]
    assert sorted(line["id"] for line in refused) == sorted(f"order-{n}" for n in range(7, 300, 50))
    assert all(line["result"] for line in lines if line["state"] == "completed")


@pytest.mark.slow
def test_the_demo_goes_all_the_way_and_pays_for_nothing_twice(tmp_path: Path) -> None:
    said = run("demo.py", "--rows", "300", folder=tmp_path, PENSTOCK_DEMO=str(tmp_path / "demo"))
    done, failed = number(r"(\d+) classified", said), number(r"classified, (\d+) failed", said)
    assert done + failed == 300
    assert failed >= 3
    assert re.search(rf"{done:.0f} were done before, 10 to do, for 0\.002\d USD", said), said
    assert "<title>Demo" in (tmp_path / "demo/report.html").read_text()
