"""An S3 server on the loopback, in a process of its own: delta-rs holds Python's lock while it waits for an answer.

``python -m tests.spark.objectstore careless`` prints the port.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3  # type: ignore[import-untyped]

__all__ = ["object_store"]

BUCKET = "bucket"


@contextmanager
def object_store(*, is_careless: bool = False) -> Iterator[dict[str, str]]:
    """Yield delta-rs's options for a store with a bucket. A careless store ignores conditions that a put states."""
    command = [sys.executable, "-m", __name__, *(["careless"] if is_careless else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
            client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
            client.create_bucket(Bucket=BUCKET)
            client.close()
            yield {**keys, "aws_endpoint_url": url, "aws_region": "us-east-1", "aws_allow_http": "true"}
        finally:
            server.kill()


def main(*words: str) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application: Callable[..., Any] = DomainDispatcherApplication(create_backend_app)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if "careless" in words:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        return application(environ, start)

    server = make_server("127.0.0.1", 0, answer, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
