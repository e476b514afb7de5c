# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` to measure, in a process of its own: a tiny model on a CPU, or one of any shape.

    with served(args, "--enable-steering") as (server, model):
        server.post("/v1/completions", {"prompt": [1, 2, 3]})

Without `--model`: a tiny random Llama in float32, eager. With it: a model of that folder's
config.json, in bfloat16, with graphs; nothing else is read of the folder, weights are random
(`benchmarks.random_weights`) and tokens are single letters.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engines import ROOT, model_shape

if TYPE_CHECKING:
    from tests.http.server import Server

UNATTENDED = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles where it runs; the host may have no compiler
}
"""Of a server on a GPU host."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a folder with config.json")
    parser.add_argument("--eager", action="store_true", help="no compilation, no graphs")
    parser.add_argument("--kv-bytes", type=int, help="default: 8 GiB with a model, else 512 MiB")


@contextmanager
def served(args: argparse.Namespace, *options: str) -> Iterator[tuple[Server, dict[str, Any]]]:
    """A server, and the shape of its model.

    Args:
        options: of `vllm serve`, beside what every benchmark has.
    """
    kv_bytes = args.kv_bytes or (8 << 30 if args.model else 512 << 20)
    # Or the server would outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    base = [*options, "--seed=0", f"--kv-cache-memory-bytes={kv_bytes}"]
    base.append("--disable-uvicorn-access-log")  # its lines would hide what a dying server says
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        model = Path(folder) / "model"
        if args.model is None:
            from tests.conformance.engine import prepare_environment

            prepare_environment("v1")
            from tests.conftest import TinyModels
            from tests.http.server import save_model, serve

            save_model(TinyModels(), model)
            base += ["--dtype=float32", "--enforce-eager"]
        else:
            from tests.http.server import save_tokenizer, serve

            os.environ.update(UNATTENDED)
            model.mkdir()
            shutil.copy(args.model / "config.json", model)
            save_tokenizer(model)
            base += ["--dtype=bfloat16", "--load-format=benchmark"]
            base += ["--worker-extension-cls=benchmarks.engine_worker.EngineWorker"]
            base += ["--enforce-eager"] if args.eager else []
        import vllm

        path = os.pathsep.join([str(Path(vllm.__file__).parents[1]), str(ROOT)])
        log = Path(folder) / "server.log"
        with serve(model, log, base=tuple(base), env={"PYTHONPATH": path}) as server:
            try:
                yield server, model_shape(model)
            except BaseException:
                sys.stderr.write(log.read_text()[-4000:])  # should the server have died
                raise
