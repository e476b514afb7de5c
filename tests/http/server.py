# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` in a process of its own, on a tiny random Llama with a tokenizer of single
characters and a chat template."""

from __future__ import annotations

import os
import shutil
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import transformers
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from tests.support.warm import Running, Warm

if TYPE_CHECKING:
    from tests.conftest import TinyModels

SECRET = "planted-secret"
"""An option of a consumer that no log may have."""
KEY = "let-me-steer"
NAME = "tiny"
MAIN = "vllm.entrypoints.cli.main"
START_SECONDS = 1200.0
"""A deadline, not a wait: on a busy machine its processes import for minutes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
OPTIONS = (
    "--enable-steering", "--max-steering-configs=8", "--capture-consumers=inline",
    "--steering-families", "add", "ablate", "replace", "clamp", "scale", "gate",
    "--dtype=float32", "--enforce-eager", "--max-model-len=96", "--max-num-seqs=8",
    "--block-size=32", "--kv-cache-memory-bytes=16777216", "--seed=0", "--max-logprobs=-1",
    f"--served-model-name={NAME}", "--generation-config=vllm",
)  # fmt: skip

CUDA_OPTIONS = ("--gpu-memory-utilization=0.05",)
"""Further options on a GPU, of which `--kv-cache-memory-bytes` takes a part."""


def save_model(tiny_models: TinyModels, folder: Path) -> Path:
    """The tiny Llama with a tokenizer, in `folder`."""
    shutil.copytree(tiny_models.path("llama"), folder, dirs_exist_ok=True)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters, with a chat template, in `folder`."""
    vocabulary = {c: i for i, c in enumerate(string.ascii_letters + string.digits + " .,:\n")}
    backend = Tokenizer(WordLevel({**vocabulary, "<unk>": len(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)


@dataclass
class Server:
    url: str
    log: Path
    process: Running

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=300)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=300)

    def complete(self, prompt: Any = "Today I went", **fields: Any) -> dict[str, Any]:
        """The answer to a greedy completion of 6 tokens."""
        answer = self.post("/v1/completions", greedy(prompt=prompt, **fields))
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def change(self, path: str, body: Any) -> httpx.Response:
        return self.post(path, body, **{"X-Steering-Key": KEY})


def greedy(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields}


def start(
    model: Path,
    log: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    base: tuple[str, ...] = OPTIONS,
    cold: bool = False,
) -> Running:
    """`vllm serve` in a process of its own, which writes to `log`.

    Args:
        cold: in a new Python, which spawns others, as users start it: tests/support/warm.py.
    """
    import vllm  # late: `tests.http.fuzz` prepares its environment first

    settings = {
        **os.environ,
        "PYTHONPATH": str(Path(vllm.__file__).parents[1]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_STEERING_API_KEY": KEY,
        **(env or {}),
    }
    arguments = ["serve", str(model), *base, *options]
    if not cold:
        log.unlink(missing_ok=True)
        return Warm(MAIN, arguments, log, log, settings, Path.cwd())
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", MAIN, *arguments],
            env=settings,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def stop(process: Running) -> None:
    """End it, by force if it does not."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port of this host that nobody has now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serve(
    model: Path,
    log: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    base: tuple[str, ...] = OPTIONS,
    cold: bool = False,
) -> Iterator[Server]:
    """A server that answers, stopped at the end; see `start`."""
    port = free_port()
    listening = ("--host=127.0.0.1", f"--port={port}")
    process = start(model, log, *options, *listening, env=env, base=base, cold=cold)
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        wait_for(server)
        yield server
    finally:
        stop(process)


def wait_for(server: Server) -> None:
    """Wait until it answers.

    Raises:
        RuntimeError: it ended.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{server.log.read_text()[-4000:]}")
        try:
            if server.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
