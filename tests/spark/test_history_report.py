"""The page of a history, opened in a real browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import SparkSession

from penstock.core.job import NewJob, Options
from penstock.core.outcome import Complete, Fail, Failure
from penstock.errors import InvalidOption
from penstock.spark import history
from penstock.spark.history.html_page import figures
from penstock.spark.history.tables import open_history
from penstock.spark.store import Store
from penstock.storage.values import Settlement, Take
from tests.spark.busywork import happen

HOSTILE = "</script><img src=x onerror=\"document.documentElement.dataset.hacked='yes'\">"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

LOOK = (Path(__file__).with_name("look.js")).read_text()
ERRORS = "addEventListener('error', (event) => { document.title = 'ERROR ' + event.message; });"


class Report(NamedTuple):
    """A history with a page, and the events in it by type, in all and of one queue."""

    folder: Path
    page: Path
    types: Counter[str]
    of_mail: Counter[str]


@pytest.fixture(scope="module")
def report(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Report:
    root = tmp_path_factory.mktemp("page")
    url = f"sqlite:///{root}/jobs.db"
    happen(url, seed=4, steps=150, queues=("mail", "report"))
    with Store(url) as store:
        storage = store.storage
        store.run(storage.enqueue("mail", [NewJob("evil", b"1", Options(task="send"), priority=-5)]))
        (lease,) = store.run(storage.claim("mail", Take("<b>worker</b>", 1, 1000))).leases
        store.run(
            storage.settle(
                "mail", [Settlement(lease.id, lease.token, Fail(Failure("Evil", HOSTILE), final=True))]
            )
        )
        pages = {
            queue: store.run(storage.read_events(queue, after=0, limit=100_000))
            for queue in ("mail", "report")
        }
    types = {queue: Counter(str(event.type) for event in page.events) for queue, page in pages.items()}
    history.sync(url, root / "history", spark=spark)
    page = history.report(root / "history", root / "page.html", title="Ours & theirs")
    return Report(root / "history", page, types["mail"] + types["report"], types["mail"])


@pytest.fixture(scope="module")
def short(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history of 200 jobs that took a few seconds: 190 completed, 10 failed, all of them by one worker."""
    root = tmp_path_factory.mktemp("short")
    url = f"sqlite:///{root}/jobs.db"
    with Store(url) as store:
        storage = store.storage
        store.run(storage.enqueue("mail", [NewJob(f"j{n}", b"1", Options(task="send")) for n in range(200)]))
        leases = store.run(storage.claim("mail", Take("w", 200, 30_000))).leases
        store.run(storage.shift_clock("mail", 2_500))
        failed = Fail(Failure("ValueError", "no such address"), final=True)
        store.run(
            storage.settle(
                "mail",
                [Settlement(lease.id, lease.token, failed) for lease in leases[:10]]
                + [Settlement(lease.id, lease.token, Complete(b"1")) for lease in leases[10:]],
            )
        )
    history.sync(url, root / "history", spark=spark)
    return root / "history"


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip(f"no browser to look at the page with: one of {', '.join(BROWSERS)}")
    assert found, "CI is to have a browser"
    return found


def look(browser: str, page: Path, *, width: int = 1300, theme: str = "light") -> dict[str, Any]:
    """Open the page, do what ``LOOK`` does, and say what was seen."""
    watched = page.with_name("watched.html")
    text = (
        page.read_text()
        .replace("<head>", f"<head><script>{ERRORS}</script>")
        .replace("</body>", f"<script>{LOOK}</script></body>")
    )
    watched.write_text(text)
    profile = page.with_name("profile")
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--virtual-time-budget=3000",
    ]
    command = [browser, *flags, f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom"]
    run = subprocess.run(
        [*command, f"{watched.as_uri()}#{theme}"], capture_output=True, text=True, timeout=60, check=True
    )
    title = re.search(r"<title>(.*?)</title>", run.stdout)
    assert title
    assert not title[1].startswith("ERROR"), title[1]
    seen = re.search(r'<pre id="seen">(.*?)</pre>', run.stdout, re.DOTALL)
    assert seen, run.stdout[-2000:]
    answer: dict[str, Any] = json.loads(html.unescape(seen[1]))
    return answer


def test_the_page_shows_what_happened(report: Report, browser: str) -> None:
    seen = look(browser, report.page)
    assert seen["tiles"]["Completed"] == f"{report.types['completed']:,}"
    assert seen["tiles"]["Failed"] == f"{report.types['failed'] + report.types['expired']:,}"
    assert seen["mail"]["Completed"] == f"{report.of_mail['completed']:,}"
    assert seen["queues"] == ["", "mail", "report"]
    assert all(count > 0 for count in seen["drawn"].values()), seen["drawn"]
    assert all(tip for tip in seen["hover"].values()), seen["hover"]
    assert "ValueError" in seen["causes"]
    assert {"send", "resize", "score"} <= {
        name for name in ("send", "resize", "score") if name in seen["tasks"]
    }
    assert seen["ground"][0] != seen["ground"][1]
    assert seen["overflow"] is False


def test_the_page_is_whole_on_a_narrow_screen_and_in_the_dark(report: Report, browser: str) -> None:
    narrow = look(browser, report.page, width=520, theme="dark")
    light = look(browser, report.page, width=1300, theme="light")
    assert narrow["overflow"] is False
    assert narrow["ground"][0] == light["ground"][1]


def test_what_jobs_say_cannot_become_part_of_the_page(report: Report, browser: str) -> None:
    seen = look(browser, report.page)
    assert "Evil" in seen["causes"]
    assert "<b>worker</b>" in seen["workers"]
    assert seen["hacked"] is None


def test_the_page_requests_nothing_from_the_network(report: Report) -> None:
    text = report.page.read_text()
    without_data = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert "default-src 'none'" in without_data
    assert re.findall(r"https?://[^\"']+", without_data) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"\b(src|href)=", without_data)
    assert "Ours &amp; theirs" in without_data


def test_a_span_leaves_out_what_is_not_in_it(report: Report, browser: str) -> None:
    page = history.report(
        report.folder, report.page.with_name("later.html"), since="2100-01-01", until="2101-01-01"
    )
    assert look(browser, page)["tiles"]["Completed"] == "0"


def test_a_short_span_is_shown_by_the_second(short: Path, browser: str) -> None:
    seen = look(browser, history.report(short, short.with_name("short.html")))
    assert seen["per"] == "jobs per second"
    assert seen["tiles"]["Completed"] == "190"
    assert seen["tiles"]["Failed"] == "10"
    assert "200 at most" in seen["text"]
    assert seen["keyed"]
    assert "busy" in seen["text"]


def test_seconds_add_up_to_the_minutes_of_gold(short: Path) -> None:
    opened = open_history(short, create=False)
    found = figures(opened, since_ms=0, until_ms=1 << 60)
    series = found["series"]["mail"]
    assert found["grain"] == "second"
    assert {name: sum(series[name]) for name in ("enqueued", "completed", "failed")} == {
        "enqueued": 200,
        "completed": 190,
        "failed": 10,
    }
    assert max(value for value in series["backlog_max"] if value is not None) == 200
    assert series["backlog"][-1] == 0
    (worker,) = found["workers"]
    assert worker["busy_ms"] == sum(task["run_ms"] for task in found["tasks"]) > 0
    assert sum(worker["busy"]) * found["length"] == pytest.approx(worker["busy_ms"])


def test_charts_have_labels_for_screen_readers_and_even_ticks_that_do_not_overlap(
    report: Report, browser: str
) -> None:
    for width in (520, 1300):
        seen = look(browser, report.page, width=width)
        assert [label.split(":")[0].split(",")[0] for label in seen["labels"]] == [
            "Throughput",
            "Wait time",
            "Run time",
            "Backlog",
        ]
        assert seen["overlaps"] == 0
        assert seen["uneven"] == 0
        assert seen["ragged"] is False
        assert not re.search(r"\de\+|NaN|undefined|Infinity", seen["text"])


def test_a_history_without_gold_has_no_page(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    happen(url, seed=4, steps=5)
    history.sync(url, tmp_path / "history", spark=spark, upto="bronze")
    with pytest.raises(InvalidOption, match="no gold yet"):
        history.report(tmp_path / "history", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_an_invalid_time_is_refused(report: Report) -> None:
    with pytest.raises(InvalidOption, match="since must be an ISO 8601 time"):
        history.report(report.folder, report.page.with_name("soon.html"), since="soon")
