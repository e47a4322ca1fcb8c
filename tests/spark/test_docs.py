"""The examples that need Spark, run as they stand in the one session of these tests: ``session()`` gives that one."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.docs.test_examples import PAGES, Example, examples

EXAMPLES = [example for page in PAGES for example in examples(page, "python spark")]


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.where for example in EXAMPLES])
def test_an_example_on_spark_prints_what_it_says(
    example: Example,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert SparkSession.getActiveSession() is not None
    exec(compile(example.code, example.where, "exec"), {"__name__": "__main__"})
    printed = iter(capsys.readouterr().out.splitlines())
    assert example.promised
    for line in example.promised:
        assert line in printed, f"{line!r} was not printed, or not in this order"
