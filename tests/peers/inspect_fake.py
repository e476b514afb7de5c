# SPDX-License-Identifier: Apache-2.0
"""A server that answers as `vllm serve` with inline capture does, of a model of any size at once.

What it captures is told by the request: the text of the prompt and the vector, so that an answer
says which request it is of.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from vllm.entrypoints.serve.steering.client import pack, unpack

LAYERS, HIDDEN = 32, 4096
"""Of a Llama of 8B."""
TOGETHER = 64
BUSY, CROWD = "busy", "crowd"
"""Prompts that begin so are turned away twice, and answered when `TOGETHER` of them wait."""


def row_of(prompt: str, layer: int) -> np.ndarray:
    """The row of a layer at the last token, float16 [HIDDEN]."""
    seed = int.from_bytes(hashlib.sha256(f"{prompt}/{layer}".encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(HIDDEN).astype(np.float16)


def captured(prompt: str, body: dict[str, Any]) -> dict[str, Any]:
    vectors = body.get("steering_vectors", {}).get("post_block", {})
    payload = []
    for layer in range(LAYERS):
        row = row_of(prompt, layer)
        if (entry := vectors.get(str(layer))) is not None:
            row = (row + entry["scale"] * unpack(entry["vector"])).astype(np.float16)
        at = {"point": "post_block", "layer": layer, "positions": [7], "token_ids": [3]}
        payload.append({**at, **pack(row[None])})
    return {"inline": {"status": "ok", "error": None, "payload": payload}}


class Answers(BaseHTTPRequestHandler):
    """Chats, whatever the path."""

    protocol_version = "HTTP/1.1"
    server: Fake

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "big", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked[prompt] = self.server.asked.get(prompt, 0) + 1
            turned_away = prompt.startswith(BUSY) and self.server.asked[prompt] <= 2
        if turned_away:
            self._send(503, {"error": {"message": "busy", "type": "x", "param": None, "code": 503}})
            return
        if prompt.startswith(CROWD):
            self.server.crowd.wait(120)
        choices = [
            {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
            for i in range(body.get("n") or 1)
        ]
        if "capture" in body:
            choices = [{**c, "capture_results": captured(prompt, body)} for c in choices]
        usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "big"}
        self._send(200, {**answer, "choices": choices, "usage": usage})

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Fake(ThreadingHTTPServer):
    """The server; `asked` counts requests by prompt."""

    daemon_threads = True
    request_queue_size = 2 * TOGETHER

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: dict[str, int] = {}
        self.lock = threading.Lock()
        self.crowd = threading.Barrier(TOGETHER)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"
