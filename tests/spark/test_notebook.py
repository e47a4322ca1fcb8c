"""``process`` in a notebook: a task of a cell, workers in the kernel, progress and a summary that render."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import nbclient
import nbformat
import pytest

CELLS = [
    """
    import pandas as pd
    import penstock.spark as ps
    from penstock import App, JobContext
    from tests.spark.quick import QUICK

    spark = ps.session(cores=2, memory="1g", config=QUICK)
    app = App("sqlite:///jobs.db")
    factor = 2


    @app.task(queue="doubles", attempts=1)
    async def double(n: int, context: JobContext) -> int:
        context.use(usd=0.5)
        if n == 3:
            raise ValueError("three is refused")
        return factor * n


    @app.task(queue="doubles", attempts=1)
    def spell(n: int) -> str:
        return str(factor * n)
    """,
    """
    table = pd.DataFrame({"k": ["a", "b", "c"], "n": [1, 2, 3]})
    done = ps.process(table, double, key="k", output="doubles", workers=1)
    """,
    "done",
    "done.joined.orderBy('k').toPandas()[['k', 'n', 'penstock_state', 'penstock_value']].to_csv(index=False)",
    # A cell of its own, in which a loop is used as well: the kernel's.
    """
    import asyncio

    await asyncio.sleep(0)
    ps.process(table, spell, key="k", output="spelled", workers=2, progress="none").completed
    """,
    """
    factor = 7
    table.loc[2, "n"] = 4
    again = ps.process(table, double, key="k", output="doubles", workers=1, progress="none")
    (again.completed, [row.penstock_value for row in again.joined.orderBy("k").collect()])
    """,
    # The cell of a task that is run again, with other code.
    """
    @app.task(queue="doubles", attempts=1)
    def spell(n: int) -> str:
        return "again"


    again = ps.process(table, spell, key="k", output="spelled", workers=1, progress="none")
    [row.penstock_value for row in again.joined.where("n = 4").collect()]
    """,
    "spark.stop()",
]


@pytest.mark.timeout(300)
def test_a_task_of_a_cell_runs_on_every_row_and_the_summary_renders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    source = [nbformat.v4.new_code_cell(dedent(cell).strip("\n")) for cell in CELLS]
    notebook: Any = nbformat.v4.new_notebook(cells=source)
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    _, shown, summary, joined, spelled, again, defined, _ = [cell["outputs"] for cell in notebook.cells]
    (progress,) = [output for output in shown if output["output_type"] == "display_data"]
    assert "<progress max='3' value='3'>" in progress["data"]["text/html"]
    assert "3 of 3 done, 1 failed" in progress["data"]["text/plain"]
    assert "<td>completed</td><td>2</td>" in summary[0]["data"]["text/html"].replace("\n", "")
    assert "2 completed, 1 failed" in summary[0]["data"]["text/plain"]
    assert _text(joined) == repr(
        "k,n,penstock_state,penstock_value\na,1,completed,2.0\nb,2,completed,4.0\nc,3,failed,\n"
    )
    assert _text(spelled) == "3"
    assert _text(defined) == "['again']"
    assert not [output for output in shown if output["output_type"] == "stream"]
    assert _text(again) == "(1, [2, 4, 28])"


def _text(outputs: list[Any]) -> str:
    (found,) = [output for output in outputs if output["output_type"] == "execute_result"]
    return str(found["data"]["text/plain"])
