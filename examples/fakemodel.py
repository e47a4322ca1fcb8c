"""A stand-in for a hosted language model: chat completions over HTTP, on the loopback, with limits and a bill.

    python examples/fakemodel.py [--port 8765]

``POST /v1/chat/completions`` answers like the real ones: with a message and the tokens it took; with 429 and
``Retry-After`` when its bucket of tokens is empty; with 503 now and then; with 400 for what it will not talk about.
``GET /bill`` tells what it has answered, and for how much.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from zlib import crc32

PROMPT_USD: Final = 3e-6
COMPLETION_USD: Final = 15e-6
LATENCY_S: Final = 0.05
LABELS: Final = {"refund": "billing", "password": "account", "parcel": "delivery", "crash": "bug"}


class TokenBucket:
    """Holds up to ``capacity`` tokens, and fills up again by ``per_second``."""

    def __init__(self, capacity: int, per_second: int) -> None:
        self._capacity = capacity
        self._per_second = per_second
        self._level = float(capacity)
        self._filled_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, tokens: int) -> float:
        """Take them, and return 0; or take none, and return the seconds until enough are there."""
        with self._lock:
            now = time.monotonic()
            self._level = min(self._level + (now - self._filled_at) * self._per_second, float(self._capacity))
            self._filled_at = now
            if self._level >= tokens:
                self._level -= tokens
                return 0.0
            return (tokens - self._level) / self._per_second


@dataclass
class Bill:
    """Counts of requests and their price. ``answers`` counts by prompt: none should be answered twice."""

    statuses: Counter[int] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    usd: float = 0.0

    def told(self) -> dict[str, Any]:
        return {
            "statuses": dict(sorted(self.statuses.items())),
            "answered": self.answers.total(),
            "answered_twice": sum(count > 1 for count in self.answers.values()),
            "tokens": self.tokens,
            "usd": round(self.usd, 6),
        }


class FakeModel:
    """Serves within a ``with`` block, at ``url``."""

    def __init__(self, *, port: int = 0, capacity: int = 800, per_second: int = 1500) -> None:
        self._bucket = TokenBucket(capacity, per_second)
        self._bill = Bill()
        self._stumbled: set[str] = set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
        self._server.model = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeModel:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bill(self) -> dict[str, Any]:
        with self._lock:
            return self._bill.told()

    def complete(self, prompt: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, body and headers of the answer to a prompt."""
        status, body, headers = self._complete(prompt)
        with self._lock:
            self._bill.statuses[status] += 1
        return status, body, headers

    def _complete(self, prompt: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        if "lottery" in prompt:
            return HTTPStatus.BAD_REQUEST, _error("content_filter", "this is not talked about"), {}
        if self._stumbles(prompt):
            return HTTPStatus.SERVICE_UNAVAILABLE, _error("overloaded", "try again"), {}
        label = next((label for word, label in LABELS.items() if word in prompt), "other")
        content = json.dumps({"label": label, "urgent": "at once" in prompt})
        prompt_tokens, completion_tokens = _tokens(prompt), _tokens(content) + crc32(prompt.encode()) % 16
        wait_s = self._bucket.take(prompt_tokens + completion_tokens)
        if wait_s:
            after = {"Retry-After": str(math.ceil(wait_s))}
            return HTTPStatus.TOO_MANY_REQUESTS, _error("rate_limit", "too many tokens"), after
        time.sleep(LATENCY_S)
        with self._lock:
            self._bill.answers[prompt] += 1
            self._bill.tokens += prompt_tokens + completion_tokens
            self._bill.usd += prompt_tokens * PROMPT_USD + completion_tokens * COMPLETION_USD
        return HTTPStatus.OK, _completion(content, prompt_tokens, completion_tokens), {}

    def _stumbles(self, prompt: str) -> bool:
        """One prompt in twenty is answered only when it is asked a second time."""
        with self._lock:
            if crc32(prompt.encode()) % 20 or prompt in self._stumbled:
                return False
            self._stumbled.add(prompt)
            return True


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(*self._model.complete(asked["messages"][-1]["content"]))

    def do_GET(self) -> None:
        self._answer(HTTPStatus.OK, self._model.bill(), {})

    @property
    def _model(self) -> FakeModel:
        model: FakeModel = self.server.model  # type: ignore[attr-defined]
        return model

    def _answer(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            **headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _tokens(text: str) -> int:
    return math.ceil(len(text) / 4)


def _completion(content: str, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "object": "chat.completion",
        "model": "fake-1",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=8765)
    with FakeModel(port=parser.parse_args().port) as model:
        print(f"{model.url}/v1/chat/completions", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
